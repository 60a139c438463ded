"""Assign rows to optimizer steps and calls.

Rows that share an input of the network, such as the children of one state, stay together, so that
the input is evaluated once. Each draw's inputs are shuffled by themselves, keyed by (seed,
iteration, draw, rollout and step), so the assignment depends neither on the order of rows nor on
the processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from flowrl.iteration.records import TrainingRows
from flowrl.likelihoods.rows import (
    ROWS_INDEX,
    Evaluation,
    Rows,
    TokenRows,
    first_rows,
    input_of,
    restored,
    take,
)
from flowrl.session.learner import Learner
from flowrl.table import EMPTY, Table
from samplers.host import on_host, sent
from samplers.noise import generator
from samplers.untyped import integers


@dataclass(frozen=True)
class Chunk:
    """Rows of one call. They are copied only when needed, so that states are in memory once.

    device  that calls run on
    old     the evaluation of the sampling policy, if the update has computed it
    table   columns of these rows that the update has added
    """

    whole: Rows
    index: Int[Tensor, " m"]
    device: torch.device
    old: Evaluation | None = None
    table: Table = EMPTY

    @property
    def mask(self) -> Bool[Tensor, "m t"]:
        """Mask of the rows, on the CPU."""
        return on_host(self.whole.mask)[on_host(self.index)]

    @property
    def has_old(self) -> bool:
        return self.old is not None or self.whole.old is not None

    def rows(self) -> Rows:
        rows = restored(take(self.whole, self.index), self.device)
        if self.old is not None:
            rows = replace(rows, old=self.old)
        if self.table.values:
            rows = replace(rows, table=rows.table | self.table)
        return rows


Chunks = list[Chunk]
PROMPT_TOKENS, MOST_TEXTS = 64, 256  # as `CausalPolicy.automatic` assumes and allows
FEW_TOKENS, PADDING = 512, 0.1  # a call of fewer tokens costs more than its padding


@dataclass(frozen=True)
class RowAssignment:
    """Assigns the inputs of an iteration to `updates` optimizer steps."""

    seed: int
    iteration: int
    updates: int

    def steps(
        self,
        rows: Rows,
        inputs: Int[Tensor, " b"],
        draws: Sequence[int],
        number: int,
        together: int,
    ) -> Int[Tensor, " b"]:
        """Optimizer step of each row. `inputs` come from `input_of`, on the CPU; `number` is that
        of the rows in the iteration."""
        prompt = on_host(rows.prompt)[first_rows(inputs)]
        dealt = torch.empty_like(prompt)
        for at, draw in enumerate(draws):
            rows_of_draw = (prompt == at).nonzero()[:, 0]
            key = (self.seed, "deal", self.iteration, draw, number)
            # a draw may have one shared state per step: then its steps take turns
            first = draw + number if rows.state is not None and together == 1 else draw
            dealt[rows_of_draw] = (
                torch.randperm(len(rows_of_draw), generator=generator(*key)) + first
            )
        return (dealt % self.updates)[inputs]


def share_of(learner: Learner, training: TrainingRows, iteration: int, number: int) -> Chunks:
    """Rows of an optimizer step, in chunks of one (rollout, step) each."""
    return shares_of(learner, training, iteration)[number]


def shares_of(learner: Learner, training: TrainingRows, iteration: int) -> list[Chunks]:
    """Rows of all optimizer steps."""
    settings, together = learner.run.train, learner.algorithm.loss.unit
    rows_per_call = learner.policy.sizes.training
    assert rows_per_call is not None  # `load_policy` chose it
    assignment = RowAssignment(settings.seed, iteration, settings.updates)
    device = next(iter(learner.policies.parameters.values())).device
    shares: list[Chunks] = [[] for _ in range(settings.updates)]
    for at, rows in enumerate(training.rows):
        number, inputs = rows.table.get(ROWS_INDEX, at), input_of(rows, together)
        dealt = assignment.steps(rows, inputs, training.draws, number, together)
        for step, share in enumerate(shares):
            index = (dealt == step).nonzero()[:, 0]
            parts = calls(index, inputs, max(1, rows_per_call // together))
            if isinstance(rows, TokenRows) and not settings.share_prompts:
                longest, most = learner.algorithm.steps, rows_per_call // together
                bound = TextCalls(max(1, most), longest, settings.call_sizes["training"] == "auto")
                parts = bound.of(index, inputs, integers(on_host(rows.ends)))
            share += [Chunk(rows, sent(part, rows.prompt.device), device) for part in parts]
    return shares


@dataclass(frozen=True)
class TextCalls:
    """The rule that sorts texts by length, longest first, and cuts them into calls.

    most      maximum inputs of a call, if all have `length` tokens
    tokens    whether a call takes more of shorter texts, up to the same tokens and MOST_TEXTS

    A call also ends where more than the share PADDING of its positions, if at least FEW_TOKENS,
    would be padding. Calls are a pure function of lengths; texts of one length stay in their order.
    """

    most: int
    length: int
    tokens: bool

    def of(
        self, index: Int[Tensor, " m"], inputs: Int[Tensor, " b"], ends: Sequence[int]
    ) -> list[Int[Tensor, " _"]]:
        """Cut the rows `index` into calls, each input with all of its rows. `ends`: number of
        tokens of each row."""
        rows = dict[int, list[int]]()
        for row, number in zip(integers(index), integers(inputs[index]), strict=True):
            rows.setdefault(number, []).append(row)
        width = {
            number: max(ends[row] for row in rows_of_input)
            for number, rows_of_input in rows.items()
        }
        parts, tokens = list[list[int]](), 0
        for number in sorted(rows, key=lambda n: (-width[n], n)):
            if not parts or self._full(parts[-1], tokens, width[number], width):
                parts.append([])
                tokens = 0
            parts[-1].append(number)
            tokens += width[number]
        return [torch.tensor([row for n in part for row in rows[n]]) for part in parts]

    def _full(self, part: list[int], tokens: int, new: int, width: dict[int, int]) -> bool:
        longest, count = width[part[0]], len(part) + 1
        most = self.most
        if self.tokens:
            more = most * (self.length + PROMPT_TOKENS) // (longest + PROMPT_TOKENS)
            most = max(most, min(more, MOST_TEXTS))
        padding = longest * count - tokens - new
        return count > most or (tokens >= FEW_TOKENS and padding > PADDING * longest * count)


def calls(
    index: Int[Tensor, " m"], inputs: Int[Tensor, " b"], most: int
) -> list[Int[Tensor, " _"]]:
    """Cut rows into calls of at most `most` inputs, each with all of its rows in `index`, in the
    order of inputs."""
    index = index[inputs[index].argsort(stable=True)]
    _, positions = inputs[index].unique_consecutive(return_inverse=True)
    return list(index.split((positions // most).bincount().tolist()))
