"""Calls that likelihoods refuse: one table of the room, with a row for each sentence."""

from dataclasses import replace

import torch

from flowrl.likelihoods.noise_levels import Discrete, PermutedGrid
from flowrl.likelihoods.pathwise import Pathwise
from flowrl.likelihoods.rows import Evaluation, Rows, with_table
from flowrl.likelihoods.shortcuts import Kept
from flowrl.likelihoods.token import (
    LEAST_TEMPERATURE,
    LEAST_TOP_P,
    MOST_MIN_P,
    Token,
    without_choice,
)
from flowrl.likelihoods.transition import Transition
from flowrl.table import EMPTY, Column
from samplers import Chain, FlowSDE, Latents, roll
from samplers.completions import TextPlan
from samplers.generate import TokenRequest, Writer, WrittenTokens
from samplers.layout import Layout
from tests.support.refusals import refusal_in, refusals_in

SIGMAS = (0.96, 0.8, 0.55, 0.3, 0.1)
CREDIT = torch.zeros(2, 3)
EVALUATION = Evaluation(torch.zeros(2, 1), None)
ROWS = Rows(torch.arange(2), torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool), None)
DIFFICULTY = Column("difficulty", owner="rows", form="sample")


def sampled(layout: Layout | None):
    """Two samples of states of ten numbers."""
    plans = Chain(FlowSDE(0.5), 2)((1.0, 0.7, 0.4, 0.0), 0, 0)
    latents = Latents((10,), layout=layout)
    return roll(plans, lambda x, sigma, prompt: x, latents, (5,), seed=0, iteration=0)[0]


def of_parts(part: str, layout: Layout | None) -> object:
    return Transition(parts=(part,)).rows(sampled(layout), CREDIT, CREDIT.bool())


class Ones:
    """Samples three tokens."""

    elsewhere = False

    def __call__(self, request: TokenRequest) -> WrittenTokens:
        ids = torch.ones(len(request.contexts), 3, dtype=torch.long)
        stopped = torch.ones(len(ids), dtype=torch.bool)
        return WrittenTokens(ids, torch.zeros(ids.shape), torch.full((len(ids),), 3), stopped)


def of_texts(columns: int) -> object:
    """Credit with so many columns, for two completions of three tokens."""
    rollout = Writer(Ones(), [(1,)], (0,), 0, 0).write(TextPlan(3, (2,)))
    return Token().rows(rollout, torch.zeros(2, columns), torch.ones(2, columns).bool())


AV = Layout(("video", "audio"), ((2, 3), (4,)))
REFUSED = [
    (lambda: Discrete(0.9)(SIGMAS, 5, torch.Generator()), "raise steps$"),
    (lambda: PermutedGrid()(SIGMAS, 6, torch.Generator()), "raise steps$"),
    (
        lambda: Pathwise(Kept()).log_ratio(EVALUATION, EVALUATION, ROWS),
        "no density and therefore no ratio",
    ),
    (lambda: of_parts("sound", AV), "the parts video, audio, and no sound"),
    (lambda: of_parts("audio", None), "one part alone"),
    (
        lambda: with_table(ROWS, EMPTY.with_value(DIFFICULTY, torch.zeros(3))),
        "a column of 3 samples cannot become one of 2 rows",
    ),
    (lambda: of_texts(2), "advantages have 2 columns, but need one for each of 1 decision points"),
]


def test_calls_without_sense_are_refused_by_a_sentence_each() -> None:
    reached = {refusal_in("flowrl/likelihoods", make, sentence) for make, sentence in REFUSED}
    assert refusals_in("flowrl/likelihoods").keys() <= reached


def test_as_many_levels_as_the_plan_has_are_drawn() -> None:
    assert len(Discrete(0.9)(SIGMAS, 4, torch.Generator())) == 4
    assert len(PermutedGrid()(SIGMAS, 5, torch.Generator())) == 5


def test_a_sampler_at_the_limits_still_chooses():
    limits = {"temperature": LEAST_TEMPERATURE, "top_p": LEAST_TOP_P, "min_p": MOST_MIN_P}
    for name, limit in {**limits, "top_k": 2}.items():
        assert without_choice(replace(TextPlan(3, (2,)), **{name: limit})) is None, name
    beyond = {"temperature": 9e-4, "top_p": 9e-6, "min_p": 0.991, "top_k": 1}
    for name, number in beyond.items():
        said = without_choice(replace(TextPlan(3, (2,)), **{name: number}))
        assert said is not None and said.startswith(f"at {name} {number:g} nothing is random")
