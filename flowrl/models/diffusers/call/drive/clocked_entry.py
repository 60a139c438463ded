"""Entry of the parts of a state into a loop that steps them one after the other.

They enter in outputs of `prepare_latents`: all of them in one, or a chunk in each of several. Which
numbers of these outputs a call of `step` receives is found by marks: states do not move in a visit,
so every call receives what was put in. No name of a family or of an argument is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.latents import BASE, PREPARE, with_numbers
from flowrl.models.diffusers.call.drive.patches import Patch
from flowrl.models.diffusers.call.drive.received import Received
from samplers.layout import Layout


@dataclass(frozen=True)
class ClockedEntry:
    """Entry of all parts of a state into a loop, by outputs of the method that prepares states.

    `places` has, for each call of the method, where our numbers [m] of a flat row are, and where
    they stand in a row of its output number `output`.
    """

    layout: Layout
    output: int
    places: tuple[tuple[Tensor, Tensor], ...]
    method: str = PREPARE

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        del x
        return {}

    def patches(self, pipe: Any, x: Tensor, dtype: torch.dtype | None) -> list[Patch]:
        """Patches that put x [n d] into the loop, in a given dtype."""

        def fill(prepared: Tensor, call: int) -> Tensor:
            if call >= len(self.places):
                raise UserError(
                    f"{type(pipe).__name__} prepares its states more often than at load"
                )
            ours, theirs = self.places[call]
            put = with_numbers(prepared, x.flatten(1)[:, ours.to(x.device)], theirs)
            return put if dtype is None else put.to(dtype)

        return [replaced(pipe, self.method, self.output, fill)]


def replaced(pipe: Any, method: str, output: int, fill: Callable[[Tensor, int], Tensor]) -> Patch:
    """A patch of a method that prepares states: its output of this number becomes that of `fill`, a
    function of it and of the number of the call."""
    real, calls = getattr(pipe, method), list[None]()

    def put(*args: Any, **named: Any) -> Any:
        result = real(*args, **named)
        outputs = list(result) if isinstance(result, tuple) else [result]
        outputs[output] = fill(outputs[output], len(calls))
        calls.append(None)
        return tuple(outputs) if isinstance(result, tuple) else outputs[0]

    return Patch(pipe, method, put)


def entry_of(
    visit: Callable[[Sequence[Patch]], Sequence[Received]],
    prepared: Sequence[Any],
    pipe: Any,
    method: str = PREPARE,
) -> ClockedEntry:
    """Find the parts of a state and where they enter.

    `visit` returns the calls of `scheduler.step` of a loop for one prompt in which no state moves,
    under some patches; `prepared` has the outputs of each call of the method. UserError if the
    calls' states are no parts of one of these outputs.
    """
    outputs = [one if isinstance(one, tuple) else (one,) for one in prepared]
    for index, value in enumerate(outputs[0] if outputs else ()):
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
            continue
        sizes = [one[index][0].numel() for one in outputs]
        positions = _positions(visit, sizes, pipe, method, index)
        if positions is not None:
            return _entry(positions, sizes, index, method, type(pipe).__name__)
    raise UserError(
        f"{type(pipe).__name__}: its steps receive parts of a state that do not come from the "
        f"output of {method}"
    )


Positions = dict[tuple[int, ...], tuple[int, ...]]  # of the numbers of a part: its shape


def _positions(
    visit: Callable[[Sequence[Patch]], Sequence[Received]],
    sizes: Sequence[int],
    pipe: Any,
    method: str,
    output: int,
) -> Positions | None:
    """The numbers of the prepared rows, one after the other, that each call of `step` receives."""
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    calls, seen, power = list[Tensor](), list[Received](), 1
    while power == 1 or power < sum(sizes):

        def mark(prepared: Tensor, call: int, power: int = power) -> Tensor:
            numbers = starts[call] + torch.arange(prepared[0].numel())
            digits = (numbers // power % BASE).reshape(1, *prepared.shape[1:])
            return digits.to(prepared).expand_as(prepared).clone()

        seen = [*visit([replaced(pipe, method, output, mark)])]
        digits = [step.sample[0].cpu().double().flatten() for step in seen]
        marks = all(
            bool((d == d.round()).all()) and 0 <= float(d.min()) <= float(d.max()) < BASE
            for d in digits
        )
        if not marks or (calls and len(calls) != len(digits)):
            return None
        calls = [
            d * power + (before if power > 1 else 0)
            for d, before in zip(digits, calls or digits, strict=True)
        ]
        power *= BASE
    parts: Positions = {}
    for step, numbers in zip(seen, calls, strict=True):
        parts.setdefault(tuple(numbers.long().tolist()), tuple(step.sample.shape[1:]))
    together = [number for part in parts for number in part]
    separate = len(together) == len(set(together))
    return parts if separate and max(together) < sum(sizes) else None


def _entry(
    parts: Positions, sizes: Sequence[int], output: int, method: str, owner: str
) -> ClockedEntry:
    ordered = sorted(parts, key=min)
    names = tuple(f"part {k + 1}" for k in range(len(ordered)))
    layout = Layout(names, tuple(parts[part] for part in ordered))
    theirs = torch.tensor([number for part in ordered for number in part])
    places, start = [], 0
    for size in sizes:
        ours = torch.nonzero((theirs >= start) & (theirs < start + size)).flatten()
        places.append((ours, theirs[ours] - start))
        start += size
    if len(ordered) < 2:
        raise UserError(f"{owner} goes through its times several times with the same state")
    return ClockedEntry(layout, output, tuple(places), method)


def marked(layout: Layout) -> Tensor:
    """A state [1 d] that has in each part its number."""
    sizes = torch.tensor(layout.sizes)
    return torch.arange(len(sizes)).repeat_interleave(sizes)[None].float()
