"""The scheduler's part of the proof: first state, interpretation of the prediction, flowrl's
solver."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.schedulers import scheduling_flow_match_euler_discrete as flow_match
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddim_cogvideox import CogVideoXDDIMScheduler
from diffusers.schedulers.scheduling_ddim_parallel import DDIMParallelScheduler
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_map_euler_discrete import (
    FlowMapEulerDiscreteScheduler,
)
from diffusers.schedulers.scheduling_minimax_h3 import MiniMaxH3Scheduler
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.received import Received
from flowrl.models.diffusers.call.inputs.conditioning import Conditioning
from flowrl.models.diffusers.call.levels.schedule import PipelineSchedule
from flowrl.models.diffusers.call.loop.inpainting import first_flow
from flowrl.models.diffusers.call.loop.loop import Loop
from flowrl.models.diffusers.call.results.proof_checks import largest_difference
from samplers import euler
from samplers.adapt import from_vp

# difference of a scheduler's first step from ours, as a share of the state: rounding of its list
# of levels and of half precision
STEP_TOLERANCE = {
    torch.float32: 2e-3,
    torch.float64: 2e-3,
    torch.bfloat16: 5e-2,
    torch.float16: 2e-2,
}
ROUNDINGS = 16  # units of rounding between two ways to the same first state
FLOW_EULER = flow_match.FlowMatchEulerDiscreteScheduler
# schedulers whose steps, without noise, are Euler's in a flow's coordinates
EULER = (
    EulerDiscreteScheduler,
    DDIMScheduler,
    DDIMParallelScheduler,
    CogVideoXDDIMScheduler,
    FlowMapEulerDiscreteScheduler,
    MiniMaxH3Scheduler,
)


@dataclass(frozen=True)
class StepProof:
    """Compares the states and steps of a recorded call with flowrl's. `quiet`: no step draws
    noise."""

    loop: Loop
    own: Sequence[Received]
    schedule: PipelineSchedule
    quiet: bool

    @property
    def scheduler(self) -> Any:
        return self.loop.pipe.scheduler

    @property
    def tolerance(self) -> float:
        return STEP_TOLERANCE[self.own[0].output.dtype]

    def check_start(self, conditioning: Conditioning, steps: int) -> None:
        """UserError if flowrl's first state differs from the one in the pipeline's own call.

        Both are made from the same noise and may differ only by rounding.
        """
        flow = first_flow(self.loop, conditioning, steps)
        sigma = torch.full((len(flow),), self.schedule.sigmas[0])
        theirs = self.own[0].state
        assert theirs is not None
        away = largest_difference(self.loop.state(flow, sigma), theirs)
        size = float(theirs.abs().max())
        if not away <= ROUNDINGS * torch.finfo(theirs.dtype).eps * size:
            raise UserError(
                f"{self.loop.name}: flowrl's first state is {away:.3g} away from the state that "
                f"its own call passes to its network, for states of size {size:.3g}"
            )

    def first(self) -> float | None:
        """Distance of the scheduler's first step from ours, relative to the state.

        None if its step draws noise, or visits its first level twice. Raises UserError for a
        prediction of another kind than assumed: every scheduler's first step is of first order, so
        it must equal ours, unless the scheduler rounds its levels (then its own clean sample must
        equal ours).
        """
        if not self.quiet or len(set(self.schedule.visits[:2])) < 2:
            return None
        away, size = self.step(0)
        turned, _ = self.step(0, -1)
        flow = self.loop.traits.kind == "flow"
        if turned < away and flow:  # its loop hands on -v, or its step adds v
            self.loop.show(sign=-self.loop.traits.sign)
            away, turned = turned, away
        if self.quiet and turned >= away and self.reads_alike():
            return away / size  # another step, of the same prediction
        if away > self.tolerance * size or turned < away:
            raise UserError(
                f"{self.loop.name}: the first step of {type(self.scheduler).__name__} is "
                f"{away:.3g} away from the flow's, in states of size {size:.3g}: its prediction "
                f"is not the assumed {self.loop.traits.kind}"
            )
        return away / size

    def reading(self) -> float | None:
        """Relative distance of the scheduler's own clean sample from ours.

        It shows how the prediction is interpreted if the step draws noise. None if the scheduler
        does not return its clean sample. Raises UserError for another interpretation.
        """
        clean, state = self.own[0].clean, self.own[0].state
        if self.quiet or clean is None or state is None or self.schedule.clock is not None:
            return None
        away, size = self.clean_difference(clean, state)
        if away > self.tolerance * size:
            raise UserError(
                f"{self.loop.name}: {type(self.scheduler).__name__} computes a clean sample from "
                f"the prediction that is {away:.3g} away from ours, of size {size:.3g}: the "
                f"prediction is not the assumed {self.loop.traits.kind}"
            )
        return away / size

    def reads_alike(self) -> bool:
        """Whether the scheduler's clean sample is known and equal to ours."""
        clean, state = self.own[0].clean, self.own[0].state
        if clean is None or state is None:
            return False
        away, size = self.clean_difference(clean, state)
        return away <= self.tolerance * size

    def clean_difference(self, clean: Tensor, state: Tensor) -> tuple[float, float]:
        """(largest difference of our clean sample from the scheduler's, its size)."""
        sigma = torch.full((len(state),), self.schedule.visits[0])
        v = self.loop.read(state, self.own[0].output, sigma).float().cpu()
        x = self.loop.flow(state.float().cpu(), sigma)
        ours = x - sigma.view(-1, *[1] * (x.ndim - 1)) * v
        return largest_difference(ours, clean.cpu()), float(clean.abs().max())

    def euler(self) -> float | None:
        """Largest difference of our Euler steps from the scheduler's own, relative to the state.

        None for schedulers with other steps. Raises UserError for a flow's Euler scheduler in a
        loop that steps differently.
        """
        if not self.quiet or type(self.scheduler) not in (FLOW_EULER, *EULER):
            return None
        away, size = max(self.step(step) for step in range(len(self.own)))
        if type(self.scheduler) is FLOW_EULER and away > self.tolerance * size:
            raise UserError(
                f"{self.loop.name}: a step of its scheduler is {away:.3g} away from Euler's, "
                f"for states of size {size:.3g}: its loop steps differently"
            )
        return away / size

    def step(self, step: int, sign: int = 1) -> tuple[float, float]:
        """(largest difference of our Euler step from the scheduler's, size of the state).

        With `sign` -1, the step goes against the velocity and must end farther away.
        """
        received, state = self.own[step], self.own[step].state
        levels = (*self.schedule.visits, self.schedule.sigmas[-1])
        assert received.following is not None and state is not None
        sigma, following = (torch.full((len(state),), levels[k]) for k in (step, step + 1))
        v = self.loop.read(state, received.output, sigma, sign, self.schedule.clock).float().cpu()
        x, theirs = self.loop.flow(state.float().cpu(), sigma), received.following.cpu()
        if self.loop.flow_matching:
            theirs = self.loop.flow(theirs, following)
            ours = euler(x, v, sigma, following).to(theirs.dtype)
            return largest_difference(ours, theirs), float(theirs.abs().max())
        ours = euler(x, v, sigma, following)
        scaled = not torch.equal(received.sample, state)  # x0 + (s / alpha) noise
        theirs = theirs.float()
        theirs = theirs * (1 - float(following[0])) if scaled else from_vp(theirs, following)
        return largest_difference(ours, theirs), float(theirs.abs().max())
