"""What the tests of driven pipelines share."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flowrl.models.pipeline import PipelinePolicy
from tests.tiny_pipelines import SQUARE, sd3

PROMPTS = ["a red cube", "two blue cat on the table"]
STEPS = 4


def noise(made: PipelinePolicy, rows: int = 2) -> Tensor:
    return torch.randn(rows, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))


def policy(call: Mapping[str, Any] = SQUARE, rows: int | None = None) -> PipelinePolicy:
    return PipelinePolicy(sd3(), call=call, rows_per_call=rows)


def own(pipe: Any, latents: Tensor, call: Mapping[str, Any], **more: Any) -> Tensor:
    """The pipeline's own call, without any of flowrl."""
    prompts = PROMPTS[: len(latents)]
    texts = {k: [v] * len(prompts) for k, v in call.items() if k == "negative_prompt"}
    given = dict(call) | texts | {"prompt": prompts, "latents": latents} | more
    return pipe(**given, num_inference_steps=STEPS, output_type="pt", return_dict=False)[0]


def sample(made: PipelinePolicy, latents: Tensor, guidance: float | None) -> Tensor:
    """Step the real scheduler's class with our velocity, then decode."""
    conditioning = made.encode(PROMPTS[: len(latents)])
    velocity = made.bind(conditioning, steps=STEPS, guidance=guidance)
    schedule, rows = made.schedule(STEPS), torch.arange(len(latents))
    stepper = copy.deepcopy(made.pipe.scheduler)
    # shifted already, so that they are set as they are
    stepper.set_timesteps(
        STEPS, **({"mu": 1.0} if stepper.config.get("use_dynamic_shifting") else {})
    )
    stepper.sigmas, stepper.timesteps = torch.tensor(schedule.sigmas), schedule.timesteps
    x = latents
    with torch.no_grad():
        for t, sigma in zip(schedule.timesteps, schedule.sigmas, strict=False):
            v = velocity(x, torch.full((len(x),), sigma), rows)
            x = stepper.step(v, t, x, return_dict=False)[0]
    return made.decode(x, conditioning, steps=STEPS, guidance=guidance)
