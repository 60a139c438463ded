"""Advice that a start or a run gives of its levels, prompts, folder and memory: each message is
raised, and what it says is done."""

import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl.cli.calibrate import Calibrate, print_calibration
from flowrl.errors import UserError
from flowrl.estimate import memory
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.run.calibrate import check_calibrated
from flowrl.run.evaluate.start_checks import check_levels
from flowrl.run.watch.size_check import check_rows_of
from flowrl.session import atomic
from flowrl.session.session import Session
from flowrl.session.smaller_calls import explained
from flowrl.settings import RunSettings
from flowrl.settings.read import override, run_from
from rewards import Samples
from tests.run.test_atomic import without_locks
from tests.run.test_sizes import SIZES
from tests.run.test_sizes import settings as of_sizes
from tests.support import runs, tiny_pipelines
from tests.support.advice import advice

PLANNER = '''
"""A planner with noise only where the level is high."""
from dataclasses import dataclass

from samplers import FlowSDE, Plan, steps_of


@dataclass(frozen=True)
class High:
    above: float = 0.65

    def __call__(self, sigmas, iteration, seed):
        noisy = {k for k, sigma in enumerate(sigmas[:-2]) if sigma > self.above}
        return (Plan(steps_of(sigmas, noisy=noisy, train=noisy), FlowSDE(0.5), 4),)
'''


def with_algorithm(session: Session, run: RunSettings) -> Session:
    """The session with the algorithm of other settings, as if it had been opened with them."""
    return replace(session, learner=replace(session.learner, algorithm=run.algorithm()))


def test_a_plan_fits_the_models_levels(pipeline: Path, tmp_path: Path) -> None:
    """The settings are checked on even levels; these end at one that is nearly 0."""
    tree = runs.tree(pipeline, tmp_path, {"name": "mix_grpo", "steps": 5, "window": 3, "group": 4})
    tree["model"]["sigmas"], tree["evaluate"]["steps"] = [1, 0.8, 0.6, 0.4, 0.001], 5
    session = runs.opened(tree, tmp_path)
    tree["recipe"]["window"] = 2
    earlier = run_from(tree, "test")
    tree["model"]["sigmas"], tree["evaluate"]["steps"] = [1, 0.8, 0.6, 0.4, 0.2, 0.001], 6
    tree["recipe"] |= {"window": 3, "steps": 6}

    def with_another_step() -> None:
        check_levels(runs.opened(tree, tmp_path))

    for follow in (lambda: check_levels(with_algorithm(session, earlier)), with_another_step):
        advice(
            "recipe: the plan does not fit the model's {} steps, whose levels end at {} (below {} "
            "a level counts as the end): {}; raise recipe.steps, or let the plan's window or "
            "splits end at an earlier step",
            lambda: check_levels(session),
            follow,
        )


@pytest.mark.slow
def test_prompts_of_one_size_have_noise_at_the_same_steps(tmp_path: Path) -> None:
    """FLUX's levels depend on the size, and this plan's noisy steps on the levels."""
    tiny_pipelines.flux().save_pretrained(tmp_path / "flux")
    (tmp_path / "own.py").write_text(PLANNER)
    plan = {"name": f"{tmp_path / 'own.py'}:High"}
    tree = of_sizes(tmp_path / "flux", tmp_path, {"name": "flow_grpo", "steps": 4, "plan": plan})
    session = runs.opened(tree, tmp_path)
    policy = session.learner.policy
    assert isinstance(policy, PipelinePolicy)
    low, *_, high = sorted(sized.schedule(4).sigmas[1] for sized in policy.sized)
    assert low < high
    tree["recipe"]["plan"] = plan | {"above": (low + high) / 2}
    refused = with_algorithm(session, run_from(tree, "test"))
    other = run_from(tree | {"recipe": runs.FLOW_GRPO}, "test")
    tree["prompts"] |= {"train": {"source": tree["prompts"]["train"], "where": {"width": 12}}}
    tree["prompts"]["per_iteration"] = 1

    def with_one_size() -> None:
        tree["prompts"]["train"]["where"]["height"] = 16
        check_levels(runs.opened(tree, tmp_path))

    for follow in (lambda: check_levels(with_algorithm(session, other)), with_one_size):
        advice(
            "recipe: on the model's noise levels its plan draws noise at other steps for samples "
            "of another size, so their credit cannot be compared step by step: choose prompts of "
            "one size with `where`, or another recipe",
            lambda: check_levels(refused),
            follow,
        )


def test_a_batch_of_one_size_is_left_by_where_or_keep(pipeline: Path, tmp_path: Path) -> None:
    tree = of_sizes(pipeline, tmp_path, runs.FLOW_GRPO, SIZES)
    file = tree["prompts"]["train"]
    rows = map(json.loads, Path(file).read_text().splitlines())
    lines = [row | {"kind": kind} for kind, row in enumerate(rows)]
    Path(file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    tree["budget"] = {"replay": 4}
    tree["prompts"] |= {"per_iteration": 1}

    def start(**more: Any) -> None:
        tree["prompts"]["train"] = {"source": file, **more}
        run = run_from(tree, "test")
        check_rows_of(run, "train", run.prompts.read("train"))

    for follow in ({"where": {"kind": 1}}, {"keep": ["prompt"]}):
        advice(
            "prompts.{}: {} needs prompts of one size, but these rows have {}: choose rows with "
            "`where`, or leave their sizes out with `keep`",
            start,
            lambda follow=follow: start(**follow),
        )


@pytest.mark.parametrize("follow", ["correct", "keep"])
def test_a_size_is_corrected_or_not_kept(pipeline: Path, tmp_path: Path, follow: str) -> None:
    def start(height: int, **more: Any) -> None:
        tree = of_sizes(pipeline, tmp_path, runs.FLOW_GRPO, [{}, {}, {"height": height}, {}])
        tree["prompts"]["train"] = {"source": tree["prompts"]["train"], **more}
        run = run_from(tree, "test")
        check_rows_of(run, "train", run.prompts.read("train"))

    advice(
        "{}: {}; correct it, or leave the column out with `keep`",
        lambda: start(18),
        lambda: start(16) if follow == "correct" else start(18, keep=["prompt"]),
    )


@pytest.mark.parametrize("recipe", [{"name": "flow_grpo"}, {"name": "vgpo"}])
def test_what_calibrates_is_dense_grpo(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Before weights load: the pipeline of the run does not exist."""
    gain = {"name": "dense_grpo", "steps": 4, "group": 4, "reward": "gain"}

    def starts(recipe: dict[str, Any]) -> Callable[[], None]:
        run = run_from(runs.tree(tmp_path / "no_weights", tmp_path, recipe), "test")

        def start() -> None:
            with pytest.raises(UserError) as refused:
                print_calibration(run, Calibrate())
            if "no_weights" not in str(refused.value):
                raise refused.value  # the pipeline's own absence is all that is left

        return start

    other = recipe | {"steps": 4, "group": 4}
    if recipe["name"] == "flow_grpo":
        advice(
            "calibrate: this recipe has no chains with intermediate rewards: use dense_grpo",
            starts(other),
            starts(gain),
        )
        other = gain | {"reward": "value"}
    advice(
        "calibrate counts the gains of steps, starting from noise: use dense_grpo with reward: "
        "gain",
        starts(other),
        starts(gain),
    )


def test_calibration_refuses_prompts_of_several_sizes_as_a_start_does(
    pipeline: Path, tmp_path: Path
) -> None:
    tree = of_sizes(pipeline, tmp_path, {"name": "dense_grpo", "steps": 4, "group": 4})
    run = run_from(tree, "test")
    check_calibrated(run.algorithm())
    with pytest.raises(UserError, match="needs prompts of one size"):
        print_calibration(run, Calibrate())


@pytest.mark.slow
def test_calibration_has_the_rewards_that_python_gives(pipeline: Path, tmp_path: Path) -> None:
    def light(samples: Samples) -> torch.Tensor:
        return torch.as_tensor([float(image.mean()) for image in samples.media])

    recipe = {"name": "dense_grpo", "steps": 3, "group": 2}
    tree = runs.tree(pipeline, tmp_path, recipe, self_test="off")
    noise = flowrl.Run(settings=tree, rewards=[light]).calibrate(rounds=1)
    assert len(noise) == 2 and min(noise) > 0


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("follow", ["replace", "remove"])
def test_a_folder_without_links_is_taken(kind: str, follow: str, tmp_path: Path) -> None:
    elsewhere, strange = tmp_path / "elsewhere", tmp_path / "run" / "metrics.jsonl"
    strange.parent.mkdir()
    elsewhere.write_text("")
    if kind == "link":
        strange.symlink_to(elsewhere)
    else:
        os.mkfifo(strange)

    def begin() -> str | None:
        with atomic.held(strange.parent, print) as before:
            return before

    def followed() -> str | None:
        strange.unlink()
        if follow == "replace":
            strange.write_text("")
        return begin()

    advice(
        "{} is {}, but a run only writes and removes plain files and folders: replace it with a "
        "plain file or folder, or remove it",
        begin,
        followed,
    )


@pytest.mark.parametrize("host", ["this one", "another"])
def test_the_lock_file_of_a_process_that_is_gone_is_removed(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch, atomic.errno.ENOLCK)
    lock = tmp_path / atomic.LOCK
    name = socket.gethostname() if host == "this one" else "elsewhere"
    lock.write_text(f"process 1 on {name}")

    def begin() -> None:
        with atomic.held(tmp_path, lambda _: None):
            assert lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}"

    def followed() -> None:
        lock.unlink()
        begin()

    advice("{}: if that process is gone, remove the file", begin, followed)


@pytest.mark.parametrize("trains", [pytest.param(True, marks=pytest.mark.slow), False])
def test_what_is_advised_needs_less_memory(trains: bool, pipeline: Path, tmp_path: Path) -> None:
    """A device whose memory is just that of the run with all that was advised."""
    run = run_from(runs.tree(pipeline, tmp_path, runs.NFT, rows_per_call=8), "test")
    first, advised = memory.estimate(run), []
    assert first is not None

    def starts(run: RunSettings) -> None:
        needed = memory.estimate(run)
        assert needed is not None
        with explained(run, trains=trains):
            if needed.total >= first.total:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def followed() -> None:
        with pytest.raises(UserError) as refused:
            starts(run)
        said = str(refused.value).split(": set ")[1]
        words = [f"--{name}={value}" for name, value in re.findall(r"([\w.]+): (\w+)", said)]
        words += ["--train.rows_per_call=1"] * ("train.rows_per_call lower" in said)
        assert words, said
        advised.extend(words)
        starts(override(run, words))

    advice("{}out of memory ({}){}: set {}", lambda: starts(run), followed)
    assert advised
