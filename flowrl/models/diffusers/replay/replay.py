"""The result of a proof: the comparisons made, the replaced parts, and the differences."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from flowrl.models.diffusers.call.levels.schedule import ModelOutput, Way
from flowrl.settings.model.form import PipelineForm

EXACT = 1e-4  # of the state: Euler steps this near are the scheduler's own, but for rounding


@dataclass(frozen=True)
class Replay:
    """Result of a proof, for one pipeline, dtype, number of steps and guidance.

    A Replay exists only if predictions and decoder equal the pipeline's own call exactly, and the
    first state up to rounding. The first step of a scheduler that draws no noise is of first order,
    so it must equal our Euler step up to rounding: this proves how the prediction is interpreted.
    """

    pipeline: str
    scheduler: str
    dtype: str
    steps: int
    guidance: float | None
    way: Literal["pinned", "forward"]
    mixed: bool  # rows of several sigmas share a call, differing by 0
    euler: float | None  # largest difference of our Euler steps, as a share of the state
    kind: ModelOutput = "flow"
    first: float | None = None  # of the first step, as a share of the state; None: it draws noise
    decodes_in_loop: bool = False  # decoding goes through the loop
    noisy: bool = False  # the scheduler's step draws noise
    reading: float | None = None  # of its clean sample from ours, as a share; None: not shown
    padding: float | None = None  # share of a prediction due to prompts encoded beside its own
    user_levels: bool = False  # the call was made at the levels of model.sigmas
    video: bool = False  # the pipeline makes videos, not images
    sound: bool = False  # it makes sound alone
    evaluations: float = 1.0  # of the network, for a row's velocity; more than 1: guided
    sampler: bool = False  # samples are made by the scheduler's own steps
    together: tuple[str, ...] = ()  # columns: rows with images of one size share a call, to the bit
    levels: bool = False  # pinned, with the list of levels too
    parts: tuple[str, ...] = ()  # of the state, if it has several
    data: tuple[float, ...] = ()  # sizes of their data in flow states, if some are not 1
    form: PipelineForm = "classic"  # in which the pipeline is driven
    guider: str = ""  # class of a modular pipeline's guider
    drawn: bool = False  # the decoder draws noise, so samples are decoded one by one
    moved: str = ""  # how parts move that are at levels of their own, as `PartClock.moved` says it

    @cached_property  # read for every call
    def to_way(self) -> Way:
        forward = self.way == "forward"
        return Way(
            steps=self.steps,
            guidance=self.guidance,
            forward=forward,
            mixed=self.mixed,
            decodes_in_loop=self.decodes_in_loop,
            together=self.together,
            levels=self.levels,
        )

    @property
    def own_steps(self) -> bool:
        """Whether flowrl's steps equal the scheduler's own, up to rounding in its dtype."""
        if self.sampler:
            return True
        rounding = 2 * torch.finfo(getattr(torch, self.dtype)).eps
        return self.euler is not None and self.euler <= max(EXACT, rounding)

    def __str__(self) -> str:
        way = {"pinned": "pinned timestep", "forward": "fast-forward"}[self.way]
        way += " and level" * self.levels
        named = " and ".join(self._named_parts)
        named = f"{len(self.parts)} parts of the state, {self.moved}," if self.moved else named
        of = f" of {named}" * bool(self.parts)
        rows = "share a call" if self.mixed else "are grouped"
        output = "velocity" if self.kind == "flow" else f"prediction ({self.kind})"
        padding = "" if self.padding is None else (
            f"; a prompt's prediction depends by {self.padding:.1%} on the prompts encoded with it "
            "(the pipeline pads them without a mask)"
        )  # fmt: skip
        guided = f" (guided: {self.evaluations:g} evaluations per row)" * (self.evaluations > 1)
        by = f", {self.guider}" * bool(self.guider)
        form = f" (modular form{by})" * (self.form == "modular")
        images = "; rows with images of one size share a call" if self.together else ""
        images += "; samples are decoded one by one, since the decoder draws noise" * self.drawn
        return (
            f"{self.pipeline}{form}, {self.dtype}, {self.steps} steps"
            f"{' at the levels of model.sigmas' if self.user_levels else ''}, "
            f"guidance {self.guidance}{guided}: "
            f"{output}{of} and decoder equal the pipeline's own call to the bit ({way}), the first "
            f"state to rounding; rows of several sigmas {rows}{images}; {self.solver}{padding}"
        )

    @property
    def _named_parts(self) -> list[str]:
        sizes = self.data or (1.0,) * len(self.parts)
        return [
            name if size == 1 else f"{name} (at lower levels: its data times {size:g})"
            for name, size in zip(self.parts, sizes, strict=True)
        ]

    @property
    def solver(self) -> str:
        """Relation of flowrl's steps to the scheduler's own."""
        name = self.scheduler
        if self.sampler:
            return f"steps are {name}'s own, with flowrl's noise (kernel: scheduler)"
        if self.noisy:
            read = "is not shown" if self.reading is None else f"agrees to {self.reading:.1g}"
            return (
                f"{name} draws noise in its steps, and Euler steps without noise replace them; "
                f"its interpretation of the prediction {read}"
            )
        if self.euler is None:
            begins = "" if self.first is None else f", whose first step is {self.first:.1g} away"
            return f"Euler steps replace those of {name}{begins}"
        if self.own_steps:
            return f"Euler steps are {name}'s own (to {self.euler:.1g})"
        return (
            f"Euler steps replace those of {name}, which rounds its levels, or steps to other "
            f"levels than the next of its list (DDIM: t - 1000 / n): its own steps differ by "
            f"{self.euler:.1g}"
        )
