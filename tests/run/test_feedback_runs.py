"""Recipes with other feedback in whole runs: they train, and go on to the bit."""

import math
from typing import Any

import pytest

from flowrl.session.progress import Progress
from tests.support import process_runs, runs
from tests.support.iterations import iterate

SMALL: dict[str, dict[str, Any]] = {
    "flow_dppo": {"noisy": 1},
    "dgpo": {"levels_per_sample": 2, "switch": 1, "beta": 10.0},
    "crd": {"levels_per_sample": 2, "temperature": 0.5},
    "fdfo": {"gamma": 0.1},
    "flash_grpo": {"kernel": "wan"},
    "e_grpo": {"share": 0.75},
    "g2rpo": {"at": [0, 1]},
    "euphonium": {"first": 1, "fraction": 1.0},
    "branch_grpo": {"at": [0, 1], "fusion": "likely_paths", "depth_weight": 1.0, "siblings": 0.5},
    "branch_grpo_mix": {"at": [0], "window": 1, "moving": True},
    "flow_grpo": {"credit": "aapo", "blend": 0.5},
    "dense_grpo": {"completion": 2},
    "turning_point": {"eta": 0.5, "form": "paper", "strict": True},
    "vgpo": {},
    "pro_grpo": {"start": 8, "keep": [6, 4], "at": [1, 2]},
    "potential_tree": {"at": [0, 1]},
}
NO_GROUP = ("branch_grpo", "branch_grpo_mix", "pro_grpo", "potential_tree")


def settings(name: str) -> dict[str, Any]:
    group = {} if name in NO_GROUP else {"group": 4}
    return {"name": name, "steps": 4, **group, **SMALL[name]}


def quick(*names: str) -> list[Any]:
    return [pytest.param(n, marks=() if n in names else pytest.mark.slow) for n in SMALL]


@pytest.mark.quick_cases("flow_dppo")
@pytest.mark.parametrize("name", quick("flow_dppo", "euphonium"))
def test_a_recipe_trains(pipeline, tmp_path, name):
    kept = runs.session(pipeline, tmp_path, settings(name), updates=2, lr=1e-3)
    progress = Progress()
    before = [p.detach().clone() for p in kept.learner.policies.parameters.values()]
    metrics = [iterate(kept, progress).metrics for _ in range(2)]
    after = kept.learner.policies.parameters.values()
    assert any((a != b).any() for a, b in zip(before, after, strict=True))
    assert all(math.isfinite(m["loss"]) and m["grad_norm"] > 0 for m in metrics)
    if name == "flow_dppo":
        assert metrics[0]["ratio_max"] > 1 and metrics[0]["divergence"] > 0
    if name == "crd":
        assert metrics[1]["implicit_reward"] != 0
    if name == "euphonium":
        assert 0 < metrics[0]["guide/moved"] < 10


@pytest.mark.parametrize("name", quick())
def test_a_resumed_run_ends_with_the_same_bits(pipeline, tmp_path, name):
    tree = runs.tree(pipeline, tmp_path, settings(name), iterations=2, updates=2, self_test="off")
    runs.check_resumed_bits(tree, tmp_path)


@pytest.mark.slow
def test_two_processes_do_what_one_does(pipeline, tmp_path):
    """Two draws for the first process and one for the second; one process in small chunks."""
    jobs: dict[str, process_runs.Job] = {}
    for name in SMALL:
        tree = runs.tree(pipeline, tmp_path, settings(name), updates=2, lr=1e-3)
        tree["model"]["dtype"], tree["prompts"]["per_iteration"] = "float64", 3
        jobs[name] = {"settings": tree, "iterations": 2}
    process_runs.check_two_as_one(jobs, tmp_path, apart_below=1e-10)
