"""Count what waits for a GPU, on a CPU. Tensors that stem from the model's weights stand for those
on the device, and say so: their device is `cpu:0`, which is not `cpu`."""

import traceback
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cpu:0")
READING = {
    "item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "equal", "allclose",
    "nonzero", "masked_select", "unique", "unique_consecutive",
}  # fmt: skip


def _there(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and vars(tensor).get("on_device", False)


def _marked(result: Any) -> Any:
    for each in tree_leaves(result):
        if isinstance(each, Tensor):
            each.on_device = True  # type: ignore[attr-defined]
    return result


class Transfers(TorchFunctionMode):
    """`read`: waits for a value, a size or a copy, by their places in the code. `sent`: copies to
    the device."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.read, self.sent = Counter[str](), Counter[str]()
        _marked(list(weights))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        there = any(map(_there, tree_leaves((args, kwargs))))
        if name == "__get__":  # an attribute: sizes and dtypes are known without waiting
            if there and func.__self__ is torch.Tensor.device:
                return DEVICE
            return (
                _marked(func(*args))
                if there and func.__self__ is torch.Tensor.grad
                else func(*args)
            )
        result = func(*args, **kwargs)
        places = [str(each) for each in (*args[1:], *kwargs.values()) if _names_device(each)]
        if name in ("to", "cpu") and isinstance(result, Tensor):
            enters = str(DEVICE) in places or any(map(_there, args[1:]))
            leaves = name == "cpu" or ("cpu" in places and not enters)
            if _there(args[0]) and leaves:
                self.read[f"{name} at {_place()}"] += 1
                return result.clone()
            if not _there(args[0]) and enters:
                self.sent[f"{name} at {_place()}"] += 1
                return _marked(result.clone())
        if there and (name in READING or _by_mask(name, args)):
            self.read[f"{name} at {_place()}"] += 1
        return _marked(result) if there or str(DEVICE) in places else result


def _names_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cpu"))


def _by_mask(name: str, args: Any) -> bool:
    if name not in ("__getitem__", "__setitem__") or not _there(args[0]):
        return False
    index = tree_leaves(args[1])
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in index)


def _place() -> str:
    frames = traceback.extract_stack()
    own = [f for f in frames if "/flowrl/" in f.filename or "/samplers/" in f.filename]
    last = own[-1] if own else frames[-3]
    return f"{last.filename.split('/')[-1]}, {last.name}"
