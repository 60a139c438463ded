"""The steps of a pipeline's own scheduler as a kernel, measured with that scheduler.

Every sampler of few-step models takes steps x' = a x + b output + c noise: a boundary scaling
(LCM), a share of kept noise (TCD's gamma) or angles (TrigFlow) change the numbers but not the form.
So there is no scheduler's formula here. Its own `step` is called with known states, outputs and
noise, which determines a, b and c of every step; another call with random values must then agree.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.image_to_image import RecordedNoise
from flowrl.models.diffusers.call.drive.received import Received
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES, data_size
from flowrl.models.diffusers.call.levels.schedule import PipelineSchedule
from flowrl.models.diffusers.call.loop.loop import Loop
from flowrl.models.out_of_memory import raise_memory
from samplers import Plan, Scheduler
from samplers.adapt import scale
from samplers.scheduler import bound_to, unbound

LARGE = 4096.0  # of a known state, beside which the noise is rounding
NEAR = 2e-5  # of a step's size: rounding of float32 and of a scheduler's own table
RENEWED = 0.99  # share of fresh noise in a level's from which on all of it is fresh
# steps: the share of fresh noise of a process halves, a few-step sampler's stays
FEW, MANY = 12, 48
SAME_SHARE = 0.75


class Affine(NamedTuple):
    """A step x' = of_x x + of_output output + of_noise noise, in the scheduler's own units."""

    of_x: float
    of_output: float
    of_noise: float


@dataclass(frozen=True)
class MeasuredScheduler:
    """The scheduler of a loop with its lists set, and the steps at which the loop calls it."""

    loop: Loop
    real: Any
    visited: Sequence[Received]
    schedule: PipelineSchedule

    @classmethod
    def of(cls, loop: Loop, steps: int) -> "MeasuredScheduler":
        schedule = loop.start(steps).schedule
        call = loop.traits.trial_call(loop.traits.blank, steps)
        visited = loop.driver.visited(call, RecordedNoise(1.0))
        real = copy.deepcopy(loop.driver.scheduler)
        real.__class__ = type(loop.driver.real)
        for name, value in vars(real).items():
            if isinstance(value, Tensor):
                vars(real)[name] = value.cpu()
        return cls(loop, real, visited, schedule)

    @property
    def name(self) -> str:
        return type(self.real).__name__

    def kernel(self) -> Scheduler:
        """UserError for steps of another form, or that do not end at the next level."""
        affine, sigmas = self.affine(), self.schedule.sigmas
        if len(affine) != len(sigmas) - 1:
            raise UserError(f"{self._refused}: it visits a level more than once")
        factors = [self.factor(k) for k in range(len(affine))]
        factors.append(float(scale(_one(sigmas[-1]))) * data_size(self.real))
        coefficients = []
        for k, step in enumerate(affine):
            of_x, of_v = self._output(sigmas[k])
            a = step.of_x * factors[k] + step.of_output * of_x
            rest = (a, step.of_output * of_v, step.of_noise)
            coefficients.append(tuple(number / factors[k + 1] for number in rest))
        return Scheduler(tuple(coefficients), sigmas)

    def affine(self) -> list[Affine]:
        """The numbers a, b and c of each step. UserError for another form."""
        zero, large = torch.zeros(self._shape), torch.full(self._shape, LARGE)
        noise = [torch.randn(self._shape, generator=_generator(k)) for k in range(self._count)]
        fresh, states, outputs = (
            self._steps([pair] * self._count)
            for pair in ((zero, zero), (large, zero), (zero, large))
        )
        affine_steps = []
        for k, drawn in enumerate(noise):
            of_noise = float((fresh[k] * drawn).sum() / drawn.square().sum())
            of_x, of_output = (
                float((at[k].double() - fresh[k].double()).mean()) / LARGE
                for at in (states, outputs)
            )
            affine_steps.append(Affine(of_x, of_output, of_noise))
        drawn = torch.Generator().manual_seed(1)
        tried = [
            (torch.randn(self._shape, generator=drawn), torch.randn(self._shape, generator=drawn))
            for _ in noise
        ]
        for k, ended in enumerate(self._steps(tried)):
            (x, output), a = tried[k], affine_steps[k]
            ours = a.of_x * x + a.of_output * output + a.of_noise * noise[k]
            size = float(ended.abs().max()) + abs(a.of_x) + abs(a.of_output)
            if not float((ours - ended).abs().max()) <= NEAR * size:
                raise UserError(
                    f"{self._refused}: its step {k} is not a sum of its state, its prediction and "
                    "one draw of noise (it reads earlier steps, or clips)"
                )
        return affine_steps

    @property
    def _refused(self) -> str:
        return f"{self.loop.name}: kernel: scheduler cannot take the steps of {self.name}"

    @property
    def _count(self) -> int:
        return len(self.visited)

    @property
    def _shape(self) -> tuple[int, ...]:
        return (1, *self.visited[0].sample.shape[1:])

    def _steps(self, inputs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Results of the steps in order, from these states and outputs. Step k draws noise k."""
        scheduler, ended = copy.deepcopy(self.real), []
        for k, (seen, (x, output)) in enumerate(zip(self.visited, inputs, strict=True)):
            time = torch.as_tensor(seen.timestep).cpu().flatten()[0]
            takes = inspect.signature(type(self.real).step).parameters
            more = {"generator": _generator(k)} if "generator" in takes else {}
            try:
                with torch.random.fork_rng(devices=[]):  # FlowMatch draws from the global state
                    torch.manual_seed(k)
                    result = scheduler.step(output, time, x, **seen.more, **more, return_dict=False)
            except FAILURES as error:
                raise_memory(error)
                raise UserError(f"{self._refused}: {type(error).__name__}: {error}") from error
            ended.append(result[0].float())
        return ended

    def factor(self, k: int) -> float:
        """Factor from a flow state to the scheduler's state at step k."""
        if not self.schedule.preserving:
            return 1.0
        ones = torch.ones(self._shape)
        if "scale_model_input" in dir(type(self.real)):
            time = torch.as_tensor(self.visited[k].timestep).cpu().flatten()[0]
            scheduler = copy.deepcopy(self.real)
            vars(scheduler)["_begin_index"] = None  # the index of the time
            ones = scheduler.scale_model_input(ones, time)
        size = float(scale(_one(self.schedule.sigmas[k])))
        return size * data_size(self.real) / float(ones.double().mean())

    def _output(self, sigma: float) -> tuple[float, float]:
        """(p, q): the model output is p x + q v of a flow state and its velocity."""
        kind, size = self.loop.traits.kind, float(scale(_one(sigma)))
        if kind in ("flow", "inverted"):
            return 0.0, float(self.loop.traits.sign)
        alpha, s = (1 - sigma) * size, sigma * size
        of_kind = {"epsilon": (1.0, 1 - sigma), "sample": (1.0, -sigma)}
        of_kind["v_prediction"] = (alpha - s, alpha * (1 - sigma) + s * sigma)
        p, q = of_kind[kind]
        return p * data_size(self.real), q * data_size(self.real)


def own_kernel(loop: Loop, steps: int) -> Scheduler:
    """The kernel with the steps of the pipeline's scheduler. UserError if it has no such steps."""
    if steps not in loop.own_kernels:
        loop.own_kernels[steps] = MeasuredScheduler.of(loop, steps).kernel()
    return loop.own_kernels[steps]


def own_plans(loop: Loop, plans: Sequence[Plan], steps: int) -> tuple[Plan, ...]:
    """Plans with the scheduler's own steps. UserError if they do not fit it, or have other ones."""
    if not all(map(unbound, plans)):
        raise UserError(
            f"{loop.name} samples with the steps of its own scheduler (kernel: scheduler), but "
            "this plan has other steps"
        )
    if loop.driver.beside:
        raise UserError(
            f"{loop.name}: kernel: scheduler takes the steps of one scheduler, and its loop has "
            f"{' and '.join(['scheduler', *loop.driver.beside])}: use another kernel"
        )
    kernel = own_kernel(loop, steps)
    try:
        return tuple(bound_to(plan, kernel) for plan in plans)
    except ValueError as error:
        raise UserError(f"{loop.name}: kernel: scheduler: {error}") from error


def renews_noise(loop: Loop, steps: int) -> bool:
    """Whether the scheduler's steps renew a share of the noise that does not shrink with the step.

    Such a sampler belongs to a few-step model, and no ODE reproduces its samples. Steps of a
    diffusion process (DDPM, ancestral Euler) renew less noise the shorter they are, and an ODE has
    the same marginals.
    """
    try:
        shares = _shares(own_kernel(loop, steps))
    except UserError:
        return False  # steps of another form, which Euler steps stand in for
    if not any(shares):
        return False
    try:
        few, many = (_median(_shares(own_kernel(loop, count))) for count in (FEW, MANY))
    except UserError:  # so many steps are refused
        return min(shares) > RENEWED
    return many > SAME_SHARE * few


def _shares(kernel: Scheduler) -> list[float]:
    """Fresh noise of each step as a share of the next level's noise, except the last step."""
    assert kernel.coefficients is not None and kernel.sigmas is not None
    pairs = zip(kernel.coefficients[:-1], kernel.sigmas[1:-1], strict=True)
    return [abs(std) / level for (_, _, std), level in pairs]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _one(sigma: float) -> Tensor:
    return torch.tensor([sigma], dtype=torch.float64)
