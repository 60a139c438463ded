"""Pass a state into a pipeline's loop: by `latents`, or in the output of prepare_latents.

The parts of a state that has several (`samplers.layout`) enter one by one, by arguments and methods
of names like these (audio_latents, prepare_audio_latents).

Most pipelines take `latents` in the form that their loop uses. Others pack their input, or step
only part of the state (an image fixes the first frame of a video). For these the state replaces the
output of `prepare_latents`, and the numbers that no step changes stay as the pipeline made them:
our states exclude them, and so do noise, density and KL.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.patches import Patch
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES
from flowrl.models.diffusers.call.inputs.conditioning import Calls
from flowrl.models.out_of_memory import raise_memory
from samplers.layout import Layout

MAIN, PREPARE = "latents", "prepare_latents"
ARGUMENT = re.compile(r"((?P<part>\w+)_)?latents")
METHOD = re.compile(r"prepare_(\w+_)?latents")
BASE = 128  # digits below it are exact in bfloat16


@dataclass(frozen=True)
class Entry:
    """Entry of a state into the loop.

    output    index of the prepare_latents output that is the state; None: it enters by an argument
    index     position of each number of one of our rows in a row of that output; None: the same
              numbers in the same order
    size      size of the data in `latents`
    argument  of the call that the state's part enters by
    method    that prepares the state's part
    memory    dimensions of a row in the order of their strides, the largest first, as in the state
              that the pipeline prepares itself; empty: as they come
    """

    output: int | None = None
    index: Tensor | None = None
    size: float = 1.0
    argument: str = MAIN
    method: str = PREPARE
    memory: tuple[int, ...] = ()

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        """Arguments of a call that put x [n *d] into its loop."""
        if self.output is not None:
            return {}
        return {self.argument: x if self.size == 1 else self.size * x}

    def patches(self, pipe: Any, x: Tensor, dtype: torch.dtype | None) -> list[Patch]:
        """Patches that do so, or let the state have a given dtype, or its memory order."""
        if self.output is None and dtype is None and not self.memory:
            return []
        return [Patch(pipe, self.method, self.around(getattr(pipe, self.method), x, dtype))]

    def around(
        self, prepare: Callable[..., Any], x: Tensor, dtype: torch.dtype | None = None
    ) -> Callable[..., Any]:
        """A replacement for prepare_latents that returns x [n *d] as the state, in `dtype` if
        given.

        Without an output, x is among its arguments already. A pipeline may add it to noise of
        weight 0, so its memory order is set behind that.
        """

        def put(*args: Any, **named: Any) -> Any:
            result = prepare(*args, **named)
            outputs = list(result) if isinstance(result, tuple) else [result]
            at = self.output or 0
            if self.output is not None:
                outputs[at] = self.fill(outputs[at], x)
            outputs[at] = in_memory_order(outputs[at], self.memory)
            if dtype is not None:
                outputs[at] = outputs[at].to(dtype)
            return tuple(outputs) if isinstance(result, tuple) else outputs[0]

        return put

    def fill(self, prepared: Tensor, x: Tensor) -> Tensor:
        """The prepared state with_numbers with our numbers."""
        return with_numbers(prepared, x, self.index)


def with_numbers(prepared: Tensor, x: Tensor, index: Tensor | None) -> Tensor:
    """A prepared state with numbers x [n *d] at positions `index` of its rows; None: everywhere, in
    the same order."""
    flat, ours = prepared.flatten(1), x.flatten(1).to(prepared)
    if ours.shape != (len(flat), flat.shape[1] if index is None else len(index)):
        raise UserError(
            f"states of shape {tuple(x.shape)} do not fit into prepare_latents' "
            f"{tuple(prepared.shape)}: did the image size or the number of rows change?"
        )
    if index is not None:
        ours = flat.index_copy(1, index.to(flat.device), ours)
    # in its memory format: convolutions round differently in another one
    return torch.empty_like(prepared).copy_(ours.reshape(prepared.shape))


def memory_order(outputs: Sequence[Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of a row of the state [1 *shape] among the outputs of the method that prepares
    it, the largest stride first; empty where they come in order, or where there is no such output.
    """
    values = outputs[0] if len(outputs) == 1 and isinstance(outputs[0], tuple) else outputs
    for value in values:
        if isinstance(value, Tensor) and tuple(value.shape) == (1, *shape):
            strides = value.stride()[1:]
            order = tuple(sorted(range(len(shape)), key=lambda dim: -strides[dim]))
            return () if order == tuple(range(len(shape))) else order
    return ()


def in_memory_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """The same numbers x [n *d], with the strides of `memory_order`: matrix products round
    differently in another order. Keeps the gradient."""
    if not order:
        return x
    dims = (0, *(dim + 1 for dim in order))
    back = sorted(range(len(dims)), key=dims.__getitem__)
    return x.permute(dims).contiguous().permute(back)


@dataclass(frozen=True)
class PartEntries:
    """The entries of all parts of a state."""

    layout: Layout
    parts: tuple[Entry, ...]

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        pairs = zip(self.parts, self.layout.unpack(x), strict=False)
        return {name: v for entry, part in pairs for name, v in entry.arguments(part).items()}

    def patches(self, pipe: Any, x: Tensor, dtype: torch.dtype | None) -> list[Patch]:
        pairs = zip(self.parts, self.layout.unpack(x), strict=False)
        return [patch for entry, part in pairs for patch in entry.patches(pipe, part, dtype)]


class Enters(Protocol):
    """The way in which a given state enters a loop: by arguments, or by patches of a call."""

    def arguments(self, x: Tensor) -> dict[str, Tensor]: ...

    def patches(self, pipe: Any, x: Tensor, dtype: torch.dtype | None) -> list[Patch]: ...


@dataclass(frozen=True)
class Target:
    """The point at which a driven call stops."""

    times: Tensor  # [] or [n]
    index: int | None = None  # of the loop's steps: fast-forward to it
    levels: Tensor | None = None  # [] or [n], for loops that read their scheduler's `sigmas`
    beside: Mapping[str, Tensor] = field(default_factory=dict)  # times of other schedulers, by name


@dataclass(frozen=True)
class PipelineCall:
    """One call of the pipeline: its arguments, stand-ins for its encoders, and its first state."""

    arguments: Mapping[str, Any]
    encoded: Calls = ()
    x: Tensor | None = None  # None: the pipeline's own initial noise
    entry: Enters = Entry()
    stubs: bool = True  # whether stubs may stand for denoisers, where only states matter
    held: torch.dtype | None = None  # of the state in the loop; None: as the pipeline prepares it


@dataclass(frozen=True)
class Doors:
    """Names through which a state, or a part of one, may enter the loop of a pipeline class."""

    arguments: tuple[str, ...]
    methods: tuple[str, ...]

    @classmethod
    def of(cls, kind: type, *, parts: bool) -> "Doors":
        """Names for the only state, or for parts of one, the shortest first."""
        parameters = inspect.signature(kind.__call__).parameters
        arguments = [n for n in parameters if ARGUMENT.fullmatch(n)] if parts else [MAIN]
        methods = [n for n in dir(kind) if METHOD.fullmatch(n)] if parts else [PREPARE]
        return cls(
            tuple(sorted((n for n in arguments if n in parameters), key=len)),
            tuple(sorted(methods, key=len)),
        )

    def without(self, entries: Sequence[Entry]) -> "Doors":
        """The names that none of these entries uses."""
        used = {e.argument if e.output is None else e.method for e in entries}
        return Doors(
            arguments=tuple(name for name in self.arguments if name not in used),
            methods=tuple(name for name in self.methods if name not in used),
        )


def injected(
    step: Callable[[Tensor, Entry], Tensor],
    prepared: Callable[[str], Sequence[Any]],
    shape: tuple[int, ...],
    doors: Doors,
    *,
    size: float,
    owner: str,
) -> Entry:
    """Find the entry through which the first step receives exactly the given state.

    `step` returns what the first step receives [1 *shape] if an entry passes a state in; `prepared`
    returns the outputs of each call of a method; `size` is the size of the data in the scheduler's
    states. Raises UserError if there is no such entry.
    """
    # other numbers than any pipeline draws with the generator that it is given
    x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1)) + 0.5
    for argument in doors.arguments:
        entry = Entry(argument=argument, method=f"prepare_{argument}")
        for candidate in (entry, replace(entry, size=size)):
            if _same(step, x, candidate):
                return replace(candidate, memory=memory_order(prepared(entry.method), shape))
    for method in doors.methods:
        entry = _prepared_entry(step, x, method, prepared(method))
        if entry is not None:
            return entry
    raise UserError(
        f"{owner}: no state can be passed into its loop: its steps receive neither `latents` nor "
        "the output of prepare_latents"
    )


def _prepared_entry(
    step: Callable[[Tensor, Entry], Tensor], x: Tensor, method: str, seen: Sequence[Any]
) -> Entry | None:
    """The entry in an output of a method that prepares states, called once; None if there is no
    such one."""
    outputs = (seen[0] if isinstance(seen[0], tuple) else (seen[0],)) if len(seen) == 1 else ()
    for index, value in enumerate(outputs):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            entry = Entry(index, method=method)
            if value[0].numel() != x.numel() or not _same(step, x, entry):
                index = _places(step, value, entry)
                entry = replace(entry, index=index)
                if index is None or not _same(step, x, entry):
                    continue
            return entry
    return None


def entered(
    step: Callable[[Tensor, PartEntries], Tensor],
    prepared: Callable[[str], Sequence[Any]],
    layout: Layout,
    kind: type,
    size: float,
) -> PartEntries:
    """Find an entry for each part of a state, and name the parts by them.

    `step` returns what the first step receives [1 d] of the parts that entries pass in. UserError
    for a part without one.
    """
    entries: list[Entry] = []
    for at, shape in enumerate(layout.shapes):

        def one(x: Tensor, entry: Entry, at: int = at) -> Tensor:
            whole = [torch.zeros(1, *part) for part in layout.shapes]
            whole[at] = x  # of the shape that is prepared, while places in it are looked for
            trial_layout = replace(layout, shapes=tuple(tuple(state.shape[1:]) for state in whole))
            return layout.unpack(
                step(Layout.pack(whole), PartEntries(trial_layout, (*entries, entry)))
            )[at]

        doors = Doors.of(kind, parts=True).without(entries)
        entries.append(injected(one, prepared, shape, doors, size=size, owner=kind.__name__))
    names = tuple(_part_name(kind, entry) for entry in entries)
    return PartEntries(replace(layout, names=names), tuple(entries))


def _part_name(kind: type, entry: Entry) -> str:
    name = entry.argument if entry.output is None else entry.method
    match = ARGUMENT.fullmatch(name.removeprefix("prepare_"))
    assert match is not None, "`Doors` has such names alone"
    moving = "num_frames" in inspect.signature(kind.__call__).parameters
    return match["part"] or ("video" if moving else "image")


def _same(step: Callable[[Tensor, Entry], Tensor], x: Tensor, entry: Entry) -> bool:
    try:
        seen = step(x, entry)
    except FAILURES as error:
        raise_memory(error)
        return False
    return seen.shape == x.shape and torch.equal(seen.cpu(), x.to(seen.dtype))


def _places(
    step: Callable[[Tensor, Entry], Tensor], prepared: Tensor, entry: Entry
) -> Tensor | None:
    """Return the position in a prepared row of each number that the step receives, digit by
    digit."""
    numbers = torch.arange(prepared[0].numel())
    positions, power = torch.zeros(0), 1
    while power == 1 or power < len(numbers):
        digits = (numbers // power % BASE).to(prepared.dtype).reshape(1, *prepared.shape[1:])
        seen = step(digits, entry).cpu().double().flatten()
        if not bool((seen == seen.round()).all()) or seen.min() < 0 or seen.max() >= BASE:
            return None
        positions = seen * power + (positions if power > 1 else 0)
        power *= BASE
    index = positions.long()
    fits = bool((index < len(numbers)).all()) and len(index.unique()) == len(index)
    return index if fits else None
