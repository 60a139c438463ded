"""Rollouts of several shapes as one: each keeps its own plan, states and schedule."""

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
    """Samples of one plan at several shapes, in the order of `draws`.

    parts   a rollout for each shape, whose `prompt` counts from its own first draw
    indices  of each part, the indices of its draws among all draws

    The plans of the parts differ only in their noise levels. ValueError for others.
    """

    nodes = None

    parts: tuple[Rollout, ...]
    indices: tuple[tuple[int, ...], ...]
    draws: tuple[int, ...]

    def __post_init__(self) -> None:
        forms = {part.columns.nodes + part.columns.noisy for part in self.parts}
        if len(forms) > 1:
            raise ValueError(
                "the plan branches or draws noise at other steps on the noise levels of another "
                "shape, so samples of several shapes cannot be compared step by step"
            )

    @property
    def plan(self) -> Plan:
        return self.parts[0].plan

    @property
    def columns(self) -> Columns:
        """The first part's; their noise and step sizes are those of its levels."""
        return self.parts[0].columns

    @property
    def iteration(self) -> int:
        return self.parts[0].iteration

    @property
    def prompt(self) -> Int[Tensor, " n"]:
        rows = torch.arange(len(self.draws)).repeat_interleave(self.columns.group)
        return sent(rows, self.parts[0].x0.device)

    @property
    def lengths(self) -> Int[Tensor, " n"]:
        edges = len(self.parts[0].edges)
        return filled_rows(len(self.prompt), edges, torch.long, self.prompt.device)

    @property
    def edges(self) -> tuple[MixedEdge, ...]:
        same = zip(*(part.edges for part in self.parts), strict=True)
        return tuple(MixedEdge(e[0].step, self.whole([edge.logp for edge in e])) for e in same)

    def samples(self, part: int) -> Int[Tensor, " m"]:
        """Indices of a part's samples among all samples, on the CPU."""
        group = self.columns.group
        first = torch.tensor(self.indices[part]) * group
        return (first[:, None] + torch.arange(group)).flatten()

    def placed(self, part: int, prompt: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """Indices of a part's draws among all draws, on the same device."""
        return sent(torch.tensor(self.indices[part])[on_host(prompt)], prompt.device)

    def whole(self, parts: Sequence[Float[Tensor, "..."]]) -> Float[Tensor, "..."]:
        """Join a column of the parts, with equally many rows per draw, in the order of all
        draws."""
        return by_draws(parts, self.indices)


def joined_mixed(
    parts: Sequence[Rollout | MixedRollout], firsts: Sequence[int], draws: tuple[int, ...]
) -> MixedRollout:
    """Join rollouts whose first draws have the indices `firsts` among all draws. Each keeps its
    own parts."""
    rollouts, indices = list[Rollout](), list[tuple[int, ...]]()
    for part, first in zip(parts, firsts, strict=True):
        whole = (tuple(range(len(part.draws))),)
        of_part = part.indices if isinstance(part, MixedRollout) else whole
        rollouts += part.parts
        indices += [tuple(first + i for i in at) for at in of_part]
    return MixedRollout(tuple(rollouts), tuple(indices), draws)


def plan_of(rollout: object, draw: int) -> Plan | None:
    """The plan of a draw, by its index; None for a text."""
    if isinstance(rollout, MixedRollout):
        pairs = zip(rollout.parts, rollout.indices, strict=True)
        return next(part.plan for part, at in pairs if draw in at)
    return rollout.plan if isinstance(rollout, Rollout) else None


def scales_by_step(rollout: Rollout | MixedRollout) -> Float[Tensor, "n k 3"]:
    """Std, h and slope (see `Columns`) of the steps of each sample, in float64 on the CPU."""
    if isinstance(rollout, MixedRollout):
        return rollout.whole([scales_by_step(part) for part in rollout.parts])
    columns = rollout.columns
    column = torch.tensor([columns.std, columns.h, columns.slope], dtype=torch.float64).T
    return column.expand(len(rollout.prompt), -1, -1)


def by_draws(parts: Sequence[Tensor], indices: Sequence[Sequence[int]]) -> Tensor:
    """Join columns whose rows belong to the draws `indices` of each part, equally many to each, in
    the order of all draws."""
    by_draw = [
        part.reshape(len(at), -1, *part.shape[1:]) for part, at in zip(parts, indices, strict=True)
    ]
    order = torch.tensor([draw for at in indices for draw in at]).argsort()
    return torch.cat(by_draw)[order.to(parts[0].device)].flatten(0, 1)
