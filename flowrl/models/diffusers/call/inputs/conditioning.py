"""Split the outputs of a pipeline's `encode_prompt` into rows, for any model family.

No name such as `prompt_embeds` is hard-coded. A few probes at load show which outputs have a row
per prompt, which depend on the length of the prompts, and which are token masks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.errors import UserError
from samplers.host import on_host, sent

SHORT_PROMPT = "a"
LONG_PROMPT = "a photo of a small red cube on a wide green table"

# outputs of all encode_prompt calls of one pipeline call, in order
Calls = tuple[Any, ...]


@dataclass(frozen=True)
class Slot:
    """Split of one output into rows. Without `axis` and `listed`, all rows share the output."""

    axis: int | None = None  # of the rows, in a tensor
    blocks: int = 1  # all rows, then all of them again: prompts behind negative ones, in one tensor
    listed: bool = False  # a list with one entry per row
    length: int | None = None  # axis of the tokens, where it follows the prompts
    mask: torch.dtype | None = None  # of a mask [n tokens] that is 0 on padding
    absent: bool = False  # None in all probes: unknown, so that it must stay None


@dataclass(frozen=True)
class EncodingLayout:
    """Split of the outputs of all `encode_prompt` calls in a pipeline call into rows."""

    counts: tuple[int | None, ...]  # outputs of each call; None: a bare value, not a tuple
    slots: tuple[Slot, ...]

    @property
    def masked(self) -> bool:
        return any(slot.mask is not None for slot in self.slots)


# one output: a list of the outputs of each prompt's own call
SINGLE = EncodingLayout((), (Slot(listed=True),))


@dataclass(frozen=True)
class Conditioning:
    """Encoded rows of a batch of prompts. Row i belongs to prompt i.

    `extras` are per-row arguments of the pipeline's call: a negative prompt, a conditioning image.
    All rows have the same names, or there are no extras. `plain` holds the same prompts encoded
    without guidance, for pipelines whose outputs then have another layout. `guided_only` has the
    numbers of the outputs that the pipeline leaves out (None) without guidance: some loops ask for
    them, and not for the scale, whether they guide (AnyFlow).
    """

    layout: EncodingLayout
    values: tuple[Any, ...]  # one per slot
    prompts: tuple[str, ...]
    extras: tuple[Mapping[str, Any], ...] = ()
    plain: "Conditioning | None" = None
    guided_only: tuple[int, ...] = ()
    taken: "list[_Taken]" = field(default_factory=list, init=False, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, rows: Tensor | Sequence[int]) -> "Conditioning":
        """Select rows in the given order; rows may repeat. Rows that are already on a device with
        host-known indices are not copied there again. A device keeps the rows that it selected
        last, since a sample's steps ask for the same."""
        row_index = torch.as_tensor(rows, dtype=torch.long)
        index = on_host(row_index)
        positions = index.tolist()
        if positions and not 0 <= min(positions) <= max(positions) < len(self.prompts):
            raise IndexError(f"rows {positions} are not all among the {len(self.prompts)} rows")
        if (last := next(iter(self.taken), None)) is not None and last.serves(positions):
            return last.made
        index_by_device = {index.device: index, row_index.device: row_index}
        pairs = zip(self.layout.slots, self.values, strict=True)
        values = tuple(_take(slot, value, index, index_by_device) for slot, value in pairs)
        extras = tuple(self.extras[i] for i in positions) if self.extras else ()
        prompts = tuple(self.prompts[i] for i in positions)
        plain = None if self.plain is None else self.plain.take(row_index)
        conditioning = Conditioning(self.layout, values, prompts, extras, plain, self.guided_only)
        if any(isinstance(value, Tensor) and value.device.type != "cpu" for value in values):
            self.taken[:] = [_Taken(positions, conditioning, _written(values))]
        return conditioning

    @staticmethod
    def cat(parts: Sequence["Conditioning"]) -> "Conditioning":
        """Concatenate rows. Shorter token axes are padded with zeros, which the mask excludes.

        Raises UserError if lengths differ and the pipeline returns no mask.
        """
        layout = parts[0].layout
        assert all(part.layout == layout for part in parts)
        if len(parts) == 1:
            return parts[0]
        tokens = [_tokens(part) for part in parts]
        columns = zip(*(part.values for part in parts), strict=True)
        pairs = zip(layout.slots, columns, strict=True)
        values = tuple(_join(slot, column, tokens, parts) for slot, column in pairs)
        extras = tuple(extra for part in parts for extra in part.extras)
        prompts = tuple(prompt for part in parts for prompt in part.prompts)
        plains = [part.plain for part in parts if part.plain is not None]
        plain = Conditioning.cat(plains) if plains else None
        return Conditioning(layout, values, prompts, extras, plain, parts[0].guided_only)

    def calls(self, *, guided: bool = True) -> Calls:
        """Outputs in the form in which `encode_prompt` returned them."""
        if self.plain is not None and not guided:
            return self.plain.calls()
        counts, outputs = self.layout.counts, self.values
        if self.layout is SINGLE:
            (alone,) = self.values[0]
            counts, outputs = flatten(alone)
        missing = () if guided else self.guided_only
        values = iter([None if i in missing else value for i, value in enumerate(outputs)])
        return tuple([next(values) if n is None else tuple(islice(values, n)) for n in counts])


def flatten(calls: Calls) -> tuple[tuple[int | None, ...], tuple[Any, ...]]:
    """Number of outputs per call, and all outputs in one tuple."""
    counts, values = list[int | None](), list[Any]()
    for call in calls:
        counts.append(len(call) if isinstance(call, tuple) else None)
        values += call if isinstance(call, tuple) else (call,)
    return tuple(counts), tuple(values)


def same_form(a: Calls, b: Calls) -> bool:
    """Whether two sets of outputs have the same form; a missing output matches anything."""
    (counts, values), (other_counts, against) = flatten(a), flatten(b)
    pairs = [(_form(v), _form(w)) for v, w in zip(values, against, strict=False)]
    return counts == other_counts and all(
        v == w for v, w in pairs if v is not None and w is not None
    )


def left_out(guided: Calls, unguided: Calls) -> tuple[int, ...]:
    """The numbers of the outputs that are None without guidance alone, of two sets of one form."""
    pairs = zip(flatten(guided)[1], flatten(unguided)[1], strict=True)
    return tuple(i for i, (v, w) in enumerate(pairs) if v is not None and w is None)


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return len(value) if isinstance(value, list) else None


def check_constants(layout: EncodingLayout, values: Sequence[Any], owner: str) -> None:
    """Raise UserError for a tensor where no probe returned a tensor, since its rows are unknown."""
    for i, (slot, value) in enumerate(zip(layout.slots, values, strict=True)):
        if slot.absent and value is not None:
            raise UserError(
                f"{owner}: output {i} of encode_prompt is {type(value).__name__} for these "
                "prompts but was None for all probes: its rows are unknown"
            )


def learn(encode: Callable[[Sequence[str]], Calls], owner: str) -> EncodingLayout:
    """Probe `encode` with 1, 2 and 3 equal prompts, with a short prompt, and with prompts of two
    lengths.

    Raises UserError for an output that is neither constant nor one row per prompt.
    """
    counts, _ = flatten(encode([LONG_PROMPT]))
    probes = [
        [LONG_PROMPT],
        [LONG_PROMPT] * 2,
        [LONG_PROMPT] * 3,
        [SHORT_PROMPT],
        [SHORT_PROMPT, LONG_PROMPT],
    ]
    outputs = []
    for prompts in probes:
        more, values = flatten(encode(prompts))
        if more != counts:
            raise UserError(
                f"{owner}: encode_prompt returns {more} outputs for {prompts}, not {counts}"
            )
        outputs.append(values)
    columns = zip(*outputs, strict=True)
    slots = tuple(_slot(column, f"{owner}: output {i}") for i, column in enumerate(columns))
    return EncodingLayout(counts, slots)


def _slot(column: Sequence[Any], name: str) -> Slot:
    """Return the split of one output, from the five probes of `learn`."""
    one, mixed = column[0], column[-1]
    equal = column[:3]
    if isinstance(mixed, Tensor) and all(v is None for v in equal):
        # a mask that is left out where nothing is padded (Qwen-Image)
        if mixed.ndim != 2 or len(mixed) != 2:
            raise UserError(
                f"{name} of encode_prompt is None for equal prompts, but {mixed.shape} for others"
            )
        return Slot(axis=0, length=1, mask=mixed.dtype)
    if all(isinstance(v, Tensor) for v in column):
        return _tensor_slot(column, name)
    if all(isinstance(v, list | tuple) for v in column) and [len(v) for v in equal] == [1, 2, 3]:
        return Slot(listed=True)
    if all(type(v) is type(one) and not isinstance(v, Tensor) and v == one for v in column):
        return Slot(absent=one is None)
    raise UserError(f"{name} of encode_prompt has no row per prompt: {type(one).__name__}")


def _tensor_slot(column: Sequence[Tensor], name: str) -> Slot:
    one, two, three, short, mixed = column
    sizes = list(zip(one.shape, two.shape, three.shape, strict=True))
    rows = [axis for axis, (a, b, c) in enumerate(sizes) if a and (b, c) == (2 * a, 3 * a)]
    moving = [axis for axis, size in enumerate(sizes) if len(set(size)) > 1]
    if rows != moving or len(rows) > 1:
        raise UserError(f"{name} of encode_prompt does not have one row per prompt: sizes {sizes}")
    axis = rows[0] if rows else None
    blocks = one.shape[axis] if axis is not None else 1
    grows = [a for a in range(one.ndim) if one.shape[a] != short.shape[a]]
    if len(grows) > 1:
        raise UserError(f"{name} of encode_prompt varies along axes {grows} with the prompt")
    if axis is None:
        if grows or not torch.equal(one, three):
            raise UserError(f"{name} of encode_prompt depends on the prompts but has no rows")
        return Slot()
    length = grows[0] if grows else None
    # the pipeline's own padding of the short prompt is what ours must be
    is_mask = length is not None and mixed.ndim == 2 and bool((mixed == 0).any())
    if (
        is_mask
        and (mixed[0] != 0).sum() == short.shape[1]
        and (mixed[0, : short.shape[1]] != 0).all()
    ):
        return Slot(axis, length=length, mask=mixed.dtype)
    if blocks > 1:
        second = [mixed.select(axis, 2 * block + 1) for block in range(blocks)]
        alone = torch.stack(second, axis)
        if length is not None or not torch.allclose(alone, one, rtol=1e-2, atol=1e-3):
            raise UserError(
                f"{name} of encode_prompt has {blocks} rows per prompt, in an unknown order"
            )
    return Slot(axis, blocks=blocks, length=length)


class _Taken(NamedTuple):
    """Rows that were selected last, and how often their tensors had been written to then."""

    positions: list[int]
    made: Conditioning
    versions: list[int]

    def serves(self, positions: list[int]) -> bool:
        return self.positions == positions and self.versions == _written(self.made.values)


def _written(values: Sequence[Any]) -> list[int]:
    return [value._version for value in values if isinstance(value, Tensor)]


def _take(
    slot: Slot, value: Any, index: Tensor, index_by_device: dict[torch.device, Tensor]
) -> Any:
    """`index_by_device`: the index on each device where it was needed before."""
    if slot.listed:
        return [value[i] for i in index.tolist()]
    if slot.axis is None or value is None:
        return value
    if value.device not in index_by_device:
        index_by_device[value.device] = sent(index, value.device)
    index = index_by_device[value.device]
    if slot.blocks == 1:
        return value.index_select(slot.axis, index)
    rows = value.shape[slot.axis] // slot.blocks
    rows_of_blocks = [index + rows * block for block in range(slot.blocks)]
    return value.index_select(slot.axis, torch.cat(rows_of_blocks))


def _tokens(part: Conditioning) -> int | None:
    """Length of the longest token axis that depends on the prompts."""
    pairs = zip(part.layout.slots, part.values, strict=True)
    sizes = [v.shape[s.length] for s, v in pairs if s.length is not None and v is not None]
    return max(sizes) if sizes else None


def _join(slot: Slot, column: Sequence[Any], tokens: Sequence[int | None], parts: Sequence) -> Any:
    if slot.listed:
        return [entry for value in column for entry in value]
    if slot.axis is None:
        return column[0]
    if slot.mask is not None and any(v is None for v in column):
        if len(set(tokens)) == 1 and all(v is None for v in column):
            return None
        pairs = zip(column, tokens, parts, strict=True)
        column = [_full(slot.mask, len(p), t or 0) if v is None else v for v, t, p in pairs]
        device = next((v.device for v in column if v.device.type != "cpu"), column[0].device)
        column = [v.to(device) for v in column]
    if slot.blocks > 1:
        blocks = zip(*(value.chunk(slot.blocks, slot.axis) for value in column), strict=True)
        return torch.cat([part for block in blocks for part in block], slot.axis)
    if slot.length is None:
        return torch.cat(list(column), slot.axis)
    sizes = [v.shape[slot.length] for v in column]
    if len(set(sizes)) > 1 and not parts[0].layout.masked:
        raise UserError(
            f"prompts were encoded to {sorted(set(sizes))} tokens, and the pipeline returns no "
            "mask: encode them in one call (raise train.rows_per_call, and leave model.encodings "
            "out), or give prompts of one length in tokens"
        )
    return torch.cat([_pad(v, slot.length, max(sizes)) for v in column], slot.axis)


def _full(dtype: torch.dtype, rows: int, tokens: int) -> Tensor:
    return torch.ones(rows, tokens, dtype=dtype)


def _pad(value: Tensor, axis: int, size: int) -> Tensor:
    shape = list(value.shape)
    shape[axis] = size - shape[axis]
    return value if shape[axis] == 0 else torch.cat([value, value.new_zeros(shape)], axis)
