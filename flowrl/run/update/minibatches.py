"""Assign rows to optimizer steps and calls.

Rows that share an input of the network, such as the children of one state, are dealt together, so
that the input is evaluated once. Each draw deals its own inputs, by a shuffle that is keyed by
(seed, iteration, draw, rollout and step): neither the order of rows nor the processes change it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from flowrl.likelihoods.rows import (
    Evaluation,
    Rows,
    TokenRows,
    first_rows,
    input_of,
    restored,
    take,
)
from flowrl.run.experience.collect import Experience
from flowrl.run.state.learner import Learner
from samplers.host import on_host, picked, sent
from samplers.noise import generator


@dataclass(frozen=True)
class Chunk:
    """The rows of one call. They are copied when they are due, so that states are held once.

    old        the evaluation of the policy that sampled, if the update has computed it
    uncertain  marks of tokens, if the update has set them
    """

    whole: Rows
    index: Int[Tensor, " m"]
    old: Evaluation | None = None
    uncertain: Bool[Tensor, "m t"] | None = None

    @property
    def mask(self) -> Bool[Tensor, "m t"]:
        return picked(self.whole.mask, self.index)

    @property
    def has_old(self) -> bool:
        return self.old is not None or self.whole.old is not None

    def rows(self) -> Rows:
        rows = restored(take(self.whole, self.index))
        if self.old is not None:
            rows = replace(rows, old=self.old)
        if self.uncertain is not None:
            assert isinstance(rows, TokenRows), "HighEntropy refuses other likelihoods"
            rows = replace(rows, uncertain=self.uncertain)
        return rows


Chunks = list[Chunk]


@dataclass(frozen=True)
class RowAssignment:
    """The rule that deals the inputs of an iteration into `updates` optimizer steps."""

    seed: int
    iteration: int
    updates: int

    def steps(
        self, rows: Rows, inputs: Int[Tensor, " b"], draws: Sequence[int], place: int, unit: int
    ) -> Int[Tensor, " b"]:
        """The optimizer step of each row. `inputs` are those of `input_of` on the CPU; `place` is
        that of the rows among the iteration's."""
        prompt = on_host(rows.prompt)[first_rows(inputs)]
        dealt = torch.empty_like(prompt)
        for at, draw in enumerate(draws):
            own = (prompt == at).nonzero()[:, 0]
            key = (self.seed, "deal", self.iteration, draw, place)
            # a draw may have one shared state per step: then its steps take turns
            first = draw + place if rows.state is not None and unit == 1 else draw
            dealt[own] = torch.randperm(len(own), generator=generator(*key)) + first
        return (dealt % self.updates)[inputs]


def share_of(learner: Learner, experience: Experience, iteration: int, number: int) -> Chunks:
    """Return the rows of an optimizer step, in chunks of one (rollout, step) each."""
    return shares_of(learner, experience, iteration)[number]


def shares_of(learner: Learner, experience: Experience, iteration: int) -> list[Chunks]:
    """Return the rows of all optimizer steps."""
    settings, unit = learner.run.train, learner.algorithm.loss.unit
    rows_per_call = learner.policy.sizes.training
    assert rows_per_call is not None  # `load_policy` chose it
    assignment = RowAssignment(settings.seed, iteration, settings.updates)
    shares: list[Chunks] = [[] for _ in range(settings.updates)]
    for place, rows in enumerate(experience.rows):
        inputs = input_of(rows, unit)
        dealt = assignment.steps(rows, inputs, experience.draws, place, unit)
        for number, share in enumerate(shares):
            index = (dealt == number).nonzero()[:, 0]
            parts = calls(index, inputs, max(1, rows_per_call // unit))
            share += [Chunk(rows, sent(part, rows.prompt.device)) for part in parts]
    return shares


def calls(
    index: Int[Tensor, " m"], inputs: Int[Tensor, " b"], most: int
) -> list[Int[Tensor, " _"]]:
    """Cut rows into calls of at most `most` inputs, each with all of its rows in `index`. Calls are
    in the order of inputs."""
    index = index[inputs[index].argsort(stable=True)]
    _, places = inputs[index].unique_consecutive(return_inverse=True)
    return list(index.split((places // most).bincount().tolist()))
