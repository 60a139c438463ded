"""A pipeline's whole sample made with flowrl's velocities, under its own scheduler or flowrl's."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.models.diffusers.batch import Painting
from flowrl.models.diffusers.driver import PipelineCall
from flowrl.models.diffusers.image_to_image import RecordedNoise
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.scheduler_standin import FAILURES
from samplers import Latents, Ode, roll
from samplers.adapt import from_vp, scale
from samplers.kernels import per_row
from samplers.noise import normal


@dataclass(frozen=True)
class OwnSample:
    """`draws` are the prompts' places: the noise is keyed by (seed, 0, draw), as a rollout's."""

    policy: PipelinePolicy
    batch: Painting
    seed: int
    guidance: float | None

    @property
    def rows(self) -> Tensor:
        return torch.arange(len(self.batch.conditioning))

    @cached_property
    def noise(self) -> Tensor:
        """[n *d], in the shape that the loop's steps see."""
        keys = [(self.seed, 0, draw, "root", 0) for draw in self.rows.tolist()]
        return normal(keys, self.policy.shape(self.batch.steps))

    @cached_property
    def first(self) -> Tensor:
        """flowrl's first flow states of that noise."""
        assert not self.policy.pictured(self.batch.conditioning, self.batch.steps)
        begin = self.policy.begin(self.batch.conditioning, self.batch.steps)
        return self.noise if begin is None else begin(self.noise, self.rows)

    @cached_property
    def latents(self) -> Tensor:
        """The argument `latents` for which the loop's first state is `noise`, unscaled.

        That is the noise itself, prepare_latents' own output with the noise in it (fixed frames),
        or the noise as it is before it is packed.
        """
        draws, loop, shape = RecordedNoise(1.0), self.policy.loop, self.noise.shape
        entry = loop._entry  # known once the shape is
        prepared: list[Any] = []
        assert entry is not None and self._seen(None, draws).shape == shape
        if entry.place is None:
            return self.noise
        loop.driver._prepared(self._call(None), prepared)
        outputs = prepared[0] if isinstance(prepared[0], tuple) else (prepared[0],)
        found = [entry.fill(outputs[entry.place], self.noise)]
        for drawn in draws.drawn:
            places = torch.arange(drawn.numel(), dtype=torch.float32).reshape(drawn.shape)
            seen = self._try(places)
            if seen is not None and bool((seen == seen.round()).all()) and seen.max() < 2**24:
                flat = drawn.clone().flatten()
                flat[seen.flatten().long()] = self.noise.flatten()
                found.append(flat.reshape(drawn.shape))
        for latents in found:
            seen = self._try(latents)
            if seen is not None and torch.equal(seen, self.noise):
                return latents
        raise ValueError(f"{loop.name} takes its latents in no known form")

    def own(self) -> Tensor:
        """Latents under the pipeline's own scheduler: its own call, our predictions, our start."""
        plain, loop, steps = copy.deepcopy(self.policy.pipe), self.policy.loop, self.batch.steps
        velocity = self.policy.bind(self.batch.conditioning, steps=steps, guidance=self.guidance)
        schedule, states = self.policy.schedule(steps), [torch.empty(0)]
        scheduler, real = plain.scheduler, plain.scheduler.step
        signature = inspect.signature(real)

        def step(*args: Any, **named: Any) -> Any:
            given = signature.bind(*args, **named)
            sample, time = given.arguments["sample"], given.arguments["timestep"]
            unit = torch.ones_like(sample)
            if "scale_model_input" in dir(scheduler):
                unit = scheduler.scale_model_input(unit, time)
            sigma = torch.full((len(sample),), schedule.visits[len(states) - 1])
            if len(states) == 1:
                sample = (loop.state(self.first, sigma) / unit).to(sample)
            flow, vp = sample * unit, loop.kind not in ("flow", "inverted")
            flow = from_vp(flow, sigma) if vp else flow
            with torch.no_grad():
                v = velocity(flow, sigma, self.rows)
            output = self._prediction(flow, v, sigma)
            given.arguments |= {
                "sample": sample,
                "model_output": output.to(given.arguments["model_output"].dtype),
            }
            result = real(*given.args, **given.kwargs)
            states.append(result[0] if isinstance(result, tuple) else result.prev_sample)
            return result

        vars(step)["__signature__"] = signature
        vars(scheduler)["step"] = step
        given = self._arguments(self.guidance) | {"latents": self.latents}
        if "generator" in loop.driver.parameters:
            given["generator"] = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            plain(**given)
        return states[-1]

    def flowrl(self) -> Tensor:
        """Latents under flowrl's Euler steps."""
        steps, policy = self.batch.steps, self.policy
        velocity = policy.bind(self.batch.conditioning, steps=steps, guidance=self.guidance)
        (rollout,) = roll(
            Ode(1)(policy.schedule(steps).sigmas, 0, self.seed),
            velocity,
            Latents(policy.shape(steps), begin=lambda noise, prompt: self.first),
            self.rows.tolist(),
            seed=self.seed,
            iteration=0,
        )
        return policy.latents(rollout.x0, steps)

    def media(self, latents: Tensor) -> Tensor:
        conditioning, steps = self.batch.conditioning, self.batch.steps
        return self.policy.decode(latents, conditioning, steps=steps, guidance=self.guidance)

    def _prediction(self, x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
        """What the scheduler's step takes for a flow velocity v at flow states x."""
        kind, s = self.policy.loop.kind, per_row(sigma, x)
        if kind in ("flow", "inverted"):
            return self.policy.loop.sign * v
        x0, noise = x - s * v, x + (1 - s) * v
        size = per_row(scale(sigma), x)
        known = {"epsilon": noise, "sample": x0}
        known["v_prediction"] = (1 - s) * size * noise - s * size * x0
        return known[kind]

    def _arguments(self, guidance: float | None) -> dict[str, Any]:
        c = self.batch.conditioning
        return self.policy.loop.arguments(c.prompts, self.batch.steps, guidance, c.extras)

    def _call(self, latents: Tensor | None) -> PipelineCall:
        given = self._arguments(self.policy.loop._guided)
        given |= {} if latents is None else {"latents": latents}
        return PipelineCall(given, self.batch.conditioning.calls())

    def _seen(self, latents: Tensor | None, draws: RecordedNoise) -> Tensor:
        with torch.no_grad():
            first = self.policy.loop.driver.first(self._call(latents), draws, own_scale=False)
        return first.folded(len(self.rows)).sample

    def _try(self, latents: Tensor) -> Tensor | None:
        try:
            return self._seen(latents, RecordedNoise(1.0))
        except FAILURES:
            return None


def own_sample(
    pipe: Any,
    prompts: Sequence[str],
    *,
    steps: int,
    guidance: float | None,
    negative_prompts: Sequence[str] | None,
    call: Mapping[str, Any] | None,
    seed: int,
) -> OwnSample:
    policy = PipelinePolicy(pipe, call=call or {})
    meta = [{"negative_prompt": text} for text in negative_prompts or ()]
    return OwnSample(policy, policy.open(prompts, meta, steps), seed, guidance)
