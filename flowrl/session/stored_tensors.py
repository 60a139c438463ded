"""Tensors in a run's folder, which anybody may have written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rewards.perception.weight_files import stored_in, weights_of_file


def stored_weights(file: Path) -> Mapping[str, Tensor]:
    """The tensors of a safetensors file. ValueError, which names the file, if it is damaged."""
    return weights_of_file("the checkpoint", file)


def stored_torch(file: Path) -> Any:
    """What `torch.save` wrote, in memory of its own. ValueError likewise."""
    return _own(stored_in("the checkpoint", file))


def _own(stored: Any) -> Any:
    """A copy whose tensors are not parts of the file."""
    if isinstance(stored, Tensor):
        return stored.clone()
    if isinstance(stored, Mapping):
        return {name: _own(value) for name, value in stored.items()}
    if isinstance(stored, list | tuple):
        return type(stored)(_own(value) for value in stored)
    return stored
