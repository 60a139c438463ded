"""Advice of checks of settings, files and packages is followed: the next check is not refused for
the same reason."""

import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate.tracking
import pytest
import yaml

from flowrl.settings import RunSettings
from flowrl.settings.checks import machine
from flowrl.settings.checks.machine import (
    check_kind,
    check_language,
    check_optimizer,
    check_start_samples,
    check_trackers,
    check_workers,
    refuse_scheduler,
)
from flowrl.settings.file.inherit import read_tree
from flowrl.settings.read import check_named_rewards, check_plan, run_from
from flowrl.settings.sections.data import IN_PYTHON
from tests.run.test_own_runs import GRPO, tree
from tests.support import runs, text_runs, tiny_lm
from tests.support.advice import advice
from tests.support.imports import forget_module


def planned(settings: dict[str, Any]) -> RunSettings:
    run = run_from(settings, "test")
    check_plan(run)
    return run


def test_a_scheduler_s_steps_become_a_kernel_of_one_s_own_model(tmp_path: Path) -> None:
    """The message writes the kernel out."""
    kernel = yaml.safe_load("{name: cps, eta: 1}")
    run = advice(
        "kernel: scheduler: {} is your own model, which has no scheduler: use kernel: {name: cps, "
        "eta: 1}, which draws fresh noise around the predicted sample at every step",
        lambda: planned(tree(tmp_path, GRPO | {"kernel": "scheduler"})),
        lambda: planned(tree(tmp_path, GRPO | {"kernel": kernel})),
    )
    refuse_scheduler(run.algorithm().plans, "Points")  # type: ignore[arg-type]


def test_given_samples_need_a_pipeline(tmp_path: Path) -> None:
    matching = {"name": "rwr", "steps": 4, "group": 2, "anchor": 0.0}
    settings = tree(tmp_path, matching)
    advice(
        "given: samples are encoded by a pipeline's encoder, which model.own does not have: leave "
        "given out",
        lambda: planned(settings | {"given": {"file": "g.jsonl", "kind": "images", "share": 0.5}}),
        lambda: planned(settings),
    )


def test_teachers_of_pipelines_go_with_their_recipe(tmp_path: Path) -> None:
    teachers = {"folders": {"one": "runs/teacher/adapter"}}
    advice(
        "teachers: their weights are a pipeline's files, but the run has model.own: leave them "
        "out, and choose another recipe",
        lambda: planned(
            tree(tmp_path, {"name": "opd", "steps": 4, "window": 2}) | {"teachers": teachers}
        ),
        lambda: planned(tree(tmp_path, GRPO)),
    )


def test_one_s_own_model_checkpoints_by_itself(tmp_path: Path) -> None:
    advice(
        "train.gradient_checkpointing: your own model calls torch.utils.checkpoint in its forward "
        "itself: leave the setting out",
        lambda: planned(tree(tmp_path, gradient_checkpointing=True)),
        lambda: planned(tree(tmp_path)),
    )


@pytest.mark.parametrize("setting", ["guidance", "height", "call"])
@pytest.mark.parametrize("kind", ["own", "texts"])
def test_evaluations_have_no_settings_of_pipelines(tmp_path: Path, setting: str, kind: str) -> None:
    value: Any = {"guidance": 2.0, "height": 16, "call": {"eta": 1.0}}[setting]

    def checked(evaluate: dict[str, Any]) -> None:
        lm = text_runs.tree(tmp_path, tmp_path, text_runs.GRPO)
        settings = tree(tmp_path) if kind == "own" else lm
        settings["evaluate"] |= evaluate
        run = run_from(settings, "test")
        check_kind(run, run.algorithm())

    if setting == "call":
        advice(
            "evaluate.call {}: leave it out",
            lambda: checked({setting: value}),
            lambda: checked({}),
        )
    else:
        advice(
            "evaluate.{} {}: leave it out",
            lambda: checked({setting: value}),
            lambda: checked({}),
        )


def test_workers_do_not_sample_the_initial_policy(tmp_path: Path) -> None:
    def checked(sampling: int) -> None:
        settings = text_runs.tree(tmp_path, tmp_path, {"name": "text_a_star_po", "length": 6})
        run = run_from(settings | {"workers": {"sampling": sampling}}, "test")
        check_start_samples(run, run.algorithm())

    advice(
        "workers.sampling: recipe {} also samples the initial policy, whose weights the workers "
        "do not have: set workers.sampling: 0",
        lambda: checked(1),
        lambda: checked(0),
    )


def test_eight_bits_need_their_library_or_adamw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)

    def installed() -> None:
        monkeypatch.setattr(machine, "find_spec", lambda name: ModuleSpec(name, None))
        check_optimizer("adamw8bit")

    for follow in (lambda: check_optimizer("adamw"), installed):
        advice(
            "train.optimizer: adamw8bit needs bitsandbytes, which is not installed; pip install "
            "bitsandbytes, or set train.optimizer: adamw",
            lambda: check_optimizer("adamw8bit"),
            follow,
        )


def python_reward(folder: Path, **workers: Any) -> None:
    """Check the workers of a run with a reward that is a Python object."""
    settings = tree(folder)
    settings["rewards"] = [{"name": f"{IN_PYTHON}near", "label": "near"}]
    settings["workers"] = workers
    run = run_from(settings, "test")
    check_workers(run, run.algorithm())


def in_a_file(folder: Path) -> None:
    settings = tree(folder) | {"workers": {"sampling": 1}}
    run = run_from(settings, "test")
    check_workers(run, run.algorithm())


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Ray was installed, whose absence is told last."""
    monkeypatch.setattr(machine, "find_spec", lambda name: ModuleSpec(name, None))


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("way", ["file", "none"])
def test_workers_load_rewards_from_files(tmp_path: Path, way: str) -> None:
    advice(
        "workers: reward {} is a Python object, but workers load rewards by name; put the reward "
        "into a file (FILE.py:FUNCTION), or set workers.sampling: 0",
        lambda: python_reward(tmp_path, sampling=1),
        lambda: in_a_file(tmp_path) if way == "file" else python_reward(tmp_path, sampling=0),
    )


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("sampling", [0, 1])
def test_a_reward_in_python_has_no_process_of_its_own(tmp_path: Path, sampling: int) -> None:
    """Without workers that sample, too, where workers.sampling is no way out."""
    advice(
        "workers.rewards: {} is a Python object, but a process of its own loads it by name: leave "
        "it out there, or put it into a file (FILE.py:FUNCTION)",
        lambda: python_reward(tmp_path, sampling=sampling, rewards={"near": {}}),
        lambda: python_reward(tmp_path, sampling=0),
    )


@pytest.mark.parametrize("way", ["install", "leave out"])
def test_a_tracker_is_installed_or_left_out(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(accelerate.tracking, "get_available_trackers", list[str])

    def followed() -> None:
        if way == "leave out":
            check_trackers(())
            return
        monkeypatch.setattr(accelerate.tracking, "get_available_trackers", lambda: ["wandb"])
        monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
        check_trackers(("wandb",))

    advice(
        "track.with: {} is not installed; pip install {}, or leave it out",
        lambda: check_trackers(("wandb",)),
        followed,
    )


@pytest.mark.parametrize("way", ["repair", "leave out"])
def test_a_damaged_tracker_is_repaired_or_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    monkeypatch.setattr(accelerate.tracking, "get_available_trackers", lambda: ["wandb"])
    monkeypatch.syspath_prepend(tmp_path)
    forget_module(monkeypatch, "wandb")
    library = tmp_path / "wandb.py"
    library.write_text("raise AttributeError('of another version')")

    def followed() -> None:
        library.write_text("")
        check_trackers(() if way == "leave out" else ("wandb",))

    try:
        advice(
            "track.with: {} is installed, but importing {} fails ({}); repair it, or leave it out",
            lambda: check_trackers(("wandb",)),
            followed,
        )
    finally:
        sys.modules.pop("wandb", None)


def test_a_model_with_code_of_its_own_is_exchanged(tmp_path: Path) -> None:
    """For one that transformers has, or for one's own model, which the page describes."""
    theirs = tiny_lm.write(tmp_path / "theirs")
    config = json.loads((theirs / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (theirs / "config.json").write_text(json.dumps(config))
    has = tiny_lm.write(tmp_path / "has")
    follows: list[Callable[[], object]] = [
        lambda: check_language(str(has), None),
        lambda: planned(tree(tmp_path)),
    ]
    for follow in follows:
        advice(
            "{}: {} has code of its own (auto_map in its config.json), which flowrl does not run, "
            "and transformers has no model {}: use a model that transformers has, or wrap it as "
            "your own model (docs/own_models.md)",
            lambda: check_language(str(theirs), None),
            follow,
        )


def test_a_circle_of_files_ends_without_one_base(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("base: b.yaml\ntrain: {lr: 0.1}\n")
    second.write_text("base: a.yaml\ntrain: {iterations: 2}\n")

    def without(file: Path) -> object:
        before = file.read_text()
        file.write_text(before.partition("\n")[2])
        read = read_tree(first)[0]
        file.write_text(before)
        return read

    for file, wanted in ((second, {"lr": 0.1, "iterations": 2}), (first, {"lr": 0.1})):
        read = advice(
            "{}: base: the files refer to each other in a circle, {}: remove one `base`",
            lambda: read_tree(first),
            lambda file=file: without(file),
        )
        assert read == {"train": wanted}


def test_a_flat_setting_that_no_part_reads_is_left_out(tmp_path: Path) -> None:
    settings = text_runs.tree(tmp_path, tmp_path, {"name": "text", "length": 8})
    advice(
        "recipe.{}: no chosen part uses it: leave it out",
        lambda: planned(settings | {"recipe": {"name": "text", "length": 8, "bound": 3.0}}),
        lambda: planned(settings),
    )


@pytest.mark.parametrize(
    "more",
    [
        {"budget": {"flat": "drop"}},
        {"recipe": {"modalities": {"video": ["brightness", "again"], "audio": ["far"]}}},
    ],
)
def test_credit_by_further_rewards_stands_alone(
    pipeline: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    gardo = {"name": "gardo", "steps": 4, "group": 4, "auxiliary": ["again"], "distance": "far"}

    def checked(*, alone: bool) -> None:
        settings = runs.tree(pipeline, tmp_path, gardo)
        settings["rewards"] += [
            {"name": "brightness", "label": label, "weight": 0} for label in ("again", "far")
        ]
        for section, value in {} if alone else more.items():
            settings[section] = settings.get(section, {}) | value
        check_named_rewards(run_from(settings, "test"))

    advice(
        "{}: this recipe compares all samples of an iteration by further rewards, which {} does "
        "not support: leave it out",
        lambda: checked(alone=False),
        lambda: checked(alone=True),
    )


@pytest.mark.parametrize(("weight", "count"), [(50, 16), (1, 64)])
def test_a_small_weight_or_the_draws_are_raised(tmp_path: Path, weight: int, count: int) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("a ball\na cube\n")

    def read(weight: int, count: int, place: str) -> object:
        sets = [
            {"source": str(tmp_path / f"{name}.txt"), "weight": share}
            for name, share in (("a", weight), ("b", 99))
        ]
        prompts = {"train": str(tmp_path / "a.txt"), place: sets, "per_iteration": count}
        return run_from(tree(tmp_path) | {"prompts": prompts}, "test").prompts.read(place)  # type: ignore[arg-type]

    advice(
        "{}: {} has weight {}, too small for a single prompt per iteration of {}: raise it, or "
        "prompts.per_iteration",
        lambda: read(1, 16, "train"),
        lambda: read(weight, count, "train"),
    )
    read(1, 16, "held_out")  # evaluations draw nothing per iteration


LOSS = """
from dataclasses import dataclass

from flowrl.losses.base import Entries


@dataclass(frozen=True)
class Moved:
    unit = 1
    roles = frozenset({"old"})

    def __call__(self, likelihood, evaluations, rows):
        moved = likelihood.log_ratio(evaluations["new"], evaluations["old"], rows)
        return Entries(-moved * rows.advantage, "tokens", {})
"""


def test_a_lag_needs_ratios_or_the_sampler_s_densities(tmp_path: Path) -> None:
    (tmp_path / "moved.py").write_text(LOSS)

    def checked(lag: int, *, again: bool) -> object:
        recipe = {"name": "flow_grpo", "steps": 4, "loss": f"{tmp_path}/moved.py:Moved"}
        settings = tree(tmp_path, recipe)
        settings["train"]["recompute_old"] = again
        return planned(settings | {"workers": {"lag": lag}})

    for lag, again in ((1, False), (0, True)):
        advice(
            "workers.lag: train.recompute_old replaces the log-densities of the sampling weights, "
            "and this loss has no ratio to weight its rows with: set train.recompute_old: false, "
            "or lag: 0",
            lambda: checked(1, again=True),
            lambda lag=lag, again=again: checked(lag, again=again),
        )


RECIPE = """
from flowrl.recipes import RECIPES


def mine(*, {name}: int = 4):
    return RECIPES["flow_grpo"](steps={name}, group=4)
"""


def test_a_parameter_of_another_name_can_be_a_setting(tmp_path: Path) -> None:
    def planned_by(name: str) -> object:
        (tmp_path / f"of_{name}.py").write_text(RECIPE.format(name=name))
        return planned(tree(tmp_path, {"name": f"{tmp_path}/of_{name}.py:mine"}))

    advice(
        "{} cannot be a setting: choose another name",
        lambda: planned_by("algorithm"),
        lambda: planned_by("moves"),
    )
