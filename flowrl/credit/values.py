"""Values of nodes from scores: the input of every advantage.

n samples (contiguous per draw), k decision points, r rewards. An entry is the credit of the node
that a sample passed at that point, so samples that share a node share its credit. Independent
trajectories form a tree with one leaf per node, so chains and trees share all code. All is float64,
and means and stds honour the mask.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from flowrl.errors import UserError
from flowrl.number_checks import check_number
from flowrl.table import EMPTY, Column, Table
from rewards.types import IntermediateScores, Scores
from samplers import Columns
from samplers.number_ranges import AT_LEAST_0
from samplers.untyped import distinct_rows

T = TypeVar("T")

NONE = 1e-6  # a spread below this fraction of the values' size is rounding, and counts as 0


class SampleTurns(NamedTuple):
    """Turns of samples, which may have fewer turns than there are decision points."""

    exists: Bool[Tensor, "n k"]  # the others are masked, at the latest at the end of the chain
    states: Int[Tensor, "n k"]  # ids of what each turn was decided in: GiGPO compares equal ones


class ReferenceRatios(NamedTuple):
    """Log-ratios of tokens to the initial model, in nats; NaN for tokens that the model did not
    generate."""

    log_ratios: Float[Tensor, "n t"]
    points: Int[Tensor, "n t"]  # the decision point of each token


class TrackedStatistics(NamedTuple):
    """Statistics of a tracker; each tracker sets its own."""

    baseline: Float[Tensor, " g"] | None = None  # the expected score of each draw


SAMPLE_TURNS: Column[SampleTurns] = Column("turns or steps of samples", "turns")
REFERENCE: Column[ReferenceRatios] = Column("divergences from the initial model", "reference")
TRACKED: Column[TrackedStatistics] = Column("statistics of a tracker", "tracker", "whole")
SAMPLE_STEPS: Column[Tensor] = Column("steps of samples of several sizes", "sizes")
"""[n k 3]: std, h and slope (as in `Columns`) of each sample's own steps, where samples of several
sizes have different noise levels."""


@dataclass(frozen=True)
class Context:
    """Inputs of credit besides the scores. A transform that reads a missing one raises an error.

    columns  of the decision points: nodes, noise, step sizes
    weights  of the rewards
    logp     mean log-density of each node's edge, by step (`Edges.logp`): for path fusion
    nodes    ids of the nodes that a sample passed, for trees that are not uniform: samples of a
             draw with the same id at a decision point share that node
    lengths  trained decisions of each sample: tokens, or noisy steps
    prompts  the prompt of each draw, as a row of the prompt set
    scores   of the samples, set by `Estimator`
    table    columns of features: SAMPLE_TURNS, REFERENCE, TRACKED, SAMPLE_STEPS and a user's own
    """

    columns: Columns
    weights: Float[Tensor, " r"]
    logp: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    nodes: Int[Tensor, "n k"] | None = None
    lengths: Num[Tensor, " n"] | None = None
    prompts: Int[Tensor, " g"] | None = None
    scores: Scores | None = None
    table: Table = EMPTY

    def needed(self, column: Column[T], reader: str) -> T:
        """The value of a column. UserError, naming the reader, if this run does not have it."""
        if column not in self.table:
            raise UserError(f"{reader} needs {column}, which this run does not have")
        return self.table[column]

    def with_column(self, column: Column[T], value: T) -> "Context":
        return replace(self, table=self.table.with_value(column, value))

    @property
    def intermediate(self) -> IntermediateScores | None:
        """Scores of intermediate states, of turns or of steps; None if none were asked for."""
        return None if self.scores is None else self.scores.intermediate

    def step_weights(
        self, weigh: Callable[[Tensor, Tensor, Tensor], Float[Tensor, " k"]]
    ) -> Float[Tensor, "... k 1"]:
        """Weights of steps from their std, h and slope [k], for every sample or for all alike."""
        if SAMPLE_STEPS not in self.table:
            std = torch.tensor(self.columns.std, dtype=torch.float64)
            h = torch.tensor(self.columns.h, dtype=torch.float64)
            slope = torch.tensor(self.columns.slope, dtype=torch.float64)
            return weigh(std, h, slope)[:, None]
        rows = [
            # samples that only fill up a group have no steps
            weigh(*steps.unbind(-1)) if bool(steps.any()) else torch.ones_like(steps[:, 0])
            for steps in self.table[SAMPLE_STEPS].unbind()
        ]
        return torch.stack(rows)[..., None]

    @property
    def way(self) -> IntermediateScores | None:
        """Older name of `intermediate`, kept for users' transforms."""
        return self.intermediate

    def arranged(self, move: Callable[[Tensor], Tensor]) -> "Context":
        """Apply `move` to the rows [n ...] of every per-sample entry."""
        return replace(
            self,
            nodes=None if self.nodes is None else move(self.nodes),
            lengths=None if self.lengths is None else move(self.lengths),
            table=self.table.arranged(move, "sample"),
        )


class Credit(NamedTuple):
    """Credit of samples; `value` is 0 where `mask` is False."""

    value: Float[Tensor, "n k r"]
    mask: Bool[Tensor, "n k r"]


def tracked(context: Context) -> TrackedStatistics:
    """The tracker's statistics; none of them without a tracker."""
    return context.table[TRACKED] if TRACKED in context.table else TrackedStatistics()


@runtime_checkable
class Transform(Protocol):
    def __call__(self, credit: Credit, context: Context) -> Credit: ...


def at_nodes(column: Tensor, nodes: int, group: int) -> Tensor:
    """Select one value per node, [n r] to [draws nodes r]: its first leaf's, since all leaves
    agree."""
    return column.view(-1, nodes, group // nodes, column.shape[-1])[:, :, 0]


def at_leaves(column: Tensor, group: int) -> Tensor:
    """Copy the values of nodes to their leaves, [draws nodes r] to [n r]."""
    return column.repeat_interleave(group // column.shape[1], 1).flatten(0, 1)


class NodeLevel(NamedTuple):
    """Nodes of one decision point of non-uniform trees. Draws with fewer than m nodes are padded
    with masked ones."""

    first: Int[Tensor, "g m"]  # a leaf of each node, -1 where there is none
    node_of_leaf: Int[Tensor, " n"]  # of each leaf's node among all g m

    @classmethod
    def of(cls, ids: Int[Tensor, " n"], group: int) -> "NodeLevel":
        """Group the samples of a draw that have the same id into one node."""
        n = len(ids)
        draw = torch.arange(n) // group
        pairs, node = distinct_rows(torch.stack([draw, ids.cpu()], 1))
        counts = pairs[:, 0].bincount(minlength=n // group)
        most = int(counts.max())
        before = counts.cumsum(0) - counts
        node_of_leaf = draw * most + node - before[draw]
        first = torch.full((n // group * most,), -1)
        first[node_of_leaf.flip(0)] = torch.arange(n).flip(0)
        return cls(first.view(-1, most), node_of_leaf)

    def at_nodes(self, column: Tensor) -> Tensor:
        """Select one value per node, [n r] to [draws m r]; 0 and False for missing nodes."""
        values = column[self.first.clamp(min=0)]
        return values * (self.first >= 0)[..., None]

    def at_leaves(self, column: Tensor) -> Tensor:
        """Copy the values of nodes [draws m r] to their leaves [n r]."""
        return column.flatten(0, 1)[self.node_of_leaf]

    def total(self, column: Tensor) -> Tensor:
        """Sum over each node's leaves, [n r] to [draws m r]."""
        shape = (self.first.numel(), column.shape[-1])
        sums = torch.zeros(shape, dtype=column.dtype).index_add_(0, self.node_of_leaf, column)
        return sums.view(*self.first.shape, -1)

    def most(self, column: Tensor) -> Tensor:
        """Maximum over each node's leaves, [n r] to [draws m r]."""
        shape = (self.first.numel(), column.shape[-1])
        node_of_leaf = self.node_of_leaf[:, None].expand_as(column)
        start = torch.full(shape, -torch.inf, dtype=column.dtype)
        return start.scatter_reduce(0, node_of_leaf, column, "amax").view(*self.first.shape, -1)


Rule = Callable[[Tensor, Tensor], Tensor]  # value, mask [draws nodes r] -> value


def by_column(credit: Credit, context: Context, rule: Rule) -> Credit:
    """Apply `rule` to the nodes of each decision point separately; masked entries stay 0."""
    columns, done = context.columns, list[Tensor]()
    refuse_tokens(credit, context)
    for k, nodes in enumerate(columns.nodes):
        if context.nodes is None:
            value = at_nodes(credit.value[:, k], nodes, columns.group)
            mask = at_nodes(credit.mask[:, k], nodes, columns.group)
            done.append(at_leaves(rule(value, mask) * mask, columns.group))
        else:
            level = NodeLevel.of(context.nodes[:, k], columns.group)
            value, mask = level.at_nodes(credit.value[:, k]), level.at_nodes(credit.mask[:, k])
            done.append(level.at_leaves(rule(value, mask) * mask))
    return Credit(torch.stack(done, 1), credit.mask)


def masked_mean(value: Tensor, mask: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Mean over the entries in `mask`, 0 where there are none; keeps dimensions."""
    count = mask.sum(dims, keepdim=True)
    return (value * mask).sum(dims, keepdim=True) / count.clamp(min=1)


def masked_std(value: Tensor, mask: Tensor, dims: int | tuple[int, ...], correction: int) -> Tensor:
    """Standard deviation over the entries in `mask`; 0 if the spread is only rounding error or
    there are too few values."""
    centred = (value - masked_mean(value, mask, dims)) * mask
    free = mask.sum(dims, keepdim=True) - correction
    std = (centred.square().sum(dims, keepdim=True) / free.clamp(min=1)).sqrt()
    size = (value * mask).abs().amax(dims, keepdim=True)
    return torch.where((free > 0) & (std > NONE * size), std, 0.0)


@dataclass(frozen=True)
class LikelyPaths:
    """A node's value from its leaves, weighted by the density of their paths: BranchGRPO's paper.

        V(node) = sum_leaves softmax(beta logp(path)) r

    logp(path) is the sum over the trained steps of the edges' mean log-densities.
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        check_number("LikelyPaths's beta", self.beta, AT_LEAST_0)


Fusion = Literal["mean", "max", "path"] | LikelyPaths


def node_values(scores: Scores, context: Context, fusion: Fusion = "mean") -> Credit:
    """Values of nodes from their scored leaves: BranchGRPO (arXiv:2509.06040).

        V(node) = mean of leaves, or max of leaves, or sum_children softmax(logp) V(child)

    The third is `path` (tree_prob_weighted): it goes from the leaves up and uses the mean
    log-densities of the children's edges. A single child passes its value on.
    """
    columns, group = context.columns, context.columns.group
    values, scored = scores.values.double().cpu(), scores.scored.cpu()
    if context.nodes is not None:
        return _ragged_values(values, scored, context, fusion)
    if isinstance(fusion, LikelyPaths):
        return _by_path(values, scored, context, fusion.beta)
    value = at_nodes(values * scored, group, group)
    mask = at_nodes(scored, group, group)
    levels: list[Credit] = []
    for k in reversed(range(len(columns.nodes))):
        if k + 1 < len(columns.nodes) and fusion == "path":
            value, mask = _fuse_paths(value, mask, k, context)
        elif fusion != "path":
            leaves = (values.shape[0] // group, columns.nodes[k], -1, values.shape[1])
            value, mask = _fuse(values.view(leaves), scored.view(leaves), fusion)
        levels.insert(0, Credit(at_leaves(value, group), at_leaves(mask, group)))
    return _stacked(levels)


def applying(credit: Credit, context: Context) -> Bool[Tensor, "n k r"]:
    """Whether each reward applies to a leaf of the node; everywhere if the scores are not known."""
    scores = context.scores
    if scores is None or bool(scores.applies.all()):
        return torch.ones_like(credit.mask)
    return node_values(replace(scores, scored=scores.applies), context).mask


def _stacked(levels: list[Credit]) -> Credit:
    """Credit [n k r] of all decision points, from that of each one, [n r]."""
    value = torch.stack([level.value for level in levels], 1)
    return Credit(value, torch.stack([level.mask for level in levels], 1))


def _by_path(values: Tensor, scored: Tensor, context: Context, beta: float) -> Credit:
    """Node values [n k r] with leaves weighted by softmax(beta log-density of their path)."""
    columns, group, points = context.columns, context.columns.group, list[Credit]()
    path = torch.zeros(len(values), 1, dtype=torch.float64)
    for k, logp in context.logp.items():
        path = path + at_leaves(logp.double().cpu().view(-1, columns.nodes[k], 1), group)
    for nodes in columns.nodes:
        shape = (len(values) // group, nodes, group // nodes, values.shape[1])
        value, mask = values.view(shape), scored.view(shape)
        likely = (beta * path.view(*shape[:3], 1)).masked_fill(~mask, -torch.inf)
        weight = likely.softmax(2).nan_to_num(0.0)
        fused = (weight * value.masked_fill(~mask, 0.0)).sum(2)
        points.append(Credit(at_leaves(fused, group), at_leaves(mask.any(2), group)))
    return _stacked(points)


def existing(credit: Credit, context: Context) -> Credit:
    """Mask the turns that a sample does not have. Credit per token stays unchanged, since all
    tokens exist."""
    if SAMPLE_TURNS not in context.table or of_tokens(credit, context):
        return credit
    mask = credit.mask & context.table[SAMPLE_TURNS].exists.cpu()[..., None]
    return Credit(credit.value * mask, mask)


def refuse_tokens(credit: Credit, context: Context) -> None:
    """UserError for credit per token, whose columns are no decision points."""
    if of_tokens(credit, context):
        raise UserError(
            "credit per token cannot be compared: put Penalize(each=True) after the transforms "
            "that compare samples"
        )


def of_tokens(credit: Credit, context: Context) -> bool:
    """Whether credit has one column per token rather than one per decision point."""
    return credit.value.shape[1] != len(context.columns.nodes)


def _ragged_values(values: Tensor, scored: Tensor, context: Context, fusion: Fusion) -> Credit:
    """Node values [n k r] of trees that are not uniform."""
    if fusion == "path" or isinstance(fusion, LikelyPaths):
        raise ValueError("path fusion needs uniform trees: use fusion='mean' or 'max'")
    assert context.nodes is not None
    points: list[Credit] = []
    for ids in context.nodes.unbind(1):
        level = NodeLevel.of(ids, context.columns.group)
        count = level.total(scored.double())
        if fusion == "mean":
            value = level.total(values * scored) / count.clamp(min=1)
        else:
            value = level.most(values.masked_fill(~scored, -torch.inf))
            value = value.masked_fill(count == 0, 0.0)
        points.append(Credit(level.at_leaves(value), level.at_leaves(count > 0)))
    return _stacked(points)


def _fuse(value: Tensor, mask: Tensor, fusion: Fusion) -> tuple[Tensor, Tensor]:
    """Reduce [draws nodes leaves r] to [draws nodes r]."""
    scored = mask.any(2)
    if fusion == "mean":
        return masked_mean(value, mask, 2)[:, :, 0], scored
    return value.masked_fill(~mask, -torch.inf).amax(2).masked_fill(~scored, 0.0), scored


def _fuse_paths(value: Tensor, mask: Tensor, k: int, context: Context) -> tuple[Tensor, Tensor]:
    """Compute the values of the nodes of step k from those of step k + 1, [draws nodes r]."""
    draws, children, r = value.shape
    parents = context.columns.nodes[k]
    if children == parents:
        return value, mask
    if k + 1 not in context.logp:
        raise ValueError(
            f"path fusion needs the log-densities of the branching step {k + 1}: train that step"
        )
    shape = (draws, parents, children // parents)
    logp = context.logp[k + 1].double().cpu().view(*shape, 1).expand(*shape, r)
    value, mask = value.view(*shape, r), mask.view(*shape, r)
    weight = logp.masked_fill(~mask, -torch.inf).softmax(2).nan_to_num(0.0)
    return (weight * value).sum(2), mask.any(2)
