"""The protocol of an engine: what it is asked, what it answers, and a walk for those that have a
velocity.

p prompts, n = p * group samples; *d: the shape of one state, as the pipeline's loop has it (packed
or not).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from samplers.affine import AffineStep

EngineVelocity = Callable[[Tensor, float], Tensor]  # (x [n *d], sigma) -> v [n *d]


@dataclass(frozen=True)
class EngineRequest:
    """Samples to draw. Samples of a prompt are contiguous: sample i is of prompt i // group.

    version     of the weights to sample with
    prompts     p texts
    arguments   of the pipeline's call, by prompt, such as a negative prompt; empty: none
    call        arguments of the pipeline's call, of all prompts
    guidance    the pipeline's guidance scale; None: its default
    group       samples per prompt
    shape       of one state
    steps       from the first noise to the samples
    trained     indices of the steps whose states and log-densities the answer has
    seeds       n seeds of the first noise
    step_seeds  n seeds of the noise of each step; none for a step without noise

    A seed's noise is `torch.randn(shape, generator=torch.Generator().manual_seed(seed))`, in
    float32 on the CPU: `noise`. Samples of other noise are as right, but the same seed must give
    the same sample, whatever is asked beside it.
    """

    version: str
    prompts: tuple[str, ...]
    arguments: tuple[Mapping[str, Any], ...]
    call: Mapping[str, Any]
    guidance: float | None
    group: int
    shape: tuple[int, ...]
    steps: tuple[AffineStep, ...]
    trained: tuple[int, ...]
    seeds: tuple[int, ...]
    step_seeds: tuple[tuple[int, ...], ...]

    @property
    def levels(self) -> tuple[int, ...]:
        """Indices of the states that the answer has: those before and after each trained step, and
        `len(steps)`, the samples. State k is before step k."""
        around = {k for step in self.trained for k in (step, step + 1)}
        return tuple(sorted({*around, len(self.steps)}))

    def noise(self, step: int | None = None) -> Float[Tensor, "n *d"]:
        """Standard normal noise of a step, or the first noise."""
        seeds = self.seeds if step is None else self.step_seeds[step]
        rows = torch.empty(len(seeds), *self.shape)
        for row, seed in zip(rows, seeds, strict=True):
            row.normal_(generator=torch.Generator().manual_seed(seed))
        return rows


@dataclass(frozen=True)
class EngineSamples:
    """Samples of a request.

    version  of the weights that sampled
    states   [n *d] by index, of the request's `levels`
    logp     [n] by step, of the trained ones: the log-density of the state after it, under
             N(mean, std^2), as a mean over dimensions
    """

    version: str
    states: Mapping[int, Tensor]
    logp: Mapping[int, Tensor]


@runtime_checkable
class Engine(Protocol):
    """A sampler elsewhere. It is built with the settings beside its name.

    ConnectionError or TimeoutError, from any method, is an outage that is waited for.
    """

    def load(self, version: str, folder: Path) -> None:
        """Sample with the weights in `folder` from now on, and call them `version`. The files are
        those of an exported adapter, which `load_lora_weights` reads, or a whole pipeline's."""
        ...

    def sample(self, request: EngineRequest) -> EngineSamples:
        """Draw samples with the weights of the request's version. LookupError if the engine does
        not hold them: they are then loaded again."""
        ...

    def close(self) -> None:
        """Forget the run's weights, at its end."""
        ...


def walked(request: EngineRequest, velocity: EngineVelocity) -> EngineSamples:
    """Take a request's steps with a velocity function."""
    x = request.noise()
    states, logp = {0: x}, dict[int, Tensor]()
    clean: Tensor | None = None
    for k, step in enumerate(request.steps):
        v = velocity(x, step.sigma)
        mean = step.mean(x, v, clean)
        clean = x - step.sigma * v
        x = mean if step.std == 0 else mean + step.std * request.noise(k)
        states[k + 1] = x
        if k in request.trained:
            logp[k] = step.log_density(mean, x)
    return EngineSamples(request.version, {k: states[k] for k in request.levels}, logp)
