"""Refuse credit that does not fit a text plan, or that lacks its tracker."""

from collections.abc import Sequence

from flowrl.credit.augmented import Augmented
from flowrl.credit.choices import Choices, text_plans
from flowrl.credit.comparisons import BestWorst, ParentDifference, TwoLevel
from flowrl.credit.process import GroupReturns, MinReturns
from flowrl.credit.selection import DropFlat
from flowrl.credit.success import BestGap, BetaNormalize, MaxRL, PassAtK, RiskPO
from flowrl.credit.trackers import NoTracker
from flowrl.credit.trees import GlobalLocal
from flowrl.credit.turns import (
    Baseline,
    Discount,
    GreedyBaseline,
    LengthBaseline,
    States,
    Turns,
    WhitenTokens,
    WhitenTurns,
)
from flowrl.credit.values import Transform
from flowrl.errors import UserError

_WHOLE = (
    MaxRL, PassAtK, BestGap, BetaNormalize, RiskPO, LengthBaseline, WhitenTokens, Baseline,
    GreedyBaseline, Augmented, BestWorst, Turns, States, Discount, WhitenTurns,
    GroupReturns, MinReturns,
)  # fmt: skip
_OF_PARENTS = (ParentDifference, GlobalLocal, TwoLevel)
_TRACKED = (Baseline, Augmented)


def check_credit(transforms: Sequence[Transform], choices: Choices) -> None:
    """UserError for a transform whose inputs the plan or the tracker does not provide."""
    plans = text_plans(choices)
    branched = any(plan.forking or len(set(plan.columns.nodes)) > 1 for plan in plans)
    for each in transforms:
        name = type(each).__name__
        if branched and isinstance(each, _WHOLE):
            raise UserError(
                f"{name} compares whole completions, but this plan branches; use the plan "
                "completions, or an advantage per node (standardize, leave_one_out, "
                "parent_difference, global_local, two_level)"
            )
        if plans and not branched and isinstance(each, _OF_PARENTS):
            raise UserError(
                f"{name} compares a node with its parent, which independent completions do not "
                "have; use the plan segments or forks"
            )
        if choices.tracker is NoTracker and isinstance(each, _TRACKED):
            raise UserError(
                f"{name} needs the expected score of each prompt, which a tracker computes; set "
                "tracker: prompt_values"
            )
        if isinstance(each, DropFlat) and any(plan.group < 2 for plan in choices.plans):
            raise UserError(
                "DropFlat drops every group of one sample; leave it out, or use a larger group"
            )
