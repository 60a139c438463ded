"""What messages about schedulers and noise levels advise is done, and the next load or call of the
same model goes through."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DDIMInverseScheduler,
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    IPNDMScheduler,
)

from flowrl.cli import model_card
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.noise_levels import PermutedGrid, Uniform
from flowrl.models.before_weights import check_before_weights
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.model_index import read_index
from flowrl.settings.model.pipeline import PipelineSettings
from flowrl.settings.read import run_from
from samplers import Ode
from tests.support import runs
from tests.support.advice import advice
from tests.support.driving import PROMPTS, STEPS
from tests.support.tiny_pipelines import SIZE, SQUARE, sd3
from tests.support.tiny_pipelines_unet import sd15

torch.set_num_threads(1)


def scheduled(pipeline: Path, to: Path, scheduler: Any) -> Path:
    """A copy of a pipeline's folder by links, with another scheduler."""
    to.mkdir()
    for part in pipeline.iterdir():
        if part.is_dir() and part.name != "scheduler":
            (to / part.name).symlink_to(part)
    scheduler.save_pretrained(to / "scheduler")
    index = json.loads((pipeline / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", type(scheduler).__name__]
    (to / "model_index.json").write_text(json.dumps(index))
    return to


def started(pipeline: Path, folder: Path, settings: dict[str, Any]) -> None:
    """What plan and every start ask before weights load."""
    tree = runs.tree(pipeline, folder, dict(runs.NFT))
    tree["model"]["scheduler"] = settings
    check_before_weights(run_from(tree, "run"))


@pytest.mark.parametrize(
    ("kind", "setting"),
    [("DDIMScheduler", "clip_sample"), ("DPMSolverMultistepScheduler", "thresholding")],
)
def test_a_clipped_prediction_is_switched_off_by_the_advised_setting(
    kind: str, setting: str, pipeline: Path, tmp_path: Path
) -> None:
    scheduler = getattr(diffusers, kind)(**{setting: True})
    folder = scheduled(pipeline, tmp_path / "pipe", scheduler)
    advice(
        "{} has {} enabled, which changes the predicted clean sample: set model.scheduler: {",
        lambda: started(folder, tmp_path, {}),
        lambda: started(folder, tmp_path, {setting: False}),
    )


def test_runge_kutta_steps_are_left_out_by_the_advised_setting(
    pipeline: Path, tmp_path: Path
) -> None:
    folder = scheduled(pipeline, tmp_path / "pipe", diffusers.PNDMScheduler())
    advice(
        "begins with Runge-Kutta steps of four calls each",
        lambda: started(folder, tmp_path, {}),
        lambda: started(folder, tmp_path, {"skip_prk_steps": True}),
    )


def with_scheduler(pipe: Any, scheduler: Any, **call: Any) -> PipelinePolicy:
    pipe.scheduler = scheduler
    return PipelinePolicy(pipe, call=SIZE | call)


@pytest.mark.parametrize("kind", [DDIMScheduler, EulerDiscreteScheduler])
def test_another_scheduler_determines_the_process(kind: Any) -> None:
    pipe = sd15()
    noise_model: dict[str, Any] = {"prediction_type": "epsilon"}
    if kind is DDIMScheduler:
        noise_model["clip_sample"] = False
    made = advice(
        "does not determine the model's process: use one of diffusers' FlowMatch, DDIM, DDPM",
        lambda: with_scheduler(pipe, IPNDMScheduler()),
        lambda: with_scheduler(pipe, kind(**noise_model)),
    )
    made.prove(PROMPTS, steps=STEPS, guidance=1.0)


def test_the_index_alone_may_name_another_scheduler(pipeline: Path, tmp_path: Path) -> None:
    """Its file then still has the class that wrote it: plan, load and card go by the index."""
    folder = scheduled(pipeline, tmp_path / "pipe", IPNDMScheduler())
    settings = PipelineSettings(pipeline=str(folder), call=SQUARE)

    def renamed() -> PipelinePolicy:
        index = json.loads((folder / "model_index.json").read_text())
        index["scheduler"][1] = "FlowMatchEulerDiscreteScheduler"
        (folder / "model_index.json").write_text(json.dumps(index))
        started(folder, tmp_path, {"shift": 2.0})
        return PipelinePolicy.load(
            str(folder), dtype=torch.float32, device="cpu", call=settings.call
        )

    made = advice(
        "does not determine the model's process: use one of diffusers' FlowMatch, DDIM, DDPM",
        lambda: started(folder, tmp_path, {}),
        renamed,
    )
    kind = type(made.pipe.scheduler).__name__
    assert kind == "FlowMatchEulerDiscreteScheduler"
    assert model_card._scheduler(settings) == f"the pipeline's own, {kind}"
    assert read_index(str(folder)).scheduler["_class_name"] == kind


def test_levels_that_rise_need_another_scheduler() -> None:
    pipe = sd15()
    plain = pipe.scheduler
    made = advice(
        "visits the levels {}, which do not fall to 0: use another scheduler",
        lambda: with_scheduler(pipe, DDIMInverseScheduler.from_config(plain.config)).schedule(4),
        lambda: with_scheduler(pipe, DDIMScheduler.from_config(plain.config)).schedule(4),
    )
    assert made.sigmas[-1] == 0


class Halved(FlowMatchEulerDiscreteScheduler):
    """Takes two steps for each that it is asked for."""

    def set_timesteps(self, num_inference_steps: Any = None, *args: Any, **named: Any) -> None:
        super().set_timesteps(2 * num_inference_steps, *args, **named)


def test_more_levels_than_steps_need_another_scheduler() -> None:
    pipe = sd3()
    config = pipe.scheduler.config
    made = advice(
        "visits the levels {} in {} steps: use another scheduler",
        lambda: with_scheduler(pipe, Halved.from_config(config)).schedule(STEPS),
        lambda: with_scheduler(pipe, FlowMatchEulerDiscreteScheduler.from_config(config)).schedule(
            STEPS
        ),
    )
    assert len(made.sigmas) == STEPS + 1


@pytest.mark.parametrize(
    "settings", [{"prediction_type": "v_prediction"}, {"rescale_betas_zero_snr": False}]
)
def test_pure_noise_is_started_from_as_the_model_was_trained(settings: dict[str, Any]) -> None:
    broken = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    made = advice(
        "set prediction_type or rescale_betas_zero_snr as the model was trained",
        lambda: PipelinePolicy(sd15(**broken), call=SIZE).schedule(STEPS),
        lambda: PipelinePolicy(sd15(**broken | settings), call=SIZE).schedule(STEPS),
    )
    assert len(made.sigmas) == STEPS + 1


class Squared(FlowMatchEulerDiscreteScheduler):
    """Times that are no multiple of its levels."""

    def set_timesteps(self, *args: Any, **named: Any) -> None:
        super().set_timesteps(*args, **named)
        self.timesteps = self.timesteps**2 / 1000


def test_levels_of_the_grid_have_times() -> None:
    """A matching recipe between the levels of a list whose times cannot be computed there."""
    made = with_scheduler(sd3(), Squared())
    velocity = made.bind(made.encode(PROMPTS[:1]), steps=STEPS, guidance=1.0)
    (rollout,) = made.open(PROMPTS[:1], (), STEPS).rollouts(Ode(2), (0,), seed=0, iteration=0)
    credit, mask = torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool)

    def evaluated(times: Any) -> None:
        for rows in Matching(2, times).rows(rollout, credit, mask):
            likelihood = Matching(2, times).evaluate(velocity, rows)
            assert likelihood.logp.isfinite().all()

    advice(
        "velocities exist only at its own levels: use levels from the plan's grid",
        lambda: evaluated(Uniform()),
        lambda: evaluated(PermutedGrid()),
    )
