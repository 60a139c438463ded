"""Loops whose steps each move some parts of a state: frames, or chunks of frames, in turn or in a
wave (`samplers.clock`).

Such a loop calls `scheduler.step` for one part at a time. What a step of it is, and the whole state
before and after it, is put together here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.received import Received
from samplers.layout import Layout


@dataclass(frozen=True)
class PartOrder:
    """The steps of a loop for one number of steps.

    parts    the parts that each step moves, in the order of its calls of `scheduler.step`
    filling  the first evaluations of each step that no step follows: they fill a cache with the
             parts before, so that a stub cannot stand for them
    """

    parts: tuple[tuple[int, ...], ...]
    filling: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[int], counts: Sequence[int]) -> "PartOrder":
        """From the part of each call of `step`, and the number of calls after each evaluation."""
        steps, runs, first, length = list[tuple[int, ...]](), list[int](), 0, 0
        for count in counts:
            length += 1
            if count:
                steps.append(tuple(parts[first : first + count]))
                runs.append(length)
                first, length = first + count, 0
        usual = min(runs)
        return cls(tuple(steps), tuple(run - usual for run in runs))

    @property
    def calls(self) -> int:
        return sum(map(len, self.parts))


@dataclass
class Clockwork:
    """Parts of a loop's state, and their order by the number of steps of a call. `reads_decoded`:
    whether a part's predictions depend on the decoded parts before it (Wan-Animate 2)."""

    layout: Layout
    reads_decoded: bool = False
    orders: dict[int, PartOrder] = field(default_factory=dict)

    def of(self, arguments: Mapping[str, Any]) -> PartOrder | None:
        return self.orders.get(arguments["num_inference_steps"])

    def assembled(
        self, records: Sequence[Received], arguments: Mapping[str, Any], rows: int
    ) -> list[Received]:
        """The loop's steps, with whole states [n d], from its calls of `scheduler.step`.

        A part that a step leaves keeps what the call of `step` before left of it. Outputs are 0
        there. UserError for a loop with other steps than at load.
        """
        order, layout = self.of(arguments), self.layout
        assert order is not None, "the order is found with the schedule"
        if len(records) != order.calls:
            raise UserError(
                f"a loop calls scheduler.step {len(records)} times, but {order.calls} times at load"
            )
        waiting = iter([record.folded(rows) for record in records])
        steps = [[next(waiting) for _ in parts] for parts in order.parts]
        now: dict[int, Tensor] = {}
        for parts, calls in zip(order.parts, steps, strict=True):
            for part, call in zip(parts, calls, strict=True):
                now.setdefault(part, call.sample)
        whole = []
        for parts, calls in zip(order.parts, steps, strict=True):
            by_part = dict(zip(parts, calls, strict=True))
            before = now | {part: call.sample for part, call in by_part.items()}
            ended = [call.following for call in calls]
            now = before | {
                part: after for part, after in zip(parts, ended, strict=True) if after is not None
            }
            outputs = {part: torch.zeros_like(state) for part, state in before.items()}
            outputs |= {part: call.output for part, call in by_part.items()}
            state, following = packed_parts(layout, before), packed_parts(layout, now)
            whole.append(
                calls[0]._replace(
                    output=packed_parts(layout, outputs),
                    sample=state,
                    state=state,
                    following=None if None in ended else following,
                    clean=None,
                    times=tuple(call.timestep for call in calls),
                )
            )
        return whole

    def joined(self, calls: Sequence[Received], parts: Sequence[int], rows: int) -> Received:
        """One step of which only the parts that it moves are known: the others are 0."""
        by_part = {p: call.folded(rows) for p, call in zip(parts, calls, strict=True)}
        layout, like = self.layout, calls[0]

        def whole(of: Mapping[int, Tensor]) -> Tensor:
            sizes = enumerate(layout.sizes)
            return torch.cat(
                [
                    of[p].flatten(1) if p in of else like.output.new_zeros(rows, size)
                    for p, size in sizes
                ],
                1,
            )

        return like._replace(
            output=whole({p: call.output for p, call in by_part.items()}),
            sample=whole({p: call.sample for p, call in by_part.items()}),
            state=None,
        )


def packed_parts(layout: Layout, parts: Mapping[int, Tensor]) -> Tensor:
    return layout.pack([parts[p] for p in range(len(layout.names))])


def takes_turns(visited: Sequence[Received], counts: Sequence[int]) -> bool:
    """Whether a loop moves parts of its state: it steps several after one evaluation, or goes
    through its times again."""
    times = [float(torch.as_tensor(step.timestep).flatten()[0]) for step in visited]
    left = [k for k, (time, after) in enumerate(pairwise(times)) if time != after]
    again = bool(left) and times[0] in times[left[0] + 1 :]
    return again or any(count > 1 for count in counts)
