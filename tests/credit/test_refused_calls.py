"""Calls that credit refuses: one table of the room, with a row for each sentence."""

from functools import cached_property
from typing import Any

import torch

from flowrl.credit.choices import check_parts, first_plans, plans_of
from flowrl.credit.comparisons import TwoLevel
from flowrl.credit.intermediate import needed_intermediate
from flowrl.credit.prompt_weights import PROMPT_ROWS, PromptWeight
from flowrl.credit.selection import MaxVariance
from flowrl.credit.success import BetaNormalize, PassAtK
from flowrl.credit.trackers import PromptValues
from flowrl.credit.turns import Baseline, turn_rewards
from flowrl.credit.values import (
    SAMPLE_TURNS,
    TRACKED,
    Context,
    Credit,
    TrackedStatistics,
    node_values,
    refuse_tokens,
)
from flowrl.table import EMPTY
from rewards.types import IntermediateScores, Scores
from samplers import Chain, Columns, FlowSDE, Plan, steps_of
from samplers.completions import TextPlan
from tests.support.refusals import constructor_refusals, refusal_in, refusals_in

ROOM = "flowrl/credit"
LEVELS = (1.0, 0.5, 0.0)
CHAIN = Chain(FlowSDE(0.5), 4)
PLAN = Plan(steps_of(LEVELS), roots=4)
RAGGED = torch.tensor([[0, 0], [0, 1], [0, 1], [1, 2]])


class Never:
    """A part that fits nothing."""

    def refuses(self, choices: Any) -> str:
        return "fits nothing"


class Wrong(Plan):
    """A plan whose nodes are not those of its steps."""

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        return (2, 4)


def context(counts: tuple[int, ...] = (4,), **more: Any) -> Context:
    count = len(counts)
    columns = Columns(counts, (True,) * count, (0.5,) * count, (0.1,) * count)
    return Context(columns, torch.ones(1), **more)


def credit(value: float = 0.5, columns: int = 1, rewards: int = 1) -> Credit:
    shape = (4, columns, rewards)
    return Credit(torch.full(shape, value).double(), torch.ones(shape, dtype=torch.bool))


def scores(**more: Any) -> Scores:
    return Scores(torch.zeros(4, 1), torch.ones(4, 1, dtype=torch.bool), ("r",), **more)


def planned(returned: Any) -> object:
    """The plans of a planner that returns this."""
    return plans_of(lambda *_: returned, LEVELS, 3, 0)


ROWS = EMPTY.with_value(PROMPT_ROWS, [{"w": 1.0}])
UNTRACKED = EMPTY.with_value(TRACKED, TrackedStatistics())
WAY = IntermediateScores(torch.zeros(4, 1, 1), torch.ones(4, 1, 1, dtype=torch.bool), torch.ones(1))

REFUSED = [
    (lambda: check_parts((object(), Never()), None), "fits nothing"),
    (lambda: first_plans(CHAIN, 0), "steps must be at least 1, not 0"),
    (lambda: first_plans(CHAIN, 1), "the plan does not fit 1 steps: a planner with noise needs"),
    (lambda: planned(PLAN), "returned a Plan, but a planner returns a tuple"),
    (lambda: planned("plans"), "returned a str, but a planner returns a tuple"),
    (lambda: planned(()), "returned no plan for iteration 3, but"),
    (lambda: planned((PLAN, TextPlan(4, (2,)))), "returned a tuple of Plan, TextPlan, but"),
    (
        lambda: planned((Wrong(steps_of(LEVELS), roots=4),)),
        r"returned a Wrong that says it has \(2, 4\) nodes and a group of 4, but its steps",
    ),
    (
        lambda: TwoLevel()(credit(), context((4, 4), nodes=RAGGED)),
        "use GlobalLocal for other trees",
    ),
    (lambda: needed_intermediate(context()), "use a plan with intermediate rewards"),
    (lambda: PromptWeight("w")(credit(), context(table=ROWS)), "PromptWeight needs the prompts"),
    (
        lambda: PromptWeight("w").check_rows([{"w": 0}, {"w": -1}]),
        "row 2 of prompts.train has -1 in the column w: give every prompt a number",
    ),
    (lambda: MaxVariance(5)(credit(), context()), "cannot keep 5 samples of a group of 4"),
    (lambda: PassAtK(1)(credit(), context()), "needs a reward of 0 or 1"),
    (lambda: PassAtK(4)(credit(), context()), "needs a group of at least 5, not 4: raise group"),
    (lambda: BetaNormalize()(credit(1.5), context()), r"needs rewards in 0\.\.1: rescale them"),
    (lambda: BetaNormalize()(credit(-0.5), context()), r"needs rewards in 0\.\.1: rescale them"),
    (lambda: PromptValues().before(context()), "a tracker needs the prompts of the draws"),
    (lambda: Baseline()(credit(), context(table=UNTRACKED)), "Baseline needs a baseline of each"),
    (
        lambda: turn_rewards(credit(rewards=2), context(scores=scores(intermediate=WAY))),
        "put this transform behind sum",
    ),
    (lambda: refuse_tokens(credit(columns=3), context()), r"put Penalize\(each=True\) after"),
    (lambda: context().needed(SAMPLE_TURNS, "A part"), "A part needs turns or steps of samples"),
    (
        lambda: node_values(scores(), context((4, 4), nodes=RAGGED), "path"),
        "path fusion needs uniform trees",
    ),
    (
        lambda: node_values(scores(), context((2, 4)), "path"),
        "needs the log-densities of the branching step 1: train that step",
    ),
]


def test_calls_without_sense_are_refused_by_a_sentence_each() -> None:
    reached = {refusal_in(ROOM, make, sentence) for make, sentence in REFUSED}
    assert refusals_in(ROOM).keys() - constructor_refusals(ROOM).keys() <= reached


def test_rewards_at_the_ends_of_their_range_are_taken() -> None:
    for value in (0.0, 1.0):
        assert BetaNormalize()(credit(value), context()).value.eq(0).all()
    assert MaxVariance(4)(credit(), context()).mask.all()
    assert PassAtK(3)(credit(1.0), context()).mask.all()
