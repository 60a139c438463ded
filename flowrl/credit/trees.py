"""Advantage transforms for trees, from the values of their nodes.

They work on trees of denoising steps and of text: uniform trees, and others by `Context.nodes`.
`flowrl.credit.comparisons` has the differences to the parent (SPO, arXiv:2505.23564) and among
siblings. BranchGRPO's credit (arXiv:2509.06040) is `flowrl.credit.values.node_values`, then
`Standardize`, which compares the nodes of one depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.credit.choices import Choices
from flowrl.credit.comparisons import ParentDifference, PruneWidth, TwoLevel, roots
from flowrl.credit.fitting import refuse_independent
from flowrl.credit.values import NONE, Context, Credit, NodeLevel, Transform, masked_std
from flowrl.number_checks import check_number
from samplers import Columns
from samplers.number_ranges import ANY_NUMBER, AT_LEAST_0


def leaves(credit: Credit, context: Context) -> Tensor:
    """Number of scored leaves below each sample's node, [n k r]."""
    group, counts = context.columns.group, list[Tensor]()
    last = credit.mask[:, -1].double()
    for k, nodes in enumerate(context.columns.nodes):
        if context.nodes is None:
            ids = torch.arange(len(last)) * nodes // group
        else:
            ids = context.nodes[:, k]
        level = NodeLevel.of(ids, group)
        counts.append(level.at_leaves(level.total(last)))
    return torch.stack(counts, 1)


@dataclass(frozen=True)
class GlobalLocal:
    """A node's value minus its draw's, plus its value minus its parent's: TreeRL
    (arXiv:2506.11902).

        A = ((V - V_root) + (V - V_parent)) leaves^power / (std + eps)

    power   any number: a node's tokens are trained once here. Published code trains them once in
            each leaf below the node: a plain sum is power 1, and TreeRL's division by sqrt(leaves)
            is power 0.5; below 0, nodes with many leaves weigh less
    scaled  divides by the std of the draw's leaves; with power 1 this is TEMPO (arXiv:2509.18314).
            Without it there is no division
    first   keeps V - V_parent at first nodes whose parent is the draw: a group that never
            branches then gets 2 (r - mean). Otherwise such a group has exactly GRPO's advantage
    """

    power: float = 0.5
    scaled: bool = False
    first: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_number("GlobalLocal's power", self.power, ANY_NUMBER)
        check_number("GlobalLocal's eps", self.eps, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        local = ParentDifference()(credit, context).value.clone()
        if not self.first and context.columns.families[0] == 1:
            local[:, 0] = 0.0
        root = roots(credit, context)[:, None]
        ahead = credit.value - root
        ahead = torch.where(ahead.abs() > NONE * credit.value.abs().maximum(root.abs()), ahead, 0.0)
        value = (ahead + local) * leaves(credit, context).clamp(min=1) ** self.power
        if self.scaled:
            value = value / (self._spread(credit, context) + self.eps)
        return credit._replace(value=value * credit.mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_independent(self, choices)

    @staticmethod
    def _spread(credit: Credit, context: Context) -> Tensor:
        """The std of each draw's leaves, [n 1 r]."""
        shape = (-1, context.columns.group, credit.value.shape[-1])
        value, mask = (part[:, -1].reshape(shape) for part in credit)
        std = masked_std(value, mask, 1, 1)
        return std.repeat_interleave(context.columns.group, 0).view(-1, 1, shape[-1])


def families_read(transforms: Sequence[Transform], columns: Columns) -> tuple[int, ...]:
    """The part of `columns.families` that the transforms read."""
    if any(
        isinstance(transform, ParentDifference | TwoLevel | GlobalLocal) for transform in transforms
    ):
        return columns.families
    pruned = any(
        isinstance(transform, PruneWidth) and transform.keep == "branch" for transform in transforms
    )
    return columns.families[-1:] if pruned else ()
