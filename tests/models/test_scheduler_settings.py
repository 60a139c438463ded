"""`model.scheduler`: settings laid over the folder's scheduler; `evaluate.call`: arguments of
evaluations alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)

from flowrl.errors import UserError
from flowrl.models.before_weights import check_before_weights
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.open import evaluation_policy, open_model
from flowrl.settings.base import OnResume
from flowrl.settings.model.pipeline import PipelineSettings
from flowrl.settings.read import dump, run_from
from tests.support import runs

CPU = torch.device("cpu")
PROMPTS = ["a red cube", "two blue cats"]


def opened(pipeline: Path, folder: Path, **changes: Any) -> tuple[Any, PipelinePolicy]:
    tree = runs.tree(pipeline, folder, dict(runs.NFT))
    tree["model"] |= {"height": 16, "width": 16, **changes.get("model", {})}
    tree["evaluate"] |= changes.get("evaluate", {})
    run = run_from(tree, "run")
    policy = open_model(run, CPU)
    assert isinstance(policy, PipelinePolicy)
    return run, policy


def test_levels_are_those_of_the_changed_scheduler(pipeline: Path, tmp_path: Path) -> None:
    _, plain = opened(pipeline, tmp_path)
    run, made = opened(pipeline, tmp_path, model={"scheduler": {"shift": 7.0}})
    own: Any = FlowMatchEulerDiscreteScheduler.from_pretrained(pipeline, subfolder="scheduler")
    stepper: Any = FlowMatchEulerDiscreteScheduler.from_config(own.config, shift=7.0)
    stepper.set_timesteps(4)
    assert made.schedule(4).sigmas == pytest.approx(stepper.sigmas.tolist())
    assert made.schedule(4).sigmas != pytest.approx(plain.schedule(4).sigmas)
    made.prove(PROMPTS, steps=4, guidance=1.0)
    assert dump(run)["model"]["scheduler"] == {"shift": 7.0}  # in run.yaml, and the proof's digest
    made.save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/scheduler/scheduler_config.json").read_text())
    assert saved["shift"] == 7.0


def test_what_the_scheduler_does_not_have_is_refused_before_weights(
    pipeline: Path, tmp_path: Path
) -> None:
    def checked(**model: Any) -> None:
        tree = runs.tree(pipeline, tmp_path, dict(runs.NFT))
        tree["model"] |= model
        check_before_weights(run_from(tree, "run"))

    checked(scheduler={"shift": 7.0})
    wanted = r"FlowMatchEulerDiscreteScheduler .* no setting 'shfit': did you mean shift\? It has "
    with pytest.raises(UserError, match=wanted):
        checked(scheduler={"shfit": 7.0})
    with pytest.raises(UserError, match="leave one of the two out"):
        checked(scheduler={"shift": 7.0}, sigmas={"shift": 2.0})
    assert PipelineSettings.ON_RESUME["scheduler"] is OnResume.NEVER


def test_evaluations_have_arguments_of_their_own(pipeline: Path, tmp_path: Path) -> None:
    run, policy = opened(pipeline, tmp_path, evaluate={"call": {"max_sequence_length": 8}})
    evaluator = evaluation_policy(policy, run)
    assert isinstance(evaluator, PipelinePolicy)
    assert evaluator.call["max_sequence_length"] == 8
    assert "max_sequence_length" not in policy.call
    assert evaluator.roots()["transformer"] is policy.roots()["transformer"]
    evaluator.prove(PROMPTS, steps=4, guidance=1.0)
    assert not policy.known_proofs
    tree = dump(run)
    for call, said in (
        ({"height": 32}, "set evaluate.height"),
        ({"max_sequence": 8}, "evaluate.call: .*did you mean max_sequence_length"),
    ):
        tree["evaluate"]["call"] = call
        with pytest.raises(UserError, match=said):
            check_before_weights(run_from(tree, "run"))
