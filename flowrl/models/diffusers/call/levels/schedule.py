"""Noise levels that a pipeline's own call visits, and the timesteps its loop passes for them.

The rest of flowrl sees every model as a flow. A model that predicts the noise, v or the clean
sample of a variance-preserving process has the flow's level s / (alpha + s) (`samplers.adapt`);
any form of a scheduler's list is converted to such levels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.errors import UserError
from samplers.adapt import Prediction, level
from samplers.clock import PartClock

# "inverted" is a flow whose scheduler counts from 0, noise, to 1 (Mochi): its output is -v
ModelOutput = Literal["flow", "inverted"] | Prediction
TIME_ROUNDING = 1e-3  # of a time, as a share of the longest: some lists are rounded to integers


@dataclass(frozen=True)
class PipelineSchedule:
    """The scheduler's own lists for a resolution and number of steps, including dynamic shifting.

    sigmas     steps + 1 decreasing noise levels; the last is where the scheduler ends, 0 for flows
    timesteps  [steps] the values that the loop passes for these levels, in its own dtype
    train      timesteps per unit of sigma (of a flow); 1 if its scheduler names none
    visits     the level at each call of `scheduler.step`: some solvers visit a level twice
    levels     for a model of a variance-preserving process: its levels by integer time, increasing
    inverted   the loop's own sigma is 1 - ours
    trig       times are angles of a variance-preserving process (TrigFlow, arXiv:2410.11081):
               alpha = cos t, s = sin t
    rising     a flow's times rise from noise to data: train (1 - sigma)
    beside     the schedules of parts of the state that have a scheduler of their own, by its name,
               at their own levels
    clock      of a state whose parts move in different steps: `sigmas` are its levels
    edm        of a model in the formulation of EDM (arXiv:2206.00364) with data of size 1: its
               scheduler's times for ratios s / alpha
    """

    sigmas: tuple[float, ...]
    timesteps: Tensor
    train: int
    visits: tuple[float, ...] = ()
    levels: Tensor | None = None
    inverted: bool = False
    trig: bool = False
    rising: bool = False
    beside: Mapping[str, "PipelineSchedule"] = field(default_factory=dict)
    clock: PartClock | None = None
    edm: Callable[[Tensor], Tensor] | None = None

    @property
    def preserving(self) -> bool:
        """Whether the model belongs to a variance-preserving process."""
        return self.trig or self.levels is not None or self.edm is not None

    @classmethod
    def of(
        cls, scheduler: Any, visited: Sequence[Any], kind: ModelOutput, owner: str
    ) -> "PipelineSchedule":
        """Read a scheduler's lists after a call has set and visited its steps.

        Raises UserError for levels that do not fall to 0 and for a noise prediction at sigma = 1.
        """
        flow, levels = kind in ("flow", "inverted"), None
        trig = scheduler.config.get("prediction_type") == "trigflow"
        edm = None if flow else edm_times(scheduler)
        if not (flow or trig or edm):
            levels = level(scheduler.alphas_cumprod.detach().cpu().double())
        name = type(scheduler).__name__
        passed = torch.stack([torch.as_tensor(t).detach().cpu().flatten()[0] for t in visited])
        ratios = levels is not None or edm is not None  # its sigmas are s / alpha
        visits = _angle_levels(passed) if trig else _levels(scheduler, passed, levels, ratios)
        if kind == "inverted":
            visits = [1 - s for s in visits]
        first = [i for i, s in enumerate(visits) if i == 0 or s < min(visits[:i])]
        sigmas = (*(visits[i] for i in first), _last_level(scheduler, visits[-1], ratios))
        away = [s for s in visits if s not in sigmas]
        if away or len(sigmas) < 2 or not all(a > b for a, b in pairwise(sigmas)):
            raise UserError(
                f"{owner}: {name} visits the levels {visits}, which do not fall to 0: use "
                "another scheduler, such as FlowMatchEulerDiscreteScheduler or DDIMScheduler"
            )
        if sigmas[0] > 1.0:
            raise UserError(f"{owner}: its first sigma is {sigmas[0]}, but a flow's is at most 1")
        if kind == "epsilon" and sigmas[0] >= 1.0:
            raise UserError(
                f"{owner}: {name} starts at pure noise, where the predicted noise does not "
                "determine the sample: set prediction_type or rescale_betas_zero_snr as the model "
                "was trained, by model.scheduler"
            )
        train = scheduler.config.get("num_train_timesteps", 1)
        begins = float(passed[0])
        rises = abs(train * (1 - sigmas[0]) - begins) < abs(train * sigmas[0] - begins)
        return cls(
            sigmas,
            timesteps=passed[first],
            train=train,
            visits=tuple(visits),
            levels=levels,
            inverted=kind == "inverted",
            trig=trig,
            rising=flow and rises,
            edm=edm,
        )

    @classmethod
    def clocked(
        cls,
        parts: Sequence["PipelineSchedule"],
        sizes: Sequence[int],
        order: Sequence[Sequence[int]],
    ) -> "PipelineSchedule":
        """The schedule of a state whose parts have these; each step moves the parts of `order`."""
        places, levels = [0] * len(parts), [tuple(part.sigmas[0] for part in parts)]
        for moved in order:
            for part in moved:
                places[part] += 1
            levels.append(tuple(p.sigmas[k] for p, k in zip(parts, places, strict=True)))
        clock = PartClock(tuple(sizes), tuple(levels))
        times = torch.tensor(clock.sigmas[:-1]) * parts[0].train
        visits = clock.sigmas[:-1]
        return cls(clock.sigmas, times, parts[0].train, visits, clock=clock)

    def index(self, sigma: Tensor) -> Tensor:
        """Index [n] of each sigma in the list, -1 if it is not there."""
        indices = [self._places.get(level, -1) for level in sigma.detach().float().tolist()]
        return torch.tensor(indices, dtype=torch.long)

    @cached_property
    def _places(self) -> dict[float, int]:
        """The index of each level, rounded to float32."""
        levels = torch.tensor(self.sigmas[:-1], dtype=torch.float32)
        return {s: k for k, s in enumerate(levels.tolist())}

    def first_call(self, index: int) -> int:
        """Index of the first call of `scheduler.step` at this level."""
        return self.visits.index(self.sigmas[index])

    def times(self, sigma: Tensor, index: Tensor | None = None) -> Tensor:
        """Timesteps [n]: the scheduler's own value if sigma is in the list, otherwise the model's.
        `index` [n] is where each sigma is in the list, where that is known."""
        index = self.index(sigma) if index is None else index
        if bool((index >= 0).all()):
            return self.timesteps[index]
        free = self._free(sigma.detach().cpu()).to(self.timesteps.dtype)
        return torch.where(index >= 0, self.timesteps[index.clamp(min=0)], free)

    def _free(self, sigma: Tensor) -> Tensor:
        """Return timesteps for levels that are not in the list.

        For a flow this is sigma train, otherwise interpolated between the two nearest levels, as an
        integer if the loop's are. Below the lowest level it is the first time; above the highest it
        is an error.
        """
        if self.trig:
            return torch.atan2(sigma.double(), 1 - sigma.double())
        if self.edm is not None:
            level = sigma.to(torch.float32)
            return self.edm(level / (1 - level))
        if self.levels is None:
            self._check_times()
            level = sigma.to(torch.float32)
            return self.train * (1 - level if self.rising else level)
        levels, at = self.levels, sigma.double()
        if bool((at > 2 * levels[-1] - levels[-2]).any()) or bool((at > 1).any()):
            raise UserError(
                f"sigma {float(at.max()):.4f} is above the model's highest noise level, "
                f"{float(levels[-1]):.4f}"
            )
        above = torch.searchsorted(levels, at.contiguous()).clamp(1, len(levels) - 1)
        low, high = levels[above - 1], levels[above]
        time = above - 1 + ((at - low) / (high - low)).clamp(0, 1)
        return time if self.timesteps.is_floating_point() else time.round()

    def levels_of(self, sigma: Tensor) -> Tensor:
        """The entries [n] of a flow's own list of levels for these, in its dtype."""
        self._check_times()
        levels = sigma.detach().cpu().to(torch.float32)
        return 1 - levels if self.inverted else levels

    def _check_times(self) -> None:
        """UserError if a flow's times are not those of its levels."""
        levels = torch.tensor(self.sigmas[:-1], dtype=torch.float32)
        ours, times = (1 - levels if self.rising else levels) * self.train, self.timesteps.float()
        if bool(((ours - times).abs() > TIME_ROUNDING * self.train).any()):
            raise UserError(
                f"the loop's timesteps {times.tolist()} are not a multiple of its sigmas, so "
                "velocities exist only at its own levels: use levels from the plan's grid, by "
                "recipe.likelihood: {times: permuted_grid}"
            )


def edm_times(scheduler: Any) -> Callable[[Tensor], Tensor] | None:
    """The times of a scheduler in EDM's formulation, from ratios s / alpha; None for another."""
    return getattr(scheduler, "precondition_noise", None)


def _last_level(scheduler: Any, before: float, ratios: bool) -> float:
    """The level at which the scheduler's last step ends. `ratios`: its sigmas are s / alpha.

    SD1.5's common DDIM (set_alpha_to_one false) ends at alpha_0, and its decoder sees that state.
    """
    if not ratios:
        return 0.0
    sigmas, alpha = vars(scheduler).get("sigmas"), vars(scheduler).get("final_alpha_cumprod")
    last = 0.0
    if sigmas is not None:
        ratio = float(torch.as_tensor(sigmas).double()[-1])  # s / alpha
        last = ratio / (1 + ratio)
    elif alpha is not None:
        last = float(level(torch.as_tensor(alpha).double()))
    return min(last, 0.9999 * before)  # a last step that stays at its level is a very short one


def _angle_levels(passed: Tensor) -> list[float]:
    """Levels sin t / (sin t + cos t) of angles. SANA-Sprint's first angle, 1.5708, is 4e-6 above pi
    / 2 and counts as pure noise."""
    angles = passed.double()
    return (angles.sin() / (angles.sin() + angles.cos())).clamp(max=1.0).tolist()


def _levels(scheduler: Any, passed: Tensor, levels: Tensor | None, ratios: bool) -> list[float]:
    """The noise level at each visited timestep."""
    listed_sigmas = vars(scheduler).get("sigmas")
    listed = scheduler.timesteps.detach().cpu()
    if listed_sigmas is None and levels is None:
        raise UserError(f"{type(scheduler).__name__} has no sigmas: its steps cannot be read")
    if listed_sigmas is None:
        assert levels is not None
        return levels[passed.round().long()].tolist()
    sigmas = torch.as_tensor(listed_sigmas).detach().cpu().double()
    indices, start = [], 0
    for time in passed:
        same = torch.nonzero(listed[start:] == time)
        if not len(same):  # the loop passes other values than the scheduler's own times
            indices = list(range(len(passed))) if len(passed) == len(listed) else []
            break
        start += int(same[0])
        indices.append(start)
        start += 1
    if len(indices) < len(passed):
        raise UserError(
            f"its loop steps at the times {passed.tolist()}, but its {type(scheduler).__name__} "
            f"has {listed.tolist()}: other times have no known level"
        )
    visited = sigmas[indices]
    if ratios:
        visited = visited / (1 + visited)
    return visited.tolist()


@dataclass(frozen=True)
class Start:
    """First state of the loop: its schedule, and the shape [*d], dtype and device of a row.

    `noise` is the size of that state, as a flow state, for standard normal noise: a model of a
    variance-preserving process receives N(0, 1), which is alpha + s times a flow state. `scale`
    turns the loop's unscaled first state into a flow state. The pipeline must be on its device
    before this is made.
    """

    schedule: PipelineSchedule
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    noise: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True)
class Way:
    """Settings to reach a velocity. `forward`: skip to the step's index; otherwise the scheduler is
    pinned."""

    steps: int
    guidance: float | None
    forward: bool
    mixed: bool  # rows of several sigmas may share a call
    decodes_in_loop: bool = False  # whether the decoder needs the loop to run, with nothing moving
    together: tuple[str, ...] = ()  # columns of images: rows with images of one size share a call
    levels: bool = False  # pinned, the list of levels too: for loops that read it
