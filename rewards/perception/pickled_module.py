"""The tensors of a pickled torch module, read without running any code of the file.

`torch.save(model)` stores a program: loading it as its authors do runs any code in the file. Here
only the functions that rebuild tensors are real. Every other name in the file becomes an inert
object that keeps its arguments, and the tree of modules is searched for tensors.
"""

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from rewards.perception.reachable import DOWNLOAD_AGAIN, reachable
from rewards.perception.weight_files import check_file


def _parameter(data: Any, *_: Any) -> Any:
    """The tensor of a parameter, without its hooks and attributes."""
    return data


def _of_type(rebuild: Callable[..., Any], _kind: Any, arguments: Sequence[Any], *_: Any) -> Any:
    """A plain tensor in place of one of a subclass or with attributes."""
    return rebuild(*arguments)


REAL = {  # module and name: what rebuilds tensors and plain containers
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
    ("torch", "Size"): torch.Size,
}


class _Inert:
    """Stands for a class or function of the file: it only keeps its state, even if called."""

    state: Mapping[str, Any] = MappingProxyType({})

    def __new__(cls, *_: Any, **__: Any) -> "_Inert":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {}

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) in REAL:
            return REAL[module_name, global_name]
        return type(global_name, (_Inert,), {})


_AS_MODULE = ModuleType("flowrl_reader")  # torch.load takes a module with an Unpickler
vars(_AS_MODULE)["Unpickler"] = _Reader


def tensors_of(reward: str, file: Path) -> dict[str, Tensor]:
    """Parameters and buffers of the pickled module, under their `state_dict` names.

    ValueError, one sentence, if the file is damaged or holds no module.
    """
    with reachable(reward, file):
        return _tensors_of(reward, file)


def _tensors_of(reward: str, file: Path) -> dict[str, Tensor]:
    try:
        check_file(file)
    except ValueError as error:
        raise ValueError(f"{reward}: {error}") from error
    try:
        with zipfile.ZipFile(file) as parts:
            if any(name.endswith("constants.pkl") for name in parts.namelist()):
                raise ValueError(f"{reward}: {file} is a TorchScript program, not a pickled module")
        whole = torch.load(file, map_location="cpu", pickle_module=_AS_MODULE, weights_only=False)
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{reward}: {file} is not a complete file of torch.save (torch 1.6 or newer): "
            + DOWNLOAD_AGAIN
        ) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{reward}: {file} cannot be read: {reason}") from error
    tensors = dict(_walk(whole, ""))
    if not tensors:
        raise ValueError(f"{reward}: {file} does not hold a torch module")
    return tensors


def _walk(thing: Any, start: str) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(thing, _Inert):
        return
    for group in ("_parameters", "_buffers"):
        for name, value in (thing.state.get(group) or {}).items():
            if isinstance(value, Tensor):
                yield start + name, value.detach()
    for name, module in (thing.state.get("_modules") or {}).items():
        yield from _walk(module, f"{start}{name}.")
