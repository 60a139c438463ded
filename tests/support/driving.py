"""What the tests of driven pipelines share."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Context
from flowrl.likelihoods.rows import Rows
from flowrl.models.diffusers.policy import PipelinePolicy
from rewards import Scores
from samplers import Latents, Sampling, Velocity, roll
from tests.support.tiny_pipelines import SQUARE, sd3

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


def brightness(media: Tensor) -> Scores:
    value = media.flatten(1).mean(1, keepdim=True)
    return Scores(value, torch.ones_like(value, dtype=torch.bool), ("brightness",))


def learn(
    made: PipelinePolicy,
    algorithm: Algorithm,
    meta: Sequence[Mapping[str, Any]] = (),
    guidance: float | None = 1.0,
) -> float:
    """One step on brightness, all roles played by the weights as they are.

    Gives the largest |log-ratio| of the trainer's densities to the sampler's.
    """
    conditioning, steps = made.encode(PROMPTS, meta), algorithm.steps
    velocity = made.bind(conditioning, steps=steps, guidance=guidance)
    (rollout,) = roll(
        algorithm.plan(made.schedule(steps).sigmas, 0, 0),
        velocity,
        Latents(made.shape(steps)),
        range(len(PROMPTS)),
        seed=0,
        iteration=0,
        sampling=Sampling(algorithm.likelihood.keep_mean),
    )
    taken = conditioning.take(rollout.prompt)
    scores = brightness(made.decode(rollout.x0, taken, steps=steps, guidance=guidance))
    credit = algorithm.advantage(scores, Context(rollout.columns, torch.ones(1)))
    away = [
        _descend(algorithm, rows, velocity) for rows in algorithm.likelihood.rows(rollout, *credit)
    ]
    with torch.no_grad():
        for parameter in made.trainable().values():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad / parameter.grad.norm().clamp_min(1e-12)
                parameter.grad = None
    return max(away)


def _descend(algorithm: Algorithm, rows: Rows, velocity: Velocity) -> float:
    likelihood = algorithm.likelihood
    with torch.no_grad():
        again = likelihood.evaluate(velocity, rows)
    rows = replace(rows, old=rows.old or again)
    new = likelihood.evaluate(velocity, rows)
    says = dict.fromkeys(algorithm.loss.roles, again) | {"new": new, "old": rows.old}
    algorithm.loss(likelihood, says, rows).value.sum().backward()
    return float(likelihood.log_ratio(new, rows.old, rows).detach().abs().max())
