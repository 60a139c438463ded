"""From scores to advantages: pure functions on [n, k, r] arrays, chained.

n samples (a draw's are contiguous), k decision points, r rewards. An entry is the credit of the
node that a sample passed through at that point, so samples that share a node share its credit.
A chain of independent trajectories is a tree whose nodes hold one leaf each, so plain and tree
methods go through the same lines. Everything is float64, and every mean and std honours the mask.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewards.types import Scores
from samplers import Columns

NONE = 1e-6  # a spread below this part of the values' size is rounding, and counts as none


@dataclass(frozen=True)
class Context:
    """What credit may depend on, beside the scores.

    `logp` has the mean log-density of the noisy edges by step, one entry a node of that step
    (`Edges.logp`). Only path-probability fusion reads it.
    """

    columns: Columns
    weights: Float[Tensor, " r"]
    logp: Mapping[int, Tensor] = field(default_factory=dict)


class Credit(NamedTuple):
    """`value` is 0 where `mask` is False."""

    value: Float[Tensor, "n k r"]
    mask: Bool[Tensor, "n k r"]


@runtime_checkable
class Transform(Protocol):
    def __call__(self, credit: Credit, context: Context) -> Credit: ...


def at_nodes(column: Tensor, nodes: int, group: int) -> Tensor:
    """[n r] to [draws nodes r]: the leaves of a node agree, so the first stands for them."""
    return column.view(-1, nodes, group // nodes, column.shape[-1])[:, :, 0]


def at_leaves(column: Tensor, group: int) -> Tensor:
    """[draws nodes r] to [n r]."""
    return column.repeat_interleave(group // column.shape[1], 1).flatten(0, 1)


Rule = Callable[[Tensor, Tensor], Tensor]  # value, mask [draws nodes r] -> value


def by_column(credit: Credit, columns: Columns, rule: Rule) -> Credit:
    """Apply `rule` to the nodes of each decision point by itself; masked entries stay 0."""
    done = []
    for k, nodes in enumerate(columns.nodes):
        value, mask = (at_nodes(part[:, k], nodes, columns.group) for part in credit)
        done.append(at_leaves(rule(value, mask) * mask, columns.group))
    return Credit(torch.stack(done, 1), credit.mask)


def masked_mean(value: Tensor, mask: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Mean where `mask`, 0 where nothing is left; dims are kept."""
    count = mask.sum(dims, keepdim=True)
    return (value * mask).sum(dims, keepdim=True) / count.clamp(min=1)


def masked_std(value: Tensor, mask: Tensor, dims: int | tuple[int, ...], correction: int) -> Tensor:
    """Std where `mask`; 0 where the spread is only rounding or there are too few values."""
    centred = (value - masked_mean(value, mask, dims)) * mask
    free = mask.sum(dims, keepdim=True) - correction
    std = (centred.square().sum(dims, keepdim=True) / free.clamp(min=1)).sqrt()
    size = (value * mask).abs().amax(dims, keepdim=True)
    return torch.where((free > 0) & (std > NONE * size), std, 0.0)


Fusion = Literal["mean", "max", "path"]


def node_values(scores: Scores, context: Context, fusion: Fusion = "mean") -> Credit:
    """The value of a node from its scored leaves: their mean, or their maximum (arXiv:2509.06040).

    `path` weighs children by the softmax of their edges' mean log-densities, from the leaves up
    (BranchGRPO's tree_prob_weighted); a single child passes its value through.
    """
    columns, group = context.columns, context.columns.group
    values, scored = scores.values.double().cpu(), scores.scored.cpu()
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
    return Credit(*(torch.stack(parts, 1) for parts in zip(*levels, strict=True)))


def _fuse(value: Tensor, mask: Tensor, fusion: Fusion) -> tuple[Tensor, Tensor]:
    """[draws nodes leaves r] to [draws nodes r]."""
    some = mask.any(2)
    if fusion == "mean":
        return masked_mean(value, mask, 2)[:, :, 0], some
    return value.masked_fill(~mask, -torch.inf).amax(2).masked_fill(~some, 0.0), some


def _fuse_paths(value: Tensor, mask: Tensor, k: int, context: Context) -> tuple[Tensor, Tensor]:
    """Values of the nodes of step k from those of step k + 1, [draws nodes r]."""
    draws, children, r = value.shape
    parents = context.columns.nodes[k]
    if children == parents:
        return value, mask
    if k + 1 not in context.logp:
        raise ValueError(f"path fusion needs log-densities of the branching step {k + 1}: train it")
    shape = (draws, parents, children // parents)
    logp = context.logp[k + 1].double().cpu().view(*shape, 1).expand(*shape, r)
    value, mask = value.view(*shape, r), mask.view(*shape, r)
    weight = logp.masked_fill(~mask, -torch.inf).softmax(2).nan_to_num(0.0)
    return (weight * value).sum(2), mask.any(2)


@dataclass(frozen=True)
class Sum:
    """The weighted sum of rewards, r to 1.

    A reward that scored nobody in a group is left out of that group. A sample that lacks a reward
    which others of its group have is masked: it would compete with a part missing. `partial` lets
    it compete, the missing part counting 0, which is fair once rewards are standardised (GDPO).
    """

    partial: bool = False

    def __call__(self, credit: Credit, context: Context) -> Credit:
        group = context.columns.group
        mask = credit.mask.any(-1, keepdim=True)
        if not self.partial:
            grouped = credit.mask.view(-1, group, *credit.mask.shape[1:])
            present = grouped.any(1).repeat_interleave(group, 0)
            mask = mask & (credit.mask | ~present).all(-1, keepdim=True)
        total = (credit.value * credit.mask) @ context.weights.to(credit.value)
        return Credit(total[..., None] * mask, mask)


@dataclass(frozen=True)
class Standardize:
    """(value - mean) / (std + eps), over the nodes of each decision point by itself.

    scale       std of the group, of the batch (Flow-GRPO's global_std), or None (Dr. GRPO,
                arXiv:2503.20783)
    correction  0 divides by n (Flow-GRPO, with eps 1e-4), 1 by n - 1 (DanceGRPO, with 1e-8)
    centre      whose mean is taken off; GDPO's last step takes the batch's
    trim        leaves the lowest int(trim n) values out of mean and std (MixGRPO's trimmed_ratio)
    blend       what a group without spread gets: this times (value - batch mean) / batch std.
                0 gives exactly 0
    """

    scale: Literal["group", "batch"] | None = "group"
    correction: int = 0
    eps: float = 1e-4
    centre: Literal["group", "batch"] = "group"
    trim: float = 0.0
    blend: float = 0.0

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return by_column(credit, context.columns, self.rule)

    def rule(
        self, value: Float[Tensor, "g m r"], mask: Bool[Tensor, "g m r"]
    ) -> Float[Tensor, "g m r"]:
        """g groups of m values."""
        kept = self._untrimmed(value, mask)
        centre, scale = (1 if part == "group" else (0, 1) for part in (self.centre, self.scale))
        spread = masked_std(value, mask, centre, 0) > 0
        centred = torch.where(spread, value - masked_mean(value, kept, centre), 0.0)
        if self.scale is not None:
            std = masked_std(value, kept, scale, self.correction)
            centred = torch.where(std > 0, centred / (std + self.eps), 0.0)
        if self.blend > 0:
            std = masked_std(value, kept, (0, 1), self.correction)
            whole = (value - masked_mean(value, kept, (0, 1))) / (std + self.eps)
            flat = masked_std(value, mask, 1, 0) == 0
            centred = torch.where(flat & (std > 0), self.blend * whole, centred)
        return centred

    def _untrimmed(self, value: Tensor, mask: Tensor) -> Tensor:
        if self.trim == 0:
            return mask
        count = mask.sum(1, keepdim=True)
        drop = torch.minimum((count * self.trim).floor().long(), (count - 1).clamp(min=0))
        rank = value.masked_fill(~mask, torch.inf).argsort(dim=1, stable=True).argsort(1)
        return mask & (rank >= drop)


@dataclass(frozen=True)
class LeaveOneOut:
    """value - mean of the others: RLOO (arXiv:2402.14740), LOOP (arXiv:2503.00897)."""

    def __call__(self, credit: Credit, context: Context) -> Credit:
        centred = Standardize(scale=None)

        def rule(value: Tensor, mask: Tensor) -> Tensor:
            count = mask.sum(1, keepdim=True)
            return centred.rule(value, mask) * count / (count - 1).clamp(min=1)

        return by_column(credit, context.columns, rule)


@dataclass(frozen=True)
class ScaleSteps:
    """Weigh decision points by the kernel's std (TempFlow-GRPO, arXiv:2508.04324) or by 1 / h
    (GRPO-Guard, arXiv:2510.22319), relative to the mean over all steps but the last.

    A clipped surrogate is positively homogeneous in the advantage, so the weight of a step's loss
    can ride on its advantages and needs no place of its own.
    """

    by: Literal["std", "1/h"]

    def __call__(self, credit: Credit, context: Context) -> Credit:
        columns = context.columns
        std, h = (torch.tensor(x, dtype=torch.float64) for x in (columns.std, columns.h))
        weight = std if self.by == "std" else 1 / h
        return credit._replace(value=credit.value * (weight / weight[:-1].mean())[:, None])


@dataclass(frozen=True)
class Clip:
    """Advantages beyond +-`at` are cut."""

    at: float = 5.0

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return credit._replace(value=credit.value.clamp(-self.at, self.at))


@dataclass(frozen=True)
class Rescale:
    """Advantages in +-`at` to +-`to`: AWM's A / 5 * advantage_max, arXiv:2509.25050."""

    at: float = 5.0
    to: float = 1.0

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return credit._replace(value=credit.value * (self.to / self.at))


@dataclass(frozen=True)
class Estimator:
    """Scores to advantages: node values, then `transforms` in order.

    Rewards are summed where `Sum` stands; a chain without one gets it first.
    """

    transforms: tuple[Transform, ...]
    fusion: Fusion = "mean"

    @property
    def chain(self) -> tuple[Transform, ...]:
        summed = any(isinstance(t, Sum) for t in self.transforms)
        return self.transforms if summed else (Sum(), *self.transforms)

    def __call__(
        self, scores: Scores, context: Context
    ) -> tuple[Float[Tensor, "n k"], Bool[Tensor, "n k"]]:
        credit = node_values(scores, context, self.fusion)
        for transform in self.chain:
            credit = transform(credit, context)
        return credit.value[..., 0], credit.mask[..., 0]
