"""The proof that a driven pipeline is the pipeline: replay its own call and compare, to the bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from diffusers.schedulers import scheduling_flow_match_euler_discrete as flow_match
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers import proof_checks
from flowrl.models.diffusers.checks import its_own
from flowrl.models.diffusers.columns import Extra
from flowrl.models.diffusers.conditioning import Conditioning
from flowrl.models.diffusers.proof_checks import largest_difference, shown
from flowrl.models.diffusers.schedule import ModelOutput, PipelineSchedule, Way
from flowrl.models.diffusers.scheduler_standin import FAILURES, Received
from flowrl.models.diffusers.signature import Loop
from samplers import euler
from samplers.adapt import from_vp

# of a scheduler's first step from ours, beside the state: rounding, of half precision too
STEP_TOLERANCE = {
    torch.float32: 2e-3,
    torch.float64: 2e-3,
    torch.bfloat16: 5e-2,
    torch.float16: 2e-2,
}


@dataclass(frozen=True)
class Replay:
    """What one replay showed, for one pipeline, dtype, number of steps and guidance.

    What the model predicts and the decoder differ by 0 from the pipeline's own call, or there is
    no Replay. The first step of a scheduler that draws no noise is of first order, so it must be
    our Euler step but for rounding: that proves how the prediction is read.
    """

    pipeline: str
    scheduler: str
    dtype: str
    steps: int
    guidance: float | None
    way: Literal["pinned", "forward"]
    mixed: bool  # rows of several sigmas share a call, differing by 0
    euler: float | None  # largest difference of our Euler step; None: another scheduler
    kind: ModelOutput = "flow"
    first: float | None = None  # of the first step, beside the state; None: it draws noise
    through: bool = False  # decoding goes through the loop

    @property
    def to_way(self) -> Way:
        forward = self.way == "forward"
        return Way(self.steps, self.guidance, forward, self.mixed, self.through)

    def __str__(self) -> str:
        way = {"pinned": "pinned timestep", "forward": "fast-forward"}[self.way]
        rows = "share a call" if self.mixed else "are grouped"
        what = "velocity" if self.kind == "flow" else f"prediction ({self.kind})"
        step = "is another" if self.euler is None else f"differs by {self.euler:.3g}"
        if self.euler is None and self.first is not None:
            step = f"begins {self.first:.1g} away"
        return (
            f"{self.pipeline}, {self.dtype}, {self.steps} steps, guidance {self.guidance}: "
            f"{what} and decoder equal the pipeline's own call to the bit ({way}); "
            f"rows of several sigmas {rows}; {self.scheduler}'s own step {step} from Euler's"
        )


@dataclass(frozen=True)
class Subject:
    """What is replayed: a loop with two prompts (and their images), steps and guidance."""

    loop: Loop
    prompts: Sequence[str]
    extras: Sequence[Extra]
    steps: int
    guidance: float | None

    def prove(self) -> Replay:
        """Replay every step of an own call.

        Raises UserError where neither way in gives what the pipeline's own steps received, where
        the state changes between steps, where the decoder differs, where the prediction is not
        what the scheduler takes it for, where guidance has no effect, and where no gradient comes
        through.
        """
        proof_checks.unbroken(self.loop.name, self.own)
        way = self._way()
        self._check_alone(way)
        through = self._decoder(way)
        first = self._first()
        self._check_guidance(way)
        self._check_gradient(way)
        return Replay(
            pipeline=self.loop.name,
            scheduler=type(self.loop.pipe.scheduler).__name__,
            dtype=str(self.own[0].output.dtype).removeprefix("torch."),
            steps=self.steps,
            guidance=self.guidance,
            way="forward" if way.forward else "pinned",
            mixed=way.mixed,
            euler=self._euler(),
            kind=self.loop.kind,
            first=first,
            through=through,
        )

    @cached_property
    def schedule(self) -> PipelineSchedule:
        return self.loop.start(self.steps).schedule

    @cached_property
    def conditioning(self) -> Conditioning:
        return self.loop.encode(self.prompts, self.extras)

    @cached_property
    def recorded(self) -> tuple[list[Received], Tensor, bool]:
        """The pipeline's own call: its steps, its media, whether it draws no noise."""
        call = (self.prompts, self.extras, self.steps, self.guidance)
        steps, media, repeatable = self.loop.record(*call)
        if not shown(media) and self.loop.form == "pt":
            self.loop.form = "np"  # some pipelines scale to 0..1 only there
            steps, media, repeatable = self.loop.record(*call)
        visits, rows = len(self.schedule.visits), len(self.prompts)
        proof_checks.check_states(self.loop.name, steps, self.steps, visits, rows)
        return steps, media, repeatable

    @property
    def own(self) -> list[Received]:
        return self.recorded[0]

    def sigma(self, step: int) -> Tensor:
        return torch.full((len(self.prompts),), self.schedule.visits[step])

    def state(self, step: int) -> Tensor:
        """Of the loop, as the denoiser saw it."""
        state = self.own[step].state
        assert state is not None
        return state

    def _way(self) -> Way:
        reasons = []
        for forward in (False, True):
            way = Way(self.steps, self.guidance, forward=forward, mixed=False)
            reason = self._mismatch(way)
            if reason is None:
                mixed = not forward and self._mixes(way)
                return Way(self.steps, self.guidance, forward=forward, mixed=mixed)
            reasons.append(f"{'fast-forward' if forward else 'pinned'} {reason}")
        raise UserError(
            f"{self.loop.name} cannot be driven with {self.loop.call}, guidance {self.guidance}, "
            f"{self.steps} steps: its own steps integrate something else than is seen from outside "
            f"({'; '.join(reasons)}). Leave arguments out one by one to find the cause, or use "
            "another pipeline"
        )

    def _mismatch(self, way: Way) -> str | None:
        """Where and by how much a driven prediction differs; None if it does not at all."""
        for step, received in enumerate(self.own):
            try:
                with torch.no_grad():
                    x, sigma = self.state(step), self.sigma(step)
                    driven = self.loop.received(x, sigma, self.conditioning, way)
                away = largest_difference(driven.output, received.output)
            except torch.OutOfMemoryError:
                raise
            except FAILURES as error:
                return f"fails at step {step} ({type(error).__name__}: {error})"
            if away != 0:
                return f"is off by {away:.3g} at step {step}"
        return None

    def _check_alone(self, way: Way) -> None:
        """A row says the same alone, or its densities would change with the rows beside it."""
        with torch.no_grad():
            x, taken = self.state(0)[1:2], self.conditioning.take([1])
            alone = self.loop.received(x, self.sigma(0)[1:2], taken, way).output
        beside = self.own[0].output[1:2]
        away, size = largest_difference(alone, beside), float(beside.float().abs().max())
        if away > STEP_TOLERANCE[beside.dtype] * size:
            raise UserError(
                f"{self.loop.name} says something else of a prompt alone than beside another "
                f"(by {away:.3g} of {size:.3g}): its ratios of densities would be wrong"
            )

    def _mixes(self, way: Way) -> bool:
        """Whether rows of different steps in one call give what each gave in its own."""
        count, rows = len(self.own), len(self.prompts)
        if count < 2 or rows < 2:
            return False
        for first in range(count):
            # every step is once each row's, so that every timestep is seen beside another one
            at = [(first + row) % count for row in range(rows)]
            x = torch.stack([self.state(step)[row] for row, step in enumerate(at)])
            wanted = torch.stack([self.own[step].output[row] for row, step in enumerate(at)])
            sigma = torch.cat([self.sigma(step)[:1] for step in at])
            try:
                with torch.no_grad():
                    driven = self.loop.received(x, sigma, self.conditioning, way)
                if largest_difference(driven.output, wanted) != 0:
                    return False
            except torch.OutOfMemoryError:
                raise
            except FAILURES:
                return False
        return True

    def _decoder(self, way: Way) -> bool:
        """Whether the loop must be gone through to decode; UserError if that is not it either."""
        last, reasons = self.own[-1].following, []
        assert last is not None
        for through in (False, True):
            how = Way(self.steps, self.guidance, way.forward, way.mixed, through)
            try:
                decoded = self.loop.decode(last, self.conditioning, how)
                away = largest_difference(decoded, self.recorded[1])
            except torch.OutOfMemoryError:
                raise
            except FAILURES as error:
                reasons.append(f"fails ({type(error).__name__}: {error})")
                continue
            proof_checks.coloured(self.loop.name, decoded)
            if away == 0 and shown(decoded):
                return through
            if away == 0:
                raise UserError(
                    f"{self.loop.name} decodes to numbers from {float(decoded.min()):.3g} to "
                    f"{float(decoded.max()):.3g}, which are no pictures in 0..1"
                )
            reasons.append(f"is off by {away:.3g}")
        raise UserError(
            f"{self.loop.name}: decoding its own last state {reasons[0]}, after an unmoved loop "
            f"it {reasons[1]}"
        )

    def _first(self) -> float | None:
        """How far the scheduler's first step is from ours, beside the state's size."""
        if not self.recorded[2] or len(set(self.schedule.visits[:2])) < 2:
            return None
        away, size = self._step(0)
        turned, _ = self._step(0, -1)
        if turned < away and self.loop.kind == "flow":  # its loop hands on -v, or its step adds v
            self.loop.sign *= -1
            away, turned = turned, away
        near = STEP_TOLERANCE[self.own[0].output.dtype]
        if away > near * size or turned < away:
            raise UserError(
                f"{self.loop.name}: the first step of {type(self.loop.pipe.scheduler).__name__} is "
                f"{away:.3g} away from the flow's, in states of size {size:.3g}: its prediction is "
                f"not the {self.loop.kind} that it is taken for"
            )
        return away / size

    def _euler(self) -> float | None:
        """Largest difference of our Euler step from the scheduler's own, in its dtype."""
        if type(self.loop.pipe.scheduler) is not flow_match.FlowMatchEulerDiscreteScheduler:
            return None
        steps = [self._step(step) for step in range(len(self.own))]
        away, size = max(steps)
        if self.recorded[2] and away > STEP_TOLERANCE[self.own[0].output.dtype] * size:
            raise UserError(
                f"{self.loop.name}: a step of its scheduler is {away:.3g} away from Euler's, in "
                f"states of size {size:.3g}: its loop steps by something else"
            )
        return away

    def _step(self, step: int, sign: int = 1) -> tuple[float, float]:
        """Our Euler step from the scheduler's: (largest difference, size of the state).

        With `sign` -1 the one against the velocity, which must be farther away.
        """
        received, sigma = self.own[step], self.sigma(step)
        following = torch.full_like(sigma, (*self.schedule.visits, 0.0)[step + 1])
        assert received.following is not None
        v = sign * self.loop.read(self.state(step), received.output, sigma).float().cpu()
        x, theirs = self.state(step).float().cpu(), received.following.cpu()
        if self.loop.kind in ("flow", "inverted"):
            ours = euler(x, v, sigma, following).to(theirs.dtype)
            return largest_difference(ours, theirs), float(theirs.abs().max())
        ours = euler(from_vp(x, sigma), v, sigma, following)
        scaled = not torch.equal(received.sample, self.state(step))  # x0 + (s / alpha) noise
        theirs = theirs.float()
        theirs = theirs * (1 - float(following[0])) if scaled else from_vp(theirs, following)
        return largest_difference(ours, theirs), float(theirs.abs().max())

    def _check_guidance(self, way: Way) -> None:
        """Guidance that does nothing (a missing negative prompt) is a mistake, not a setting."""
        if way.guidance is None or way.guidance <= 1:
            return
        more = Way(way.steps, way.guidance + 1, forward=way.forward, mixed=False)
        if self._mismatch(more) is not None:  # some guide a part of the steps only
            return
        raise UserError(
            f"guidance {way.guidance} has no effect on {self.loop.name} with {self.loop.call}: "
            "give a negative_prompt, or leave guidance out (null)"
        )

    def _check_gradient(self, way: Way) -> None:
        x = self.state(0)[:1].float().requires_grad_()
        with torch.enable_grad(), its_own(self.loop.name, self.loop.call):
            taken = self.conditioning.take([0])
            driven = self.loop.received(x, self.sigma(0)[:1], taken, way)
        if not driven.output.requires_grad:
            raise UserError(
                f"{self.loop.name} cuts the gradient inside its loop: it cannot be trained"
            )
