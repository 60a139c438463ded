"""Move samples and everything inside them between devices and processes."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from flowrl.models.policy import RolloutLike
from samplers import Edges, Rollout
from samplers.mixed import MixedRollout

T = TypeVar("T")


def brought_to(value: T, device: torch.device) -> T:
    """The same value with its tensors on a device. Shared tensors stay shared."""
    copies: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().to(device)
        return copies[id(tensor)]

    return mapped(value, move)


def all_tensors(value: Any) -> list[Tensor]:
    """All tensors of a value, in order."""
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    mapped(value, keep)
    return tensors


def bytes_of(value: Any) -> int:
    """Bytes of a value's tensors; a shared tensor is sent, and counted, once."""
    distinct = {id(tensor): tensor for tensor in all_tensors(value)}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same value with its tensors changed, in dataclasses, tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [column.name for column in fields(value) if column.init]
        new = {name: mapped(getattr(value, name), change) for name in names}
        if all(new[name] is getattr(value, name) for name in names):
            return value
        return replace(value, **new)
    if isinstance(value, tuple):
        parts = [mapped(item, change) for item in value]
        if all(part is item for part, item in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if type(value) is not tuple else tuple(parts)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if isinstance(value, Mapping):
        return {name: mapped(item, change) for name, item in value.items()}
    return value


def send_tensors_whole() -> None:
    """Make Ray send only a tensor's own numbers: a pickled view would include all of its base
    tensor."""
    from ray.util import register_serializer  # type: ignore[reportMissingImports]  # an extra

    register_serializer(Tensor, serializer=as_bytes, deserializer=of_bytes)


TensorBytes = tuple[np.ndarray, torch.dtype, tuple[int, ...]]


def as_bytes(tensor: Tensor) -> TensorBytes:
    """A tensor's own numbers as bytes, its dtype and its shape."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def of_bytes(parts: TensorBytes) -> Tensor:
    """The tensor of `as_bytes`, in its own memory."""
    numbers, dtype, shape = parts
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():  # a copy, since Ray's memory is read-only
        tensor.view(-1).view(torch.uint8).numpy()[:] = numbers
    return tensor


def distinct_states(rollout: RolloutLike) -> RolloutLike:
    """The rollout with each state once: parents shared by children of one state, and parents that
    are the results of the previous step, are left out. `all_states` restores them, to the bit."""
    if isinstance(rollout, MixedRollout):
        return replace(rollout, by_size=tuple(map(distinct_states, rollout.by_size)))
    if not isinstance(rollout, Rollout):
        return rollout
    edges, before = list[Edges](), None
    for edge in rollout.edges:
        last_states = None if before is None else before.x_next
        count, after = rollout.plan.states[edge.step : edge.step + 2]
        parents = edge.x[:: max(1, after // count)]
        if last_states is not None and torch.equal(_children(last_states, edge), edge.x):
            parents = edge.x[:0]
        elif not torch.equal(_children(parents, edge), edge.x):
            parents = edge.x
        edges.append(replace(edge, x=parents))
        before = edge
    return replace(rollout, edges=tuple(edges))


def all_states(rollout: RolloutLike) -> RolloutLike:
    """The original rollout from the result of `distinct_states`."""
    if isinstance(rollout, MixedRollout):
        return replace(rollout, by_size=tuple(map(all_states, rollout.by_size)))
    if not isinstance(rollout, Rollout):
        return rollout
    edges = list[Edges]()
    for edge in rollout.edges:
        parents = edge.x if len(edge.x) else edges[-1].x_next
        edges.append(replace(edge, x=_children(parents, edge)))
    return replace(rollout, edges=tuple(edges))


def _children(parents: Tensor, edge: Edges) -> Tensor:
    """Repeat each state for each of its children, whose number is the same for all."""
    count = len(edge.x_next) // max(1, len(parents))
    return parents if count == 1 else parents.repeat_interleave(count, 0)
