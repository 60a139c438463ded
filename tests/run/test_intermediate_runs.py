"""Runs with scores on the way: what they cost as planned and as counted, refusals, abstentions."""

import json
from typing import Any

import pytest
import torch

from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.run.calibrate import calibrate, recalibrated
from flowrl.session.progress import Progress
from samplers import evaluations
from tests.support import runs
from tests.support.iterations import collect, iterate
from tests.support.routes import looks_of

ABSTAINS = """
def promising(samples):
    light = samples.media.flatten(1).mean(1)
    with open({log!r}, "a") as file:
        file.write(f"{{len(light)}}\\n")
    return [None if i % 3 == 0 else float(x) for i, x in enumerate(light)]

def plain(samples):
    with open({log!r} + ".plain", "a") as file:
        file.write(f"{{len(samples.media)}}\\n")
    return samples.media.flatten(1).mean(1)
"""
LEVELS = [1.0, 0.75, 0.5, 0.25]


def tree(pipeline, folder, recipe: dict[str, Any], **more: Any) -> dict[str, Any]:
    log = folder / "calls"
    (folder / "own.py").write_text(ABSTAINS.format(log=str(log)))
    built = runs.tree(pipeline, folder, {"steps": 4, **recipe}, self_test="off")
    built["rewards"] = [{"name": f"{folder / 'own.py'}:plain"}]
    built["model"]["sigmas"] = LEVELS
    built["evaluate"]["steps"] = 4
    return built | more


def counted(path) -> int:
    return sum(int(line) for line in path.read_text().split()) if path.exists() else 0


@pytest.mark.parametrize(
    "recipe",
    [
        {"name": "dense_grpo", "group": 4},
        pytest.param({"name": "dense_grpo", "group": 4, "completion": 2}, marks=pytest.mark.slow),
        pytest.param({"name": "vgpo", "group": 4}, marks=pytest.mark.slow),
        pytest.param(
            {"name": "pro_grpo", "start": 8, "keep": [6, 4], "at": [1, 2]}, marks=pytest.mark.slow
        ),
        pytest.param({"name": "potential_tree", "at": [0, 1]}, marks=pytest.mark.slow),
    ],
)
def test_the_costs_are_those_planned(pipeline, tmp_path, monkeypatch, recipe):
    kept = runs.opened(tree(pipeline, tmp_path, recipe), tmp_path)
    decoded, real = [0], PipelinePolicy.decode

    def decode(self, x0, *args, **named):
        decoded[0] += len(x0)
        return real(self, x0, *args, **named)

    monkeypatch.setattr(PipelinePolicy, "decode", decode)
    metrics = collect(kept, 0).metrics
    plans = kept.algorithm.plan((*LEVELS, 0.0), 0, 0)
    draws = 2
    wanted = draws * sum(plan.group + plan.predicted for plan in plans)
    assert metrics["count/sampling"] == draws * evaluations(plans)
    assert metrics["count/scored"] == decoded[0] == counted(tmp_path / "calls.plain") == wanted


@pytest.mark.slow
def test_a_reward_on_the_way_may_abstain(pipeline, tmp_path):
    """Every third node is not judged: nothing fails, and the others teach."""
    own = [{"name": f"{tmp_path / 'own.py'}:promising", "weight": 2.0}]
    recipe = {"name": "potential_tree", "at": [0, 1], "weight": 0.5}
    kept = runs.opened(tree(pipeline, tmp_path, recipe, intermediate_rewards=own), tmp_path)
    found = collect(kept, 0)
    (plan,) = kept.algorithm.plan((*LEVELS, 0.0), 0, 0)
    assert looks_of(plan).at == (1, 2) and counted(tmp_path / "calls") == 2 * plan.predicted == 12
    # 2 + 4 nodes a draw, 4 leaves: of nodes 0 and 3 of 4 each two leaves, of 0, 3, 6 of 8 one each
    assert found.metrics["unscored_way"] == pytest.approx((4 / 8 + 3 / 8) / 2)
    assert found.metrics["unscored"] == 0 and set(found.scores.names) == {"plain"}
    assert all(rows.mask.all() for rows in found.rows)
    settings = tree(pipeline, tmp_path, recipe | {"weight": 0.0})
    after = collect(runs.opened(settings, tmp_path), 0).rows
    differs = [
        bool((a.advantage != b.advantage).any()) for a, b in zip(found.rows, after, strict=True)
    ]
    # one judged node behind step 0 has no mean to differ from; behind step 2 are the samples
    assert differs == [False, True, False]


@pytest.mark.slow
def test_particles_and_shrinking_groups_ask_the_rewards_on_the_way(pipeline, tmp_path):
    own = [{"name": f"{tmp_path / 'own.py'}:promising"}]
    thin = {"name": "pro_grpo", "start": 6, "keep": [4], "at": [2]}
    steered = {"name": "nft", "group": 4, "levels_per_sample": 2}
    steer = {"iterations": [0, 2], "at": [1, 2]}
    for recipe, more, asked in ((thin, {}, 12), (steered, {"steer": steer}, 16)):
        for name in ("calls", "calls.plain"):
            (tmp_path / name).unlink(missing_ok=True)
        settings = tree(pipeline, tmp_path, recipe, intermediate_rewards=own, **more)
        metrics = collect(runs.opened(settings, tmp_path), 0).metrics
        assert counted(tmp_path / "calls") == asked and counted(tmp_path / "calls.plain") == 8
        assert metrics["unscored"] == 0 and metrics["count/scored"] == asked + 8


@pytest.mark.slow
def test_a_judge_compares_states_of_one_step(pipeline, tmp_path):
    settings = tree(pipeline, tmp_path, {"name": "dense_grpo", "group": 4, "completion": 2})
    settings["rewards"] = [{"name": "win_rate", "judge": "brightness"}]
    found = collect(runs.opened(settings, tmp_path), 0)
    way = found.scores.intermediate
    assert way.scored[:, :3].all() and not way.scored[:, 3].any()
    means = way.values[:, :3].view(2, 4, 3).mean(1)
    torch.testing.assert_close(means, torch.full_like(means, 0.5))


@pytest.mark.slow
def test_a_run_with_rewards_on_the_way_resumes_to_the_bit(pipeline, tmp_path):
    settings = tree(pipeline, tmp_path, {"name": "potential_tree", "at": [0, 1]})
    settings["intermediate_rewards"] = [{"name": f"{tmp_path / 'own.py'}:promising"}]
    settings["train"] |= {"iterations": 2}
    config, ends = runs.write(settings, tmp_path), []
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert runs.flowrl("train", config, "--folder", whole) == 0
    assert runs.flowrl("train", config, "--folder", broken, "--train.iterations", "1") == 0
    assert runs.flowrl("train", "--resume", broken, "--train.iterations", "2") == 0
    for run in (whole, broken):
        ends.append((run / "checkpoints" / "000002" / "policies.safetensors").read_bytes())
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"intermediate_rewards": ["brightness"]},
            "subtracts intermediate rewards from the samples' rewards",
        ),
        ({"budget": {"subset": 2}}, "budget.subset needs one score per sample"),
        ({"budget": {"replay": 1}}, "budget.replay needs one score per sample"),
        ({"intermediate_rewards": ["brightness", "brightness"]}, "are not unique"),
        (
            {"recipe": {"name": "potential_tree"}, "intermediate_rewards": ["brightnes"]},
            "intermediate_rewards: there is no reward 'brightnes'",
        ),
        (
            {"recipe": {"name": "flow_grpo"}, "intermediate_rewards": ["brightness"]},
            "does not score intermediate states",
        ),
        (
            {"recipe": {"name": "dense_grpo", "noise": [0.1, 0.2]}},
            "2 numbers does not fit 10 steps",
        ),
        ({"recipe": {"name": "pro_grpo", "at": [5, 12]}}, "stopped before the steps [12]"),
        ({"recipe": {"name": "pro_grpo", "keep": [24, 50]}}, "group sizes must decrease from 48"),
        ({"recipe": {"name": "dense_grpo", "completion": 0}}, "a completion needs at least 1 step"),
        ({"steer": {"iterations": [0, 1]}}, "particles are not credited by step"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(pipeline, tmp_path, capsys, more, words):
    settings = tree(pipeline, tmp_path, {"name": "dense_grpo", "group": 4})
    del settings["model"]["sigmas"]
    assert runs.flowrl("plan", runs.write(settings | more, tmp_path)) in (1, 2)
    said = capsys.readouterr()
    assert (said.err + said.out).count(words) == 1


def test_noise_grows_where_gains_are_balanced():
    table = recalibrated((0.5, 0.5, 0.015), (10, 12, 20), (9, 10, 0), within=2, by=0.01)
    assert table == pytest.approx((0.51, 0.49, 0.01))


@pytest.mark.slow
def test_the_noise_is_calibrated(pipeline, tmp_path, capsys):
    settings = tree(pipeline, tmp_path, {"name": "dense_grpo", "group": 4, "eta": 0.7})
    kept = runs.opened(settings, tmp_path)
    before = [p.detach().clone() for p in kept.learner.policies.parameters.values()]
    first, second = calibrate(kept, 2, within=2, by=0.01)
    assert second.table == first.then != first.table and len(first.table) == 3
    for k in range(3):
        assert 0 < first.above[k] + first.below[k] <= 8
        step = 0.01 if abs(first.above[k] - first.below[k]) < 2 else -0.01
        assert first.then[k] == pytest.approx(first.table[k] + step)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, kept.learner.policies.parameters.values(), strict=True)
    )
    config = runs.write(settings, tmp_path)
    capsys.readouterr()
    assert runs.flowrl("calibrate", config, "--rounds", "2") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    noise = json.loads(last.split("noise: ")[1].rstrip("}"))
    assert noise == pytest.approx(second.then, rel=1e-3)
    more = ("--recipe.noise", json.dumps(noise))
    assert runs.flowrl("plan", config, *more) in (0, 1)
    other = runs.write(settings | {"recipe": {"name": "flow_grpo", "steps": 4}}, tmp_path)
    assert runs.flowrl("calibrate", other) == 2
    assert "no chains with intermediate rewards" in capsys.readouterr().err


@pytest.mark.slow
def test_the_first_ratio_is_one(pipeline, tmp_path):
    kept = runs.opened(tree(pipeline, tmp_path, {"name": "turning_point", "group": 4}), tmp_path)
    metrics = iterate(kept, Progress()).metrics
    assert metrics["ratio_min"] == pytest.approx(1, abs=1e-4) == metrics["ratio_max"]
    assert metrics["grad_norm"] > 0 and metrics["mismatch"] < 1e-5
