"""Move samples between devices, with all that they are made of."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def brought_to(value: T, device: torch.device) -> T:
    """The same value with its tensors on a device. Tensors that are shared stay shared."""
    known: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = tensor.detach().to(device)
        return known[id(tensor)]

    return mapped(value, move)


def all_tensors(value: Any) -> list[Tensor]:
    """All tensors of a value, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, keep)
    return found


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same value with its tensors changed, in dataclasses, tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in fields(value) if each.init]
        new = {name: mapped(getattr(value, name), change) for name in names}
        if all(new[name] is getattr(value, name) for name in names):
            return value
        return replace(value, **new)
    if isinstance(value, tuple):
        parts = [mapped(each, change) for each in value]
        if all(part is each for part, each in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if type(value) is not tuple else tuple(parts)
    if isinstance(value, list):
        return [mapped(each, change) for each in value]
    if isinstance(value, Mapping):
        return {name: mapped(each, change) for name, each in value.items()}
    return value
