"""What samples and gradients are spent on: see docs/budgets.md."""

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
    """Which prompts are drawn, how many samples they get, and which of those are learned from. For
    pictures, films and texts alike, with any recipe that the sentences below do not exclude."""

    success: float = 1.0
    """A sample whose weighted score is at least this is a success: rates and replay count them."""
    flat: Literal["keep", "drop", "resample"] = "keep"
    """Groups whose samples all score the same: kept at advantage 0, left out of the loss and its
    denominators, or replaced by further draws until the iteration has its number of groups."""
    spread: float = Field(default=0.0, ge=0)
    """The std of scores that a group must exceed not to be flat; above 0 for continuous rewards."""
    rounds: int = Field(default=4, ge=2)
    """With `flat: resample`, most times that prompts are drawn in an iteration."""
    order: Literal["turn", "uncertain"] = "turn"
    """Every prompt in turn, or at random: those near even chances of success more often."""
    rates: tuple[float, float] | None = None
    """Prompts whose measured rate of success is outside [low, high] are not drawn while there are
    others."""
    revisit: int = Field(default=50, ge=1)
    """A rate is forgotten so many iterations after the prompt's last visit, so that it comes again.
    """
    repeat: int = Field(default=1, ge=1)
    """Most draws of one prompt in an iteration; above 1 they go where more samples teach most, and
    a prompt's draws are one group. Prompts that always or never succeed may then get none."""
    subset: int | None = Field(default=None, ge=2)
    """Samples of a group that gradients are taken of: those whose advantages differ most."""
    replay: int = Field(default=0, ge=0)
    """Successes that are remembered, the newest of a prompt; one of them stands in for a sample of
    a prompt that fails altogether."""

    @model_validator(mode="after")
    def _sensible(self) -> "BudgetSettings":
        if self.rates is not None and not 0 <= self.rates[0] < self.rates[1] <= 1:
            raise ValueError(f"rates: [low, high] with 0 <= low < high <= 1, not {self.rates}")
        return self

    def around(self, algorithm: Algorithm) -> Algorithm:
        """The recipe with what this adds to its credit. UserError for what does not go together."""
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
                f"budget.subset: {self.subset} samples of a group of {algorithm.group}: lower it"
            )
        if self.subset is not None and any(isinstance(t, BestWorst | Exponential) for t in last):
            raise UserError("budget.subset: this recipe chooses its samples itself: leave it out")
        if self.subset is not None and algorithm.by_turn:
            raise UserError(
                "budget.subset: a sample of this recipe has an advantage for each of its turns, "
                "and this compares one: leave it out"
            )
        if self.flat == "resample" and algorithm.tracker is not NoTracker:
            raise UserError(
                "budget.flat: this recipe's credit remembers every prompt that was drawn, so none "
                "is replaced: take drop"
            )
        apart = {"repeat": self.repeat > 1, "replay": self.replay > 0, "subset": bool(self.subset)}
        for name in (name for name, wanted in apart.items() if wanted):
            if not algorithm.chains or algorithm.likelihood.unit > 1:
                raise UserError(
                    f"budget.{name}: samples of this recipe share their way or come in pairs, and "
                    "this takes them one by one: leave it out"
                )
            if name != "subset" and algorithm.tracker is not NoTracker:
                raise UserError(
                    f"budget.{name}: this recipe's credit remembers every prompt by itself: leave "
                    "it out"
                )
