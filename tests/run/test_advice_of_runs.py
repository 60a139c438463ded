"""What messages of a run that begins, trains or resumes advise is done, and the run goes on."""

import json
import math
import shutil
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl.estimate.fit import parsed
from flowrl.iteration.tally import Tally
from flowrl.iteration.update import optimizer_step
from flowrl.launching import on_ray
from flowrl.paths import PROJECT
from flowrl.prompts import PromptSet
from flowrl.run.evaluate import start_checks
from flowrl.run.watch.start_check import check_reward_columns
from flowrl.session import atomic
from flowrl.session.progress import Progress
from flowrl.settings import RewardSpec
from flowrl.settings.read import run_from
from rewards import Samples
from tests.language.test_steps import tree as process_tree
from tests.launching.test_launching import JOB
from tests.run.test_own_runs import tree
from tests.support import tiny_lm
from tests.support.advice import advice
from tests.support.iterations import collect
from tests.support.runs import opened


class Fallible:
    """A reward that can be repaired."""

    def __init__(self) -> None:
        self.fails = True

    def __call__(self, samples: Samples) -> torch.Tensor:
        scores = -samples.media.square().sum(1)
        return scores * math.nan if self.fails else scores


@pytest.mark.slow
def test_a_reward_that_scores_nothing_is_fixed_and_the_run_goes_on(tmp_path: Path) -> None:
    """A reward and a judge that fail in the middle of a run, one after the other."""
    settings = tree(tmp_path, iterations=3, on_failure="skip_group")
    settings["rewards"], settings["evaluate"]["every"] = [], 2
    reward, judge = Fallible(), Fallible()

    def train(fails: Fallible | None) -> flowrl.Run:
        def breaks(event: flowrl.Event) -> None:
            if fails is not None and event.kind == "iteration":
                fails.fails = True

        reward.fails = judge.fails = False
        place = tmp_path / "run"
        rewards = {"name": reward, "label": "near"}
        judges = {"name": judge, "label": "judged"}
        if place.is_dir():
            return flowrl.train(resume=place, rewards=[rewards, judges], callbacks=[breaks])
        return flowrl.train(
            settings=settings, rewards=[rewards], held_out_rewards=[judges], folder=place,
            callbacks=[breaks],
        )  # fmt: skip

    advice(
        "no group of this iteration has a score{}; fix the reward",
        lambda: train(reward),
        lambda: advice(
            "the held-out score {} is {}: the reward scored none of the {} samples; fix the reward "
            "or its settings",
            lambda: train(judge),
            lambda: train(None),
        ),
    )
    recorded = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(recorded[-1])["iteration"] == 3


@pytest.mark.slow
def test_a_reward_of_turns_that_scores_none_is_fixed(tmp_path: Path) -> None:
    """In its file, in the process that has read it: a notebook goes on with its next cell."""
    settings = process_tree(tiny_lm.write(tmp_path / "lm"), tmp_path, self_test="off")
    reward = tmp_path / "none.py"
    reward.write_text("def none(samples):\n    return [float('nan')] * len(samples.media)\n")
    settings["intermediate_rewards"] = [{"name": f"{reward}:none"}]
    session = opened(settings, tmp_path)

    def fixed() -> Any:
        reward.write_text("def none(samples):\n    return [len(t) for t in samples.media]\n")
        return collect(opened(settings, tmp_path), 0)

    made = advice(
        "intermediate_rewards: {} scored none of {} turns or steps: fix the reward",
        lambda: collect(session, 0),
        fixed,
    )
    assert made.scores.intermediate.scored.any()


def test_gradients_that_are_not_finite_are_cured_by_a_lower_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for gradients of bfloat16, which are finite at low rates alone."""

    def norms(lr: float, dtype: str) -> list[float]:
        settings = tree(tmp_path, lr=lr)
        settings["model"]["dtype"] = dtype
        session, progress = opened(settings, tmp_path), Progress()
        size = 1.0 if lr < 1e-3 or dtype == "float32" else math.nan
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(size))
        return [optimizer_step(session.learner, progress, Tally()) for _ in range(3)]

    for lr, dtype in ((1e-4, "bfloat16"), (1e-2, "float32")):
        finite = advice(
            "no finite gradient in three consecutive optimizer steps; lower train.lr or use "
            "model.dtype: float32",
            lambda: norms(1e-2, "bfloat16"),
            lambda lr=lr, dtype=dtype: norms(lr, dtype),
        )
        assert finite == [1.0] * 3


def test_a_size_of_memory_is_written_with_its_unit() -> None:
    sizes = advice(
        "--memory: {} is not a size; write it as 24GiB or 80GB",
        lambda: parsed("24"),
        lambda: [parsed("24GiB"), parsed("80GB")],
    )
    assert sizes == [24 * 2**30, 80 * 10**9]


def test_ray_is_installed_by_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra names Ray, and a run is submitted once its module can be imported."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    begun = list[str]()
    installed = types.ModuleType("ray")
    vars(installed)["init"] = lambda address: begun.append(address)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(on_ray, "_start", lambda job, port: 0)

    def install() -> int:
        assert any(
            need.startswith("ray") for need in project["project"]["optional-dependencies"]["ray"]
        )
        monkeypatch.setitem(sys.modules, "ray", installed)
        return on_ray.run_on_ray(JOB)

    code = advice(
        "launch ray: Ray is not installed: pip install 'flowrl[ray]'",
        lambda: on_ray.run_on_ray(JOB),
        install,
    )
    assert code == 0 and begun == ["auto"]


def test_files_that_differ_between_processes_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has a file of its own, whose digest is that of the reward's text there."""
    monkeypatch.chdir(tmp_path)
    here, there = tmp_path / "mine.py", tmp_path / "there" / "mine.py"
    there.parent.mkdir()
    here.write_text("def mine(samples):\n    return [0.0] * len(samples.media)\n")
    there.write_text("def mine(samples):\n    return [1.0] * len(samples.media)\n")
    run = run_from(tree(tmp_path) | {"rewards": f"{here}:mine"}, "test")

    def of_both(own: list[dict[str, str]]) -> list[dict[str, str]]:
        text = here.read_text()
        here.write_text(there.read_text())
        other = start_checks.source_digests(run)
        here.write_text(text)
        return [*own, other]

    monkeypatch.setattr(start_checks, "gather_object", of_both)

    def copied() -> None:
        shutil.copy(here, there)
        start_checks.check_same_sources(run)

    advice(
        "{}: these files differ between processes; copy one version to every machine",
        lambda: start_checks.check_same_sources(run),
        copied,
    )


@pytest.mark.slow
def test_checkpoints_are_put_back_or_brought_up_to_date(tmp_path: Path) -> None:
    place, away = tmp_path / "run", tmp_path / "away"
    flowrl.train(settings=tree(tmp_path, iterations=2), folder=place)
    (place / "checkpoints").rename(away)

    def put_back() -> None:
        away.rename(place / "checkpoints")
        flowrl.train(resume=place)

    advice(
        "{} has no checkpoint, but {} records {} iterations: if its folder checkpoints was moved "
        "away, put it back; {}",
        lambda: flowrl.train(resume=place),
        put_back,
    )
    newest = place / "checkpoints" / "000002"
    whole = tmp_path / "whole"
    newest.rename(whole)
    shutil.copytree(whole, newest)
    state = json.loads((newest / "state.json").read_text())
    del state["call_sizes"]
    (newest / "state.json").write_text(json.dumps(state))
    (newest / atomic.CONTENTS).write_text(json.dumps(atomic.sums(newest)))

    def resumed_there_and_here() -> flowrl.Run:
        """What that version writes is what every later one reads: a checkpoint with the facts."""
        shutil.rmtree(newest)
        whole.rename(newest)
        return flowrl.train(resume=place, iterations=3)

    run = advice(
        "{} was written before commit 26ca889, which still reads it: resume the run there until it "
        "has written a checkpoint of its own, and then here",
        lambda: flowrl.train(resume=place, iterations=3),
        resumed_there_and_here,
    )
    assert run.metrics[-1]["iteration"] == 3


def test_a_column_that_a_reward_needs_is_named_or_added(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"

    def check(columns: dict[str, str], **named: str) -> None:
        prompts.write_text(json.dumps({"prompt": "1 + 1 = ", **columns}) + "\n")
        spec = RewardSpec.model_validate({"name": "exact_answer", **named})
        check_reward_columns(spec, "train", PromptSet.read(str(prompts), "prompt", "prompts.train"))

    advice(
        "reward {}: no row of prompts.{} has a column {} ({}); it has {}: name another with `{}`, "
        "or add it to the file",
        lambda: check({"solution": "2"}),
        lambda: check({"solution": "2"}, column="solution"),
    )
    check({"solution": "2", "answer": "2"})
