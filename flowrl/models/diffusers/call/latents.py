"""Pass a state into a pipeline's loop: by `latents`, or in the output of prepare_latents.

Most pipelines take `latents` in the form that their loop uses. Others pack their input, or step
only part of the state (an image fixes the first frame of a video). For these the state replaces the
output of `prepare_latents`, and the numbers that no step changes stay as the pipeline made them:
our states exclude them, and so do noise, density and KL.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.scheduler_standin import FAILURES

BASE = 128  # digits below it are exact in bfloat16


@dataclass(frozen=True)
class Entry:
    """Entry of a state into the loop. `place` None: the argument `latents`; otherwise the index of
    the prepare_latents output that is the state.

    `index` maps each number of one of our rows to its position in a row of that output; None: the
    same numbers in the same order. `size` is the size of the data in `latents`.
    """

    place: int | None = None
    index: Tensor | None = None
    size: float = 1.0

    def around(
        self, prepare: Callable[..., Any], x: Tensor, dtype: torch.dtype | None = None
    ) -> Callable[..., Any]:
        """A replacement for prepare_latents that returns x [n *d] as the state, in `dtype` if
        given.

        Without a place, x is already among its arguments.
        """

        def put(*args: Any, **named: Any) -> Any:
            result = prepare(*args, **named)
            outputs = list(result) if isinstance(result, tuple) else [result]
            at = self.place or 0
            if self.place is not None:
                outputs[at] = self.fill(outputs[at], x)
            if dtype is not None:
                outputs[at] = outputs[at].to(dtype)
            return tuple(outputs) if isinstance(result, tuple) else outputs[0]

        return put

    def fill(self, prepared: Tensor, x: Tensor) -> Tensor:
        """The prepared state filled with our numbers."""
        flat, ours = prepared.flatten(1), x.flatten(1).to(prepared)
        index = torch.arange(flat.shape[1]) if self.index is None else self.index
        if ours.shape != (len(flat), len(index)):
            raise UserError(
                f"states of shape {tuple(x.shape)} do not fit into prepare_latents' "
                f"{tuple(prepared.shape)}: did the image size or the number of rows change?"
            )
        if self.index is not None:
            ours = flat.index_copy(1, index.to(flat.device), ours)
        # in its memory format: convolutions round differently in another one
        return torch.empty_like(prepared).copy_(ours.reshape(prepared.shape))


def injected(
    step: Callable[[Tensor, Entry], Tensor],
    prepared: Callable[[], Sequence[Any]],
    shape: tuple[int, ...],
    *,
    takes_latents: bool,
    size: float,
    owner: str,
) -> Entry:
    """Find the entry through which the first step receives exactly the given state.

    `step` returns what the first step receives [1 *shape] if an entry passes a state in; `prepared`
    returns the outputs of each call of prepare_latents; `size` is the size of the data in the
    scheduler's states. Raises UserError if there is no such entry.
    """
    # other numbers than any pipeline draws with the generator that it is given
    x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1)) + 0.5
    for entry in (Entry(), Entry(size=size)) if takes_latents else ():
        if _same(step, x, entry):
            return entry
    seen = prepared()
    outputs = (seen[0] if isinstance(seen[0], tuple) else (seen[0],)) if len(seen) == 1 else ()
    for place, value in enumerate(outputs):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            entry = Entry(place)
            if value[0].numel() != x.numel() or not _same(step, x, entry):
                index = _places(step, value, entry)
                entry = Entry(place, index)
                if index is None or not _same(step, x, entry):
                    continue
            return entry
    raise UserError(
        f"{owner}: no state can be passed into its loop: its steps receive neither `latents` nor "
        "the "
        "output of prepare_latents"
    )


def _same(step: Callable[[Tensor, Entry], Tensor], x: Tensor, entry: Entry) -> bool:
    try:
        seen = step(x, entry)
    except FAILURES:
        return False
    return seen.shape == x.shape and torch.equal(seen.cpu(), x.to(seen.dtype))


def _places(
    step: Callable[[Tensor, Entry], Tensor], prepared: Tensor, entry: Entry
) -> Tensor | None:
    """Return the position in a prepared row of each number that the step receives, digit by
    digit."""
    places = torch.arange(prepared[0].numel())
    found, power = torch.zeros(0), 1
    while power == 1 or power < len(places):
        digits = (places // power % BASE).to(prepared.dtype).reshape(1, *prepared.shape[1:])
        seen = step(digits, entry).cpu().double().flatten()
        if not bool((seen == seen.round()).all()) or seen.min() < 0 or seen.max() >= BASE:
            return None
        found = seen * power + (found if power > 1 else 0)
        power *= BASE
    index = found.long()
    fits = bool((index < len(places)).all()) and len(index.unique()) == len(index)
    return index if fits else None
