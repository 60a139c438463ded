"""Device tensors with a known copy on the host: the levels and indices of rows.

They begin as Python numbers. Reading one back from a GPU would wait for all work queued there, so a
CPU copy is remembered beside the tensor until the tensor is freed or written to.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_CPU = torch.device("cpu")
_known: Any = WeakTensorKeyDictionary()  # tensor of a device -> (its copy on the CPU, its version)


def uploaded(here: Tensor, device: str | torch.device) -> Tensor:
    """Copy a CPU tensor to a device. On CUDA the copy comes from pinned memory and does not
    block."""
    to = torch.device(device)
    if to.type == "cuda" and here.device == _CPU:
        return here.pin_memory().to(to, non_blocking=True)
    return here.to(to)


def sent(here: Tensor, device: str | torch.device) -> Tensor:
    """Copy a small CPU tensor to a device and remember it for `on_host`."""
    return remembered(uploaded(here, device), here)


def filled_rows(
    rows: int, value: int | float, dtype: torch.dtype, device: str | torch.device
) -> Tensor:
    """A tensor with the same number in every row, whose value `on_host` knows."""
    there = torch.full((rows,), value, dtype=dtype, device=device)
    if there.device == _CPU:
        return there
    return remembered(there, torch.full((rows,), value, dtype=dtype))


def remembered(there: Tensor, here: Tensor) -> Tensor:
    """Return `there` after remembering its CPU copy."""
    if there.device != _CPU:
        _known[there] = here, there._version
    return there


def on_host(values: Tensor) -> Tensor:
    """Numbers on the CPU. Waits for the GPU only if no copy is known, and only once."""
    values = values.detach() if values.requires_grad else values
    here = host_copy(values)
    if here is None:
        here = values.cpu()
        remembered(values, here)
    return here


def host_copy(values: Tensor) -> Tensor | None:
    """The remembered CPU copy, or a CPU tensor itself."""
    if values.device == _CPU:
        return values
    found: tuple[Tensor, int] | None = _known.get(values)
    return found[0] if found is not None and found[1] == values._version else None


def on_device(values: Tensor, device: str | torch.device) -> Tensor:
    """Numbers on another device. Blocks only if no copy of them is known."""
    return values if values.device == torch.device(device) else sent(on_host(values), device)


def wide(values: Tensor) -> Tensor:
    """Convert to float64, or to float32 on a device without it."""
    return values.float() if values.device.type == "mps" else values.double()


def derived(do: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """`do(*given)`, also computed on the CPU if copies of all arguments are known there."""
    there, here = do(*given), [host_copy(each) for each in given]
    if there.device == _CPU or any(each is None for each in here):
        return there
    return remembered(there, do(*here))


def sent_together(here: Sequence[Tensor], device: str | torch.device) -> list[Tensor]:
    """`sent` for several CPU tensors, with one copy for all of a dtype."""
    found = list(here)
    if torch.device(device) == _CPU:
        return found
    for dtype in dict.fromkeys(each.dtype for each in here):
        places = [i for i, each in enumerate(here) if each.dtype == dtype]
        flat: Any = uploaded(torch.cat([here[i].flatten() for i in places]), device)
        parts = flat.split([here[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            found[i] = remembered(part.view(here[i].shape), here[i])
    return found


def picked(values: Tensor, index: Tensor) -> Tensor:
    """Select rows of a tensor; also known on the host if the tensor and the index are. Returns a
    view if all rows are known to have the same value and, on a device, if the rows follow each
    other."""
    if values.device == _CPU:
        return values[index]
    here, at = host_copy(values), host_copy(index)
    if at is not None and len(at) > 0:
        first = int(at[0])
        if bool((at == torch.arange(first, first + len(at))).all()):
            rows = slice(first, first + len(at))
            part = values[rows]
            return part if here is None else remembered(part, here[rows])
        if here is not None and len(at) <= len(here) and bool((here == here[:1]).all()):
            return remembered(values[: len(at)], here[: len(at)])
    return derived(torch.Tensor.__getitem__, values, index)
