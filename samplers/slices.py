"""Split draws at call boundaries, so that results stay bit-identical."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import gcd, lcm
from typing import TypeVar

import torch
from torch import Tensor

from samplers.completions import TextPlan, TextRollout
from samplers.host import derived
from samplers.plan import Plan
from samplers.roll import Rollout
from samplers.token_support import TokenSupport, joined_column
from samplers.walk import Begin, Edges, Velocity

R = TypeVar("R")


@dataclass(frozen=True)
class DrawsSlice:
    """A contiguous slice of a rollout's draws; `first` is the index of its first draw."""

    first: int
    draws: tuple[int, ...]

    def velocity(self, whole: Velocity) -> Velocity:
        """A velocity function whose `prompt` counts from this slice's first draw."""
        return lambda x, sigma, prompt: whole(x, sigma, derived(self.among_all, prompt))

    def begin(self, whole: Begin | None) -> Begin | None:
        if whole is None:
            return None
        return lambda noise, prompt: whole(noise, derived(self.among_all, prompt))

    def among_all(self, prompt: Tensor) -> Tensor:
        """Indices among all draws."""
        return prompt + self.first


def draw_slices(
    plan: Plan | TextPlan, draws: Sequence[int], rows_per_call: int, decoded: int | None = None
) -> Iterator[DrawsSlice]:
    """Split draws at call boundaries, so that results stay bit-identical: calls of `rows_per_call`
    rows at every level, and of `decoded` samples in the decoder (None: nothing is decoded).

    One slice if there is no such boundary, and for plans with other calls: image plans whose route
    does not split; text plans with trees, greedy leaves or several turns.
    """
    size = draws_per_slice(plan, rows_per_call) or len(draws)
    if decoded is not None:
        size = lcm(size, decoded // gcd(decoded, plan.group))
    for first in range(0, len(draws), size):
        yield DrawsSlice(first, tuple(draws[first : first + size]))


def draws_per_slice(plan: Plan | TextPlan, rows_per_call: int) -> int | None:
    """Fewest draws whose rows fill whole calls at every level; None if no number does."""
    if isinstance(plan, TextPlan):
        simple = not (plan.cuts or plan.forking or plan.greedy or plan.turns > 1)
        counts = {plan.group}
    else:
        simple = plan.route.splits
        counts = {*plan.states, plan.group}
    return lcm(*(rows_per_call // gcd(rows_per_call, n) for n in counts)) if simple else None


def placed_rollout(rollout: Rollout, draws: DrawsSlice) -> Rollout:
    """A slice's rollout with `prompt` counted from the first of all draws."""

    def placed(prompt: Tensor) -> Tensor:
        return derived(draws.among_all, prompt)

    edges = tuple(replace(edge, prompt=placed(edge.prompt)) for edge in rollout.edges)
    return replace(rollout, prompt=placed(rollout.prompt), edges=edges)


def joined_rollout(rollouts: Sequence[Rollout], draws: tuple[int, ...]) -> Rollout:
    """Join the slices' rollouts. States that edges share within one stay shared. A route that
    writes notes does not split, so there are none."""
    assert not any(rollout.notes for rollout in rollouts), "draw_slices leaves its draws together"
    joined: dict[tuple[int, ...], Tensor] = {}

    def cat(tensors: Sequence[Tensor]) -> Tensor:
        key = tuple(id(tensor) for tensor in tensors)
        if key not in joined:
            joined[key] = derived(lambda *columns: torch.cat(columns), *tensors)
        return joined[key]

    edges: list[Edges] = []
    for same in zip(*(rollout.edges for rollout in rollouts), strict=True):
        columns = {f.name: [getattr(edge, f.name) for edge in same] for f in fields(Edges)}
        columns.pop("step")
        whole = {name: None if c[0] is None else cat(c) for name, c in columns.items()}
        edges.append(Edges(same[0].step, **whole))  # type: ignore[arg-type]
    x0 = cat([rollout.x0 for rollout in rollouts])
    prompt = cat([rollout.prompt for rollout in rollouts])
    masks = [rollout.free for rollout in rollouts if rollout.free is not None]
    free = torch.cat(masks) if masks else None
    return replace(rollouts[0], x0=x0, prompt=prompt, draws=draws, edges=tuple(edges), free=free)


def joined_texts(rollouts: Sequence[TextRollout], draws: tuple[int, ...]) -> TextRollout:
    """Join the slices' text rollouts: every column, whatever its name."""
    points = _with_joined_columns([rollout.points for rollout in rollouts])
    return replace(_with_joined_columns(rollouts), draws=draws, points=points)


def _with_joined_columns(records: Sequence[R]) -> R:
    """Records of one kind as one: fields that have rows are joined, others are of the first."""
    first = records[0]
    assert is_dataclass(first) and not isinstance(first, type)
    whole = {
        f.name: joined_column([getattr(record, f.name) for record in records])
        for f in fields(first)
        if isinstance(getattr(first, f.name), Tensor | TokenSupport)
    }
    return replace(first, **whole)
