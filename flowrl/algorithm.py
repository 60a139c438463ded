"""An algorithm as data: a plan, credit, a likelihood, a loss, and the averages that they use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flowrl.credit.advantages import Estimator
from flowrl.credit.choices import (
    AnyPlan,
    AnyPlanner,
    check_parts,
    first_plans,
    independent,
    plans_of,
    routes_of,
)
from flowrl.credit.intermediate import reads_intermediate
from flowrl.credit.process import Information, compares_turns, information_of
from flowrl.credit.trackers import NoTracker, ReadsStart, Tracker
from flowrl.credit.values import REFERENCE, Transform
from flowrl.errors import UserError
from flowrl.likelihoods.pathwise import Pathwise
from flowrl.likelihoods.transition import Likelihood
from flowrl.losses.averages import Average, Decay, check_policies
from flowrl.losses.base import (
    Objective,
    check_affine,
    check_columns,
    check_units,
    check_weighted,
    columns_of,
    entropy_share,
)
from flowrl.losses.reward import check_gradient
from flowrl.table import Column, columns_read
from samplers.route import RouteRequest

__all__ = ["Algorithm", "Average", "Decay"]


@dataclass(frozen=True)
class Algorithm:
    """The parts of an algorithm. Raises UserError, before weights load, if they cannot train."""

    steps: int  # sampling steps; for text, the most tokens of a completion
    plan: AnyPlanner
    advantage: Estimator
    likelihood: Likelihood
    loss: Objective
    averages: tuple[Average, ...] = ()
    behaviour: str = "current"  # the policy that samples, or the name of an average
    tracker: Callable[[], Tracker] = NoTracker

    def __post_init__(self) -> None:
        check_policies([average.name for average in self.averages], self.behaviour, self.loss.roles)
        check_gradient(self.loss, self.likelihood)
        check_parts((self.advantage, self.likelihood), self)
        check_units(self.loss, self.likelihood)
        check_columns(self.loss, self.likelihood, self.transforms)
        check_parts((self.loss,), self)
        check_weighted(self.loss, self.transforms)
        check_affine(self.loss, self.likelihood, self.plans)

    def planned(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[AnyPlan, ...]:
        """The plans of an iteration. UserError for a planner that returns anything else, and after
        the first iteration for plans that are impossible."""
        try:
            return plans_of(self.plan, sigmas, iteration, seed)
        except ValueError as problem:
            if iteration == 0 or isinstance(problem, UserError):
                raise
            raise UserError(f"the plan of iteration {iteration}: {problem}") from problem

    @property
    def plans(self) -> Sequence[AnyPlan]:
        """The plans of iteration 0 on evenly spaced noise levels."""
        return self._plans

    @cached_property
    def _plans(self) -> Sequence[AnyPlan]:
        return first_plans(self.plan, self.steps)

    @property
    def group(self) -> int:
        """Samples per draw in the iteration's largest plan."""
        return max(plan.group for plan in self.plans)

    @property
    def chains(self) -> bool:
        """Whether all samples are drawn independently and in the same way."""
        return independent(self.plan, self.plans)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return self.advantage.transforms

    @cached_property
    def reads(self) -> tuple[Column[Any], ...]:
        """Columns of features that credit, its tracker or the loss read."""
        of_credit = columns_read((*self.transforms, self.tracker()))
        return tuple(dict.fromkeys((*of_credit, *columns_of(self.loss))))

    @property
    def by_turn(self) -> bool:
        """Whether credit can differ between the turns of a sample."""
        return compares_turns(self.transforms)

    @cached_property
    def information(self) -> Information | None:
        """The answer whose probability credit asks the sampling policy for, if any."""
        return information_of(self.transforms)

    @cached_property
    def by_step(self) -> bool:
        """Whether credit reads intermediate rewards, so that it differs between steps of a
        sample."""
        return reads_intermediate(self.transforms)

    @property
    def roles(self) -> frozenset[str]:
        """Policies, besides the trained one, that the loss or the credit evaluates or samples."""
        start = REFERENCE in self.reads or self.samples_start
        return self.loss.roles | (frozenset({"ref"}) if start else frozenset[str]())

    @cached_property
    def samples_start(self) -> bool:
        """Whether credit needs samples of the initial model."""
        return isinstance(self.tracker(), ReadsStart)

    @cached_property
    def reward_gradient(self) -> bool:
        """Whether training uses the rewards' own gradients."""
        return isinstance(self.likelihood, Pathwise)

    @cached_property
    def entropy_share(self) -> float | None:
        """The share of the most uncertain tokens that the loss trains on; None for all."""
        return entropy_share(self.loss)

    @cached_property
    def asks(self) -> frozenset[RouteRequest]:
        """Requests of the plans' routes to their caller: see `samplers.Route`."""
        routes = routes_of(self.plan, self.plans)
        return frozenset(asked for route in routes for asked in route.asks)

    @property
    def text(self) -> bool:
        """Whether samples are completions of a language model."""
        return self.likelihood.text
