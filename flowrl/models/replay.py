"""The proof that a driven pipeline is the pipeline: replay its own call and compare, to the bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.conditioning import Conditioning
from flowrl.models.drive import Received
from flowrl.models.schedule import Schedule, Way
from samplers import euler

# what a pipeline's own code raises when its loop does not bear a way in
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Replay:
    """What one replay showed, for one pipeline, dtype, number of steps and guidance.

    The velocity and the decoder differ by 0 from the pipeline's own call, or there is no Replay.
    """

    pipeline: str
    scheduler: str
    dtype: str
    steps: int
    guidance: float | None
    way: Literal["pinned", "forward"]
    mixed: bool  # rows of several sigmas share a call, differing by 0
    euler: float | None  # largest difference of our Euler step; None: another scheduler

    def __str__(self) -> str:
        way = {"pinned": "pinned timestep", "forward": "fast-forward"}[self.way]
        rows = "share a call" if self.mixed else "are grouped"
        step = "is another" if self.euler is None else f"differs by {self.euler:.3g}"
        return (
            f"{self.pipeline}, {self.dtype}, {self.steps} steps, guidance {self.guidance}: "
            f"velocity and decoder equal the pipeline's own call to the bit ({way}); "
            f"rows of several sigmas {rows}; {self.scheduler}'s own step {step} from Euler's"
        )


@runtime_checkable
class Drivable(Protocol):
    """What the proof needs of a policy."""

    pipe: Any
    name: str
    call: dict[str, Any]

    def schedule(self, steps: int) -> Schedule: ...

    def encode(self, prompts: Sequence[str]) -> Conditioning: ...

    def record(
        self, prompts: Sequence[str], steps: int, guidance: float | None
    ) -> tuple[list[Received], Tensor]: ...

    def received(
        self, x: Tensor, sigma: Tensor, conditioning: Conditioning, way: Way
    ) -> Received: ...

    def decode(
        self, x0: Tensor, conditioning: Conditioning, *, steps: int, guidance: float | None
    ) -> Tensor: ...


@dataclass(frozen=True)
class Own:
    """The pipeline's own call: what each step received, and the media."""

    prompts: Sequence[str]
    conditioning: Conditioning
    schedule: Schedule
    steps: list[Received]
    media: Tensor

    def sigma(self, step: int) -> Tensor:
        return torch.full((len(self.prompts),), self.schedule.sigmas[step])


def prove(policy: Drivable, prompts: Sequence[str], steps: int, guidance: float | None) -> Replay:
    """Replay every step of an own call of two rows: the first prompts, or the only one twice.

    Raises UserError where neither way in gives what the pipeline's own steps received, where the
    decoder differs, where guidance has no effect, and where no gradient comes through.
    """
    own = _own(policy, [*prompts, *prompts][:2], steps, guidance)
    way = _way(policy, own, steps, guidance)
    _check_decoder(policy, own, steps, guidance)
    _check_guidance(policy, own, way)
    _check_gradient(policy, own, way)
    return Replay(
        pipeline=policy.name,
        scheduler=type(policy.pipe.scheduler).__name__,
        dtype=str(own.steps[0].output.dtype).removeprefix("torch."),
        steps=steps,
        guidance=guidance,
        way="forward" if way.forward else "pinned",
        mixed=way.mixed,
        euler=_euler(policy, own),
    )


def _own(policy: Drivable, prompts: Sequence[str], steps: int, guidance: float | None) -> Own:
    schedule = policy.schedule(steps)
    records, media = policy.record(prompts, steps, guidance)
    if len(records) != steps:
        raise UserError(
            f"{policy.name} calls scheduler.step {len(records)} times in {steps} steps: pipelines "
            "of several states or loops cannot be driven"
        )
    return Own(prompts, policy.encode(prompts), schedule, records, media)


def _way(policy: Drivable, own: Own, steps: int, guidance: float | None) -> Way:
    reasons = []
    for forward in (False, True):
        way = Way(steps, guidance, forward=forward, mixed=False)
        reason = _mismatch(policy, own, way)
        if reason is None:
            mixed = not forward and _mixes(policy, own, way)
            return Way(steps, guidance, forward=forward, mixed=mixed)
        reasons.append(f"{'fast-forward' if forward else 'pinned'} {reason}")
    raise UserError(
        f"{policy.name} cannot be driven with {policy.call}, guidance {guidance}, {steps} steps: "
        f"its own steps integrate something else than is seen from outside ({'; '.join(reasons)}). "
        "Leave arguments out one by one to find the cause, or use another pipeline"
    )


def _mismatch(policy: Drivable, own: Own, way: Way) -> str | None:
    """Where and by how much the driven velocity differs; None if it does not at all."""
    for step, received in enumerate(own.steps):
        try:
            with torch.no_grad():
                x = received.sample.float()
                driven = policy.received(x, own.sigma(step), own.conditioning, way)
            away = _apart(driven.output, received.output)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            return f"fails at step {step} ({type(error).__name__}: {error})"
        if away != 0:
            return f"is off by {away:.3g} at step {step}"
    return None


def _mixes(policy: Drivable, own: Own, way: Way) -> bool:
    """Whether rows of different steps in one call give what each gave in its own."""
    rows = len(own.prompts)
    if len(own.steps) < 2 or rows < 2:
        return False
    for first in range(len(own.steps)):
        # every step is once each row's, so that every timestep is seen beside another one
        at = [(first + row) % len(own.steps) for row in range(rows)]
        x = torch.stack([own.steps[step].sample[row].float() for row, step in enumerate(at)])
        wanted = torch.stack([own.steps[step].output[row] for row, step in enumerate(at)])
        sigma = torch.tensor([own.schedule.sigmas[step] for step in at])
        try:
            with torch.no_grad():
                driven = policy.received(x, sigma, own.conditioning, way)
            if _apart(driven.output, wanted) != 0:
                return False
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return False
    return True


def _check_decoder(policy: Drivable, own: Own, steps: int, guidance: float | None) -> None:
    last = own.steps[-1].following
    assert last is not None
    media = policy.decode(last.float(), own.conditioning, steps=steps, guidance=guidance)
    away = _apart(media, own.media)
    if away != 0:
        raise UserError(f"{policy.name}: decoding its own last state is off by {away:.3g}")


def _check_guidance(policy: Drivable, own: Own, way: Way) -> None:
    """Guidance that does nothing (a missing negative prompt) is a mistake, not a setting."""
    if way.guidance is None or way.guidance <= 1:
        return
    more = Way(way.steps, way.guidance + 1, forward=way.forward, mixed=False)
    for step, received in enumerate(own.steps):  # some guide a part of the steps only
        x = received.sample.float()
        with torch.no_grad():
            driven = policy.received(x, own.sigma(step), own.conditioning, more)
        if _apart(driven.output, received.output) != 0:
            return
    raise UserError(
        f"guidance {way.guidance} has no effect on {policy.name} with {policy.call}: give a "
        "negative_prompt, or leave guidance out (null)"
    )


def _check_gradient(policy: Drivable, own: Own, way: Way) -> None:
    x = own.steps[0].sample[:1].float().requires_grad_()
    with torch.enable_grad():
        driven = policy.received(x, own.sigma(0)[:1], own.conditioning.take([0]), way)
    if not driven.output.requires_grad:
        raise UserError(f"{policy.name} cuts the gradient inside its loop: it cannot be trained")


def _euler(policy: Drivable, own: Own) -> float | None:
    """Largest difference of our Euler step from the scheduler's own, in its dtype."""
    scheduler = policy.pipe.scheduler
    if type(scheduler) is not FlowMatchEulerDiscreteScheduler:
        return None
    away = 0.0
    for step, received in enumerate(own.steps):
        following = torch.full_like(own.sigma(step), own.schedule.sigmas[step + 1])
        x, v = received.sample.float().cpu(), received.output.float().cpu()
        ours = euler(x, v, own.sigma(step), following).to(received.output.dtype)
        assert received.following is not None
        away = max(away, _apart(ours, received.following.cpu()))
    return away


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference; infinite where shapes differ or a value is not a number."""
    if ours.shape != theirs.shape:
        return float("inf")
    away = (ours.float() - theirs.float().to(ours.device)).abs().max()
    return float("inf") if bool(away.isnan()) else away.item()
