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


def uploaded(values: Tensor, device: str | torch.device) -> Tensor:
    """Copy a CPU tensor to a device. On CUDA the copy comes from pinned memory and does not
    block."""
    to = torch.device(device)
    if to.type == "cuda" and values.device == _CPU:
        return values.pin_memory().to(to, non_blocking=True)
    return values.to(to)


def sent(values: Tensor, device: str | torch.device) -> Tensor:
    """Copy a small CPU tensor to a device and remember it for `on_host`."""
    return remembered(uploaded(values, device), values)


def filled_rows(
    rows: int, value: int | float, dtype: torch.dtype, device: str | torch.device
) -> Tensor:
    """A tensor with the same number in every row, whose value `on_host` knows."""
    filled = torch.full((rows,), value, dtype=dtype, device=device)
    if filled.device == _CPU:
        return filled
    return remembered(filled, torch.full((rows,), value, dtype=dtype))


def remembered(values: Tensor, copy: Tensor) -> Tensor:
    """Return `values` after remembering their CPU copy."""
    if values.device != _CPU:
        _known[values] = copy, values._version
    return values


def on_host(values: Tensor) -> Tensor:
    """Numbers on the CPU. Waits for the GPU only if no copy is known, and only once."""
    values = values.detach() if values.requires_grad else values
    copy = host_copy(values)
    if copy is None:
        copy = values.cpu()
        remembered(values, copy)
    return copy


def host_copy(values: Tensor) -> Tensor | None:
    """The remembered CPU copy, or a CPU tensor itself."""
    if values.device == _CPU:
        return values
    entry: tuple[Tensor, int] | None = _known.get(values)
    return entry[0] if entry is not None and entry[1] == values._version else None


def on_device(values: Tensor, device: str | torch.device) -> Tensor:
    """Numbers on another device. Blocks only if no copy of them is known."""
    return values if values.device == torch.device(device) else sent(on_host(values), device)


def wide(values: Tensor) -> Tensor:
    """Convert to float64, or to float32 on a device without it."""
    return values.float() if values.device.type == "mps" else values.double()


def derived(do: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`do(*inputs)`, also computed on the CPU if copies of all arguments are known there."""
    result, copies = do(*inputs), [host_copy(tensor) for tensor in inputs]
    if result.device == _CPU or any(tensor is None for tensor in copies):
        return result
    return remembered(result, do(*copies))


def sent_together(tensors: Sequence[Tensor], device: str | torch.device) -> list[Tensor]:
    """`sent` for several CPU tensors, with one copy for all of a dtype."""
    results = list(tensors)
    if torch.device(device) == _CPU:
        return results
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        indices = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat: Any = uploaded(torch.cat([tensors[i].flatten() for i in indices]), device)
        parts = flat.split([tensors[i].numel() for i in indices])
        for i, part in zip(indices, parts, strict=True):
            results[i] = remembered(part.view(tensors[i].shape), tensors[i])
    return results


def picked(values: Tensor, index: Tensor) -> Tensor:
    """Select rows of a tensor; also known on the host if the tensor and the index are. Returns a
    view if all rows are known to have the same value and, on a device, if the rows follow each
    other."""
    if values.device == _CPU:
        return values[index]
    copy, at = host_copy(values), host_copy(index)
    if at is not None and len(at) > 0:
        first = int(at[0])
        if bool((at == torch.arange(first, first + len(at))).all()):
            rows = slice(first, first + len(at))
            part = values[rows]
            return part if copy is None else remembered(part, copy[rows])
        if copy is not None and len(at) <= len(copy) and bool((copy == copy[:1]).all()):
            return remembered(values[: len(at)], copy[: len(at)])
    return derived(torch.Tensor.__getitem__, values, index)
