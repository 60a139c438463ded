"""Training rows: the data of an optimizer step.

b rows, t entries per row: one for images and videos, one per token for text. `*d`: latent dims.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from flowrl.errors import UserError
from flowrl.table import EMPTY, Column, ColumnForm, Table, joined_tables
from samplers import Kernel
from samplers.host import derived, on_device, on_host, picked, sent, sent_together, uploaded
from samplers.layout import Layout
from samplers.token_support import TokenSupport, joined_column
from samplers.untyped import distinct_rows

T = TypeVar("T")
RowsOf = TypeVar("RowsOf", bound="Rows")


class Evaluation(NamedTuple):
    """Log-likelihoods of b rows under one policy.

    `out` is the mean of a step, a velocity, or tokens' entropies; None where no loss reads it.
    """

    logp: Float[Tensor, "b t"]
    out: Tensor | None


OF_ROWS: tuple[ColumnForm, ...] = ("sample", "row")  # columns of a row table with a value per row
Evaluations = Mapping[str, Evaluation]  # by role: new, old, ref, or an average's name
PointValues = Float[Tensor, "n k"]  # of each sample at its decision points
PointMask = Bool[Tensor, "n k"]

BEHAVIOUR: Column[Evaluation] = Column("evaluation of the sampling policy", "update", "row")
"""Of rows whose `old` is the evaluation of the proximal policy: samples of older weights, whose
densities the update evaluates. Rows without it were sampled by `old`."""

ENGINE: Column[Evaluation] = Column("evaluation of the engine that sampled", "engine", "row")
"""Of rows whose `old` the trainer computes itself."""

ROWS_INDEX: Column[int] = Column("index of the rows", "sizes", "whole")
"""Index of these rows among an iteration's rows of their samples, by which they are dealt to
optimizer steps; without it, their index among all of the iteration's rows."""


@dataclass(frozen=True)
class Rows:
    """Rows of any kind. What is not trained on is masked, so that all processes hold equally many
    rows and counts do not depend on it; a budget alone drops rows, after the masks are known, whose
    loss nobody reads (`trimmed`).

    `state` numbers the states that rows start from: rows of one prompt with the same number have
    the same x and sigma, so their velocity is evaluated once. None: every row has its own state.
    `table` has the columns [b ...] of features, such as the gate of GARDO.
    """

    prompt: Int[Tensor, " b"]  # index into the batch's prompts
    advantage: Float[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]  # False: neither in the loss nor in its denominator
    old: Evaluation | None  # the behaviour policy's; None until the update evaluates it
    state: Int[Tensor, " b"] | None = field(default=None, kw_only=True)
    table: Table = field(default=EMPTY, kw_only=True)


class StoredRows(Rows):
    """Rows of states that storage may round or move.

    stored  the fields that hold such states [b *d]
    sigma   noise levels, in whose dtype and on whose device the states are computed with
    """

    stored: ClassVar[tuple[str, ...]]
    sigma: Float[Tensor, " b"]


@dataclass(frozen=True)
class TransitionRows(StoredRows):
    """Stored transitions x -> x_next of one noisy step."""

    stored = ("x", "x_next")

    x: Float[Tensor, "b *d"]
    x_next: Float[Tensor, "b *d"]
    sigma: Float[Tensor, " b"]
    sigma_next: Float[Tensor, " b"]
    kernel: Kernel
    free: Bool[Tensor, "b *d"] | None = None  # entries that are sampled; None: all
    layout: Layout | None = None  # parts that are entries [b p] of their own; None: one entry


@dataclass(frozen=True)
class MatchingRows(StoredRows):
    """Clean samples with new noise: x = (1 - sigma) x0 + sigma noise."""

    stored = ("x", "x0", "noise")

    x: Float[Tensor, "b *d"]
    sigma: Float[Tensor, " b"]
    x0: Float[Tensor, "b *d"]
    noise: Float[Tensor, "b *d"]
    free: Bool[Tensor, "b *d"] | None = None  # entries that are sampled; None: all
    layout: Layout | None = None  # parts that are entries [b p] of their own; None: one entry


@dataclass(frozen=True)
class TokenRows(Rows):
    """Completions of prompts that the policy has encoded, at index `prompt` of its batch.

    mask       the tokens in the loss, stop tokens included
    lengths    number of the model's own tokens. Positions from `ends` on are padding (0)
    kept       the tokens that the sampler's top-p, top-k and min-p kept; None: all
    sampled    log-probabilities under another engine that sampled; None: the model itself sampled
    from_environment  tokens of an environment, which are context only; None: no such tokens
    replayed   rows sampled by an older policy: their `old` is that policy's and is never recomputed
    """

    ids: Int[Tensor, "b t"]
    lengths: Int[Tensor, " b"]
    temperature: float
    kept: TokenSupport | None
    sampled: Float[Tensor, "b t"] | None = None
    from_environment: Bool[Tensor, "b t"] | None = None
    replayed: Bool[Tensor, " b"] | None = None

    @property
    def ends(self) -> Int[Tensor, " b"]:
        """Number of tokens in each row, including the environment's."""
        if self.from_environment is None:
            return self.lengths
        return derived(_with_replies, self.lengths, self.from_environment)

    @property
    def written(self) -> Bool[Tensor, "b t"]:
        """Mask of the tokens that the model generated."""
        ids, ends = on_host(self.ids), on_host(self.ends)
        if self.from_environment is None:
            return sent(_before(ids, ends), self.ids.device)
        return sent(_drawn(ids, ends, on_host(self.from_environment)), self.ids.device)


def _with_replies(lengths: Tensor, replies: Tensor) -> Tensor:
    return lengths + replies.sum(1)


def _before(ids: Tensor, ends: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device) < ends[:, None]


def _drawn(ids: Tensor, ends: Tensor, replies: Tensor) -> Tensor:
    return _before(ids, ends) & ~replies


def with_table(rows: RowsOf, table: Table) -> RowsOf:
    """Give rows the columns of their samples. ValueError if a row is not of one sample."""
    if not table.values:
        return rows

    def of_rows(column: Tensor) -> Tensor:
        if len(column) != len(rows.prompt):
            raise ValueError(
                f"a column of {len(column)} samples cannot become one of {len(rows.prompt)} rows: "
                "rows of trees and of pairs are of several samples"
            )
        kind = rows.advantage.dtype if column.is_floating_point() else column.dtype
        return sent(column.to(kind), rows.advantage.device)

    return replace(rows, table=rows.table | table.arranged(of_rows, "sample"))


def without_old(chunk: Rows, keep: bool = False) -> Rows:
    """The rows without the sampler's log-probabilities, so that the trainer recomputes them.

    Token rows keep the sampler's values as `sampled`: the log shows the difference. With `keep`
    other rows keep them as `BEHAVIOUR`: the update's `old` then comes from newer weights."""
    if chunk.old is None:
        return chunk
    if isinstance(chunk, TokenRows):
        sampled = chunk.old.logp if chunk.sampled is None else chunk.sampled
        return replace(chunk, old=None, sampled=sampled)
    table = chunk.table.with_value(BEHAVIOUR, chunk.old) if keep else chunk.table
    return replace(chunk, old=None, table=table)


def sampled_elsewhere(rows: Rows) -> Float[Tensor, "b t"] | None:
    """Log-probabilities from the sampler, where the trainer computes `old` itself."""
    if isinstance(rows, TokenRows):
        return rows.sampled
    return rows.table[ENGINE].logp if ENGINE in rows.table else None


def with_replayed(computed: Evaluation, chunk: Rows) -> Evaluation:
    """An evaluation of the sampling policy, in which replayed rows keep the log-probabilities of
    the older policy that sampled them."""
    if not isinstance(chunk, TokenRows) or chunk.replayed is None:
        return computed
    logp_at_sampling = chunk.sampled if chunk.old is None else chunk.old.logp
    assert logp_at_sampling is not None, "rows have the sampler's log-probabilities"
    return computed._replace(
        logp=torch.where(chunk.replayed[:, None], logp_at_sampling, computed.logp)
    )


def of_parts(
    values: Float[Tensor, "m q"] | Bool[Tensor, "m q"], parts: Sequence[str], layout: Layout
) -> Tensor:
    """Columns [m p] in the layout's order from those of the named parts; 0 for other parts.

    UserError for a part that states do not have.
    """
    if unknown := [name for name in parts if name not in layout.names]:
        raise UserError(
            f"recipe.modalities: this model's samples have the parts {', '.join(layout.names)}, "
            f"and no {unknown[0]}"
        )
    nothing = torch.zeros_like(values[:, 0])
    columns = dict(zip(parts, values.unbind(1), strict=True))
    return torch.stack([columns.get(name, nothing) for name in layout.names], 1)


def parts_of_samples(parts: Sequence[str], layout: Layout | None) -> Layout | None:
    """The layout whose parts are entries of their own; None if the recipe names none. UserError for
    a model whose samples have none."""
    if parts and layout is None:
        raise UserError(
            "recipe.modalities: this model's samples have one part alone: leave modalities out"
        )
    return layout if parts else None


def equal_before(x: Float[Tensor, "b *d"]) -> Int[Tensor, " b"]:
    """Number rows from 0; bit-identical neighbours have the same number."""
    new = (x[1:] != x[:-1]).flatten(1).any(1)
    return torch.cat([new.new_zeros(min(len(x), 1)), new]).cumsum(0)


def input_of(rows: Rows, together: int = 1) -> Int[Tensor, " b"]:
    """Number the network's inputs from 0 and return the input of each row, on the CPU. Rows of the
    same state share an input. With `together` above 1, that many consecutive rows count as one."""
    if rows.state is not None and together == 1:
        keys = [on_host(rows.prompt), on_host(rows.state)]
        return distinct_rows(torch.stack(keys, 1))[1]
    return torch.arange(len(rows.prompt)) // together


def once_per_state(
    rows: RowsOf, evaluate: Callable[[RowsOf], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Evaluate one row per state, and return the tensors for all rows."""
    if rows.state is None:
        return evaluate(rows)
    number = input_of(rows)
    if torch.equal(number, torch.arange(len(number))):  # each has a state of its own
        return evaluate(rows)
    parts = evaluate(take(rows, first_rows(number)))
    number = sent(number, parts[0].device)
    # index_select: on a CPU its backward adds in one order, whatever the threads
    return [derived(_selected, part, number) for part in parts]


def _selected(part: Tensor, number: Tensor) -> Tensor:
    return part.index_select(0, number)


def unlike(samples: Shaped[Tensor, "b *d"]) -> Bool[Tensor, " b"]:
    """Mask of rows whose sample differs from the other of their pair of consecutive rows. The
    gradients of a pair with one sample twice cancel but for rounding, which Adam would scale to
    whole steps."""
    return samples[::2].ne(samples[1::2]).flatten(1).any(dim=1).repeat_interleave(2)


def unlike_texts(rows: TokenRows) -> Bool[Tensor, " b"]:
    """`unlike` for completions with all their tokens, an environment's included."""
    ids, ends = on_host(rows.ids), on_host(rows.ends)
    return sent(unlike(ids) | unlike(ends[:, None]), rows.ids.device)


def first_rows(numbers: Int[Tensor, " b"]) -> Int[Tensor, " m"]:
    """First row of each number; the numbers are 0 to m - 1."""
    indices = torch.arange(len(numbers), device=numbers.device)
    count = int(numbers.max()) + 1 if len(numbers) else 0
    none = torch.full((count,), len(numbers), device=numbers.device)
    return none.scatter_reduce(0, numbers, indices, "amin")


def stacked(parts: Sequence[T]) -> T:
    """Concatenate rows of one kind; fields that are not tensors come from the first."""

    def join(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Tensor | TokenSupport):
            return joined_column(values)
        if isinstance(values[0], Evaluation):
            return Evaluation(*(join(part) for part in zip(*values, strict=True)))
        if isinstance(values[0], Table):
            return joined_tables(values)
        return values[0]

    first = parts[0]
    assert is_dataclass(first) and not isinstance(first, type)
    names = [f.name for f in fields(first)]
    return replace(first, **{name: join([getattr(p, name) for p in parts]) for name in names})


def trimmed(rows: Rows, together: int) -> Rows:
    """Drop sets of `together` consecutive rows without any entry in the loss; the loss and its
    denominators stay the same."""
    has_entries = on_host(rows.mask).any(1).view(-1, together).any(1).repeat_interleave(together)
    return rows if bool(has_entries.all()) else take(rows, has_entries.nonzero()[:, 0])


def restored(rows: RowsOf, device: torch.device) -> RowsOf:
    """Move stored states to the dtype and device of the noise levels, and text rows, which start on
    the CPU, to `device`. Rows that are already there are returned unchanged."""
    if isinstance(rows, TokenRows):
        return _sent(rows, device)
    if not isinstance(rows, StoredRows):
        return rows
    sigma, changes = rows.sigma, dict[str, Any]()
    for column in fields(rows):
        value = getattr(rows, column.name)
        if column.name in rows.stored and (value.dtype, value.device) != (
            sigma.dtype,
            sigma.device,
        ):
            changes[column.name] = uploaded(value, sigma.device).to(sigma.dtype)
    if rows.old is not None and rows.old.out is not None:
        changes["old"] = rows.old._replace(out=uploaded(rows.old.out, sigma.device))
    if rows.table.values:
        move = partial(uploaded, device=sigma.device)
        changes["table"] = rows.table.arranged(move, *OF_ROWS)
    return replace(rows, **changes) if changes else rows


def _sent(rows: T, device: torch.device) -> T:
    """Rows of texts on a device, by one copy for all tensors of a dtype."""
    assert is_dataclass(rows) and not isinstance(rows, type)
    leaves: list[Tensor] = []

    def parts(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, Tensor):
            return change(value) if value.device != device else value
        if isinstance(value, TokenSupport):
            return TokenSupport(*(parts(getattr(value, f.name), change) for f in fields(value)))
        if isinstance(value, Evaluation):
            return Evaluation(*(parts(leaf, change) for leaf in value))
        if isinstance(value, Table):
            return value.arranged(lambda leaf: parts(leaf, change), *OF_ROWS)
        return value

    def noted(leaf: Tensor) -> Tensor:
        leaves.append(leaf)
        return leaf

    values = {f.name: getattr(rows, f.name) for f in fields(rows)}
    for value in values.values():
        parts(value, noted)
    copies = iter(sent_together(leaves, device))
    return replace(rows, **{name: parts(v, lambda _: next(copies)) for name, v in values.items()})


def take(rows: T, index: Int[Tensor, " m"]) -> T:
    """Select the rows `index` of every tensor in `rows`; other fields stay unchanged."""
    index_on: dict[torch.device, Tensor] = {index.device: index}

    def pick(value: Any) -> Any:
        if isinstance(value, Tensor | TokenSupport):
            if value.device not in index_on:
                index_on[value.device] = on_device(index, value.device)
            local_index = index_on[value.device]
            return (
                value[local_index]
                if isinstance(value, TokenSupport)
                else picked(value, local_index)
            )
        if isinstance(value, Evaluation):
            return Evaluation(*(pick(leaf) for leaf in value))
        if isinstance(value, Table):
            return value.arranged(pick, *OF_ROWS)
        return value

    assert is_dataclass(rows) and not isinstance(rows, type)
    return replace(rows, **{f.name: pick(getattr(rows, f.name)) for f in fields(rows)})
