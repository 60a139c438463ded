"""An algorithm as data: a plan, credit, a likelihood, a loss, and the averages that they name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from functools import cached_property

from flowrl.credit.advantages import Estimator
from flowrl.credit.choices import AnyPlan, AnyPlanner, check_parts, first_plans, independent
from flowrl.credit.trackers import NoTracker, Tracker
from flowrl.credit.turns import compares_turns, reads_reference
from flowrl.credit.values import Transform
from flowrl.likelihoods.transition import Likelihood
from flowrl.losses.averages import Average, Decay, check_policies
from flowrl.losses.base import Objective

__all__ = ["Algorithm", "Average", "Decay"]


@dataclass(frozen=True)
class Algorithm:
    """The choices of an algorithm. UserError for a mixture that cannot train, before weights load.

    `steps` is the most tokens of a completion for text; `behaviour`, the policy that samples, is
    "current" or the name of one of `averages`.
    """

    steps: int
    plan: AnyPlanner
    advantage: Estimator
    likelihood: Likelihood
    loss: Objective
    averages: tuple[Average, ...] = ()
    behaviour: str = "current"
    tracker: Callable[[], Tracker] = NoTracker

    def __post_init__(self) -> None:
        assert self.plans, "a planner makes at least one plan"
        check_policies([each.name for each in self.averages], self.behaviour, self.loss.roles)
        check_parts((self.advantage, self.likelihood, self.loss), self)

    @cached_property
    def plans(self) -> Sequence[AnyPlan]:
        """The plans of iteration 0 on evenly spaced noise levels."""
        return first_plans(self.plan, self.steps)

    @property
    def group(self) -> int:
        """Samples per draw, of the iteration's largest plan."""
        return max(plan.group for plan in self.plans)

    @property
    def chains(self) -> bool:
        """Whether all samples are drawn alike and independently."""
        return independent(self.plan, self.plans)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return self.advantage.transforms

    @property
    def reads_reference(self) -> bool:
        """Whether credit reads the samples' divergence from the start."""
        return reads_reference(self.transforms)

    @property
    def by_turn(self) -> bool:
        """Whether the turns of a sample can have different credit."""
        return compares_turns(self.transforms)

    @property
    def roles(self) -> frozenset[str]:
        """Policies that are evaluated beside the trained one, for the loss or for credit."""
        return self.loss.roles | ({"ref"} if self.reads_reference else set())

    @property
    def text(self) -> bool:
        """Whether samples are completions of a language model."""
        return self.likelihood.text
