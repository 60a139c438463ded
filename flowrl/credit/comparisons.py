"""Advantage transforms that compare samples within a tree or a group, or select among them.

Like the transforms of `flowrl.credit.advantages`, they map credit [n, k, r] to credit and honour
its mask.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flowrl.credit.advantages import Standardize
from flowrl.credit.choices import Choices
from flowrl.credit.fitting import refuse_branches, refuse_independent
from flowrl.credit.values import (
    NONE,
    Context,
    Credit,
    at_leaves,
    at_nodes,
    by_column,
    masked_mean,
    masked_std,
    refuse_tokens,
)
from flowrl.errors import UserError
from flowrl.number_checks import check_number
from samplers import Columns
from samplers.number_ranges import ABOVE_0_TO_1, AT_LEAST_0


def roots(credit: Credit, context: Context) -> Tensor:
    """Value of each sample's draw, [n r]: the mean of its root nodes, weighted by their leaves."""
    group = context.columns.group
    first, mask = (part[:, 0].reshape(-1, group, part.shape[-1]) for part in credit)
    return masked_mean(first, mask, 1)[:, 0].repeat_interleave(group, 0)


def parent_values(credit: Credit, context: Context) -> Tensor:
    """Value of the parent of each sample's nodes, [n k r]: the node of the decision point before.
    A parent that is no node (the first noise, or the prompt) has the mean of its family, weighted
    by leaves; where nothing has split yet, that is the draw's."""
    columns, before = context.columns, list[Tensor]()
    refuse_tokens(credit, context)
    for k, (families, parents) in enumerate(zip(columns.families, columns.origins, strict=True)):
        if k and parents == columns.nodes[k - 1]:
            before.append(credit.value[:, k - 1])
            continue
        leaves = columns.group // families
        value, mask = (part[:, k].reshape(-1, leaves, part.shape[-1]) for part in credit)
        before.append(masked_mean(value, mask, 1)[:, 0].repeat_interleave(leaves, 0))
    return torch.stack(before, 1)


@dataclass(frozen=True)
class ParentDifference:
    """Gain of a node over its parent: SPO (arXiv:2505.23564).

        A(node) = V(node) - V(parent)

    The parent of a first node is the noise that it was drawn from, if others were drawn from it
    too, and otherwise the draw: its value is the mean of its children.
    """

    def __call__(self, credit: Credit, context: Context) -> Credit:
        before = parent_values(credit, context)
        moved, size = credit.value - before, torch.maximum(credit.value.abs(), before.abs())
        return credit._replace(value=torch.where(moved.abs() > NONE * size, moved, 0) * credit.mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_independent(self, choices)


@dataclass(frozen=True)
class TwoLevel:
    """Sum of two advantages: among siblings and among all nodes of the same depth.

        A = siblings rule(V among the children of one parent) + group rule(V among all nodes)

    UserError for trees that are not uniform.

    siblings  weight of the comparison among siblings, at least 0
    group     weight of the comparison among all nodes of a depth, at least 0
    rule      how values are compared: settings of `standardize`
    """

    siblings: float = 0.5
    group: float = 0.5
    rule: Standardize = field(default_factory=Standardize)

    def __post_init__(self) -> None:
        check_number("TwoLevel's siblings", self.siblings, AT_LEAST_0)
        check_number("TwoLevel's group", self.group, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        if context.nodes is not None:
            raise UserError("TwoLevel needs uniform trees: use GlobalLocal for other trees")
        columns, levels = context.columns, list[Tensor]()
        for k, (nodes, families) in enumerate(zip(columns.nodes, columns.families, strict=True)):
            value, mask = (at_nodes(part[:, k], nodes, columns.group) for part in credit)
            family = (-1, nodes // families, value.shape[-1])
            near = self.rule.rule(value.reshape(family), mask.reshape(family)).view_as(value)
            mixed = self.siblings * near + self.group * self.rule.rule(value, mask)
            levels.append(at_leaves(mixed * mask, columns.group))
        return credit._replace(value=torch.stack(levels, 1))

    def refuses(self, choices: Choices) -> str | None:
        return refuse_independent(self, choices)


@dataclass(frozen=True)
class BestWorst:
    """The best and worst sample of each group: the pair of DPO (arXiv:2305.18290).

        A = 1 for the best, -1 for the worst, 0 for the others

    All are 0 in a tie.
    """

    def __call__(self, credit: Credit, context: Context) -> Credit:
        def rule(value: Tensor, mask: Tensor) -> Tensor:
            best = value.masked_fill(~mask, -torch.inf).argmax(1, keepdim=True)
            worst = value.masked_fill(~mask, torch.inf).argmin(1, keepdim=True)
            ends = torch.zeros_like(value).scatter_add(1, best, torch.ones_like(value[:, :1]))
            ends = ends.scatter_add(1, worst, -torch.ones_like(value[:, :1]))
            return torch.where(masked_std(value, mask, 1, 0) > 0, ends, 0.0)

        return by_column(credit, context, rule)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)


@dataclass(frozen=True)
class Exponential:
    """Exponential weights with mean 1: reward-weighted regression (arXiv:2502.06061).

        w_i = exp(rate value_i) / mean_j exp(rate value_j)

    The mean is over the group or the batch. A higher `rate` is greedier; at 0 all weights are 1.

    rate  weight of a value in the exponent, at least 0; a larger one is greedier, 0 weighs all
          equally
    over  whose mean weight is 1: the `group`'s or the `batch`'s
    """

    rate: float = 1.0
    over: Literal["group", "batch"] = "group"

    def __post_init__(self) -> None:
        check_number("Exponential's rate", self.rate, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        def rule(value: Tensor, mask: Tensor) -> Tensor:
            dims = 1 if self.over == "group" else (0, 1)
            top = value.masked_fill(~mask, -torch.inf).amax(dims, keepdim=True)
            weight = (self.rate * (value - top)).masked_fill(~mask, -torch.inf).exp()
            return weight / masked_mean(weight, mask, dims).clamp(min=1e-300)

        return by_column(credit, context, rule)


@dataclass(frozen=True)
class PruneWidth:
    """Trains on a subset of the leaves after the last split: BranchGRPO (arXiv:2509.06040).

        kept = the best fraction of each parent's children | the best and worst fraction / 2

    branch    among each parent's children at the last split, at least one
    extremes  among the draw's leaves, at least one at each end; or, `over` the batch, among the
              leaves of all draws: DanceGRPO's best-of-N over prompts

    The other leaves are masked, never dropped. Values are taken at the last decision point. A chain
    splits at its roots, so all its decision points are pruned: `extremes` is then best-of-N
    selection within each group.

    keep      which leaves stay: `branch` or `extremes`, as above
    fraction  share of the leaves that stays, in (0, 1]
    over      with `extremes`, whose leaves are compared: the `group`'s or the `batch`'s
    """

    keep: Literal["branch", "extremes"]
    fraction: float = 0.5
    over: Literal["group", "batch"] = "group"

    def __post_init__(self) -> None:
        check_number("PruneWidth's fraction", self.fraction, ABOVE_0_TO_1)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        columns = context.columns
        shape = (-1, columns.group, credit.value.shape[-1])
        value, mask = (part[:, -1].reshape(shape) for part in credit)
        if self.keep == "branch":
            family = (-1, columns.group // columns.families[-1], shape[-1])
            chosen = self._top(value.reshape(family), mask.reshape(family), self.fraction)
        else:
            if self.over == "batch":
                value, mask = (part.reshape(1, -1, shape[-1]) for part in (value, mask))
            half = self.fraction / 2
            chosen = self._top(value, mask, half) | self._top(-value, mask, half)
        chosen = chosen.reshape(credit.mask[:, -1].shape)
        after = [k > self._last_split(columns) for k in range(len(columns.nodes))]
        free = torch.tensor([not late for late in after])
        mask = credit.mask & (chosen[:, None] | free[:, None])
        return Credit(credit.value * mask, mask)

    @staticmethod
    def _last_split(columns: Columns) -> int:
        splits = [
            k for k in range(1, len(columns.nodes)) if columns.nodes[k] > columns.nodes[k - 1]
        ]
        return max(splits, default=-1)

    @staticmethod
    def _top(value: Tensor, mask: Tensor, fraction: float) -> Tensor:
        """Mask of the best `fraction` of the scored entries of each group [g m r]; of equal entries
        the first."""
        order = value.masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
        rank = order.argsort(1)
        count = (mask.sum(1, keepdim=True) * fraction + 1e-9).floor().clamp(min=1)
        return mask & (rank < count)
