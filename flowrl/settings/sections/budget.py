"""The budget of samples and gradients: see docs/budgets.md."""

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from flowrl.algorithm import Algorithm
from flowrl.credit.comparisons import BestWorst, Exponential
from flowrl.credit.selection import DropFlat, MaxVariance
from flowrl.credit.trackers import NoTracker
from flowrl.errors import UserError
from flowrl.settings.base import Settings


class BudgetSettings(Settings):
    """Selection of prompts, of samples per prompt, and of the samples to train on, for images,
    videos and texts, with every recipe that `around` accepts."""

    success: float = 1.0
    """Minimum weighted score of a success, for `rates` and `replay`."""
    flat: Literal["keep", "drop", "resample"] = "keep"
    """Treatment of groups whose samples all have the same score: keep them at advantage 0, drop
    them from the loss and its denominators, or replace them by new draws (resample)."""
    spread: float = Field(default=0.0, ge=0)
    """Maximum std of scores in a flat group; above 0 for continuous rewards."""
    rounds: int = Field(default=4, ge=2)
    """Maximum rounds of drawing prompts per iteration, with `flat: resample`."""
    order: Literal["turn", "uncertain"] = "turn"
    """turn: every prompt once before any repeats. uncertain: at random, prompts with success rates
    near 1/2 more often."""
    rates: tuple[float, float] | None = None
    """Range [low, high] of success rates: other prompts are drawn only if no prompt in the range is
    left."""
    revisit: int = Field(default=50, ge=1)
    """Number of iterations after a prompt's last draw until its rate is dropped and it can be drawn
    again."""
    repeat: int = Field(default=1, ge=1)
    """Maximum draws of one prompt per iteration. Above 1, prompts with the most informative samples
    get more draws, which form one group; prompts that always or never succeed may get no draw."""
    subset: int | None = Field(default=None, ge=2)
    """Number of samples per group to train on: those whose advantages differ most."""
    replay: int = Field(default=0, ge=0)
    """Number of successful samples to store, the newest per prompt; one of them replaces a sample
    of a group in which every sample fails."""

    @model_validator(mode="after")
    def _sensible(self) -> "BudgetSettings":
        if self.rates is not None and not 0 <= self.rates[0] < self.rates[1] <= 1:
            raise ValueError(
                f"rates must be [low, high] with 0 <= low < high <= 1, not {self.rates}"
            )
        return self

    def around(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm with this budget's credit transforms. UserError if they do not fit."""
        self._check(algorithm)
        advantage, transforms = algorithm.advantage, algorithm.advantage.transforms
        if self.flat != "keep" and not any(isinstance(t, DropFlat) for t in transforms):
            transforms = (DropFlat(self.spread), *transforms)
        if self.subset is not None:
            transforms = (*transforms, MaxVariance(self.subset))
        return replace(algorithm, advantage=replace(advantage, transforms=transforms))

    def _check(self, algorithm: Algorithm) -> None:
        last = algorithm.advantage.transforms[-1:]
        if self.subset is not None and self.subset > algorithm.group:
            raise UserError(
                f"budget.subset is {self.subset}, but a group has only {algorithm.group} samples: "
                "lower it"
            )
        if self.subset is not None and any(isinstance(t, BestWorst | Exponential) for t in last):
            raise UserError("budget.subset: this recipe selects its own samples: leave it out")
        if self.subset is not None and algorithm.by_turn:
            raise UserError(
                "budget.subset needs one advantage per sample, but this recipe has one per "
                "turn: leave it out"
            )
        if self.flat == "resample" and algorithm.tracker is not NoTracker:
            raise UserError(
                "budget.flat: this recipe's credit records every drawn prompt, so prompts cannot "
                "be replaced: set budget.flat: drop"
            )
        single = {"repeat": self.repeat > 1, "replay": self.replay > 0, "subset": bool(self.subset)}
        for name in (name for name, wanted in single.items() if wanted):
            if not algorithm.chains or algorithm.likelihood.unit > 1:
                raise UserError(
                    f"budget.{name} needs independent samples, but samples of this recipe share "
                    "steps or come in pairs: leave it out"
                )
            if name != "subset" and algorithm.tracker is not NoTracker:
                raise UserError(
                    f"budget.{name}: this recipe's credit keeps its own statistics of every "
                    "prompt: leave it out"
                )
