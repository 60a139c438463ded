"""Rollouts of several sizes as one: each keeps its own plan, states and schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.host import filled_rows, on_host, sent
from samplers.plan import Columns, Plan
from samplers.roll import Rollout


@dataclass(frozen=True)
class MixedEdge:
    """Log-densities of one trained step, in the order of all draws."""

    step: int
    logp: Float[Tensor, " nodes"]


@dataclass(frozen=True)
class MixedRollout:
    """Samples of one plan at several sizes, in the order of `draws`.

    by_size  a rollout for each size, whose `prompt` counts from its own first draw
    indices  of each size, the indices of its draws among all draws

    The plans of the sizes differ only in their noise levels. ValueError for others.
    """

    nodes = None

    by_size: tuple[Rollout, ...]
    indices: tuple[tuple[int, ...], ...]
    draws: tuple[int, ...]

    def __post_init__(self) -> None:
        forms = {rollout.columns.nodes + rollout.columns.noisy for rollout in self.by_size}
        if len(forms) > 1:
            raise ValueError(
                "the plan branches or draws noise at other steps on the noise levels of another "
                "size, so samples of several sizes cannot be compared step by step"
            )

    @property
    def plan(self) -> Plan:
        return self.by_size[0].plan

    @property
    def columns(self) -> Columns:
        """The first size's; their noise and step sizes are those of its levels."""
        return self.by_size[0].columns

    @property
    def iteration(self) -> int:
        return self.by_size[0].iteration

    @property
    def prompt(self) -> Int[Tensor, " n"]:
        rows = torch.arange(len(self.draws)).repeat_interleave(self.columns.group)
        return sent(rows, self.by_size[0].x0.device)

    @property
    def lengths(self) -> Int[Tensor, " n"]:
        edges = len(self.by_size[0].edges)
        return filled_rows(len(self.prompt), edges, torch.long, self.prompt.device)

    @property
    def edges(self) -> tuple[MixedEdge, ...]:
        same = zip(*(rollout.edges for rollout in self.by_size), strict=True)
        return tuple(MixedEdge(e[0].step, self.whole([edge.logp for edge in e])) for e in same)

    def samples(self, size: int) -> Int[Tensor, " m"]:
        """Indices of a size's samples among all samples, on the CPU."""
        group = self.columns.group
        first = torch.tensor(self.indices[size]) * group
        return (first[:, None] + torch.arange(group)).flatten()

    def placed(self, size: int, prompt: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """Indices of a size's draws among all draws, on the same device."""
        return sent(torch.tensor(self.indices[size])[on_host(prompt)], prompt.device)

    def whole(self, columns: Sequence[Float[Tensor, "..."]]) -> Float[Tensor, "..."]:
        """Join the columns of the sizes, with equally many rows per draw, in the order of all
        draws."""
        return by_draws(columns, self.indices)


def joined_mixed(
    rollouts: Sequence[Rollout | MixedRollout], firsts: Sequence[int], draws: tuple[int, ...]
) -> MixedRollout:
    """Join rollouts whose first draws have the indices `firsts` among all draws. Each keeps its
    own sizes."""
    by_size, indices = list[Rollout](), list[tuple[int, ...]]()
    for rollout, first in zip(rollouts, firsts, strict=True):
        whole = (tuple(range(len(rollout.draws))),)
        of_sizes = rollout.indices if isinstance(rollout, MixedRollout) else whole
        by_size += rollout.by_size
        indices += [tuple(first + i for i in at) for at in of_sizes]
    return MixedRollout(tuple(by_size), tuple(indices), draws)


def plan_of(rollout: object, draw: int) -> Plan | None:
    """The plan of a draw, by its index; None for a text."""
    if isinstance(rollout, MixedRollout):
        pairs = zip(rollout.by_size, rollout.indices, strict=True)
        return next(of_size.plan for of_size, at in pairs if draw in at)
    return rollout.plan if isinstance(rollout, Rollout) else None


def scales_by_step(rollout: Rollout | MixedRollout) -> Float[Tensor, "n k 3"]:
    """Std, h and slope (see `Columns`) of the steps of each sample, in float64 on the CPU."""
    if isinstance(rollout, MixedRollout):
        return rollout.whole([scales_by_step(of_size) for of_size in rollout.by_size])
    columns = rollout.columns
    column = torch.tensor([columns.std, columns.h, columns.slope], dtype=torch.float64).T
    return column.expand(len(rollout.prompt), -1, -1)


def by_draws(columns: Sequence[Tensor], indices: Sequence[Sequence[int]]) -> Tensor:
    """Join columns whose rows belong to the draws `indices` of each, equally many to each, in
    the order of all draws."""
    by_draw = [
        column.reshape(len(at), -1, *column.shape[1:])
        for column, at in zip(columns, indices, strict=True)
    ]
    order = torch.tensor([draw for at in indices for draw in at]).argsort()
    return torch.cat(by_draw)[order.to(columns[0].device)].flatten(0, 1)
