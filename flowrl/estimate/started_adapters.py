"""Adapters that training starts from (`model.lora.from`): their weights, ranks and layers, from the
headers of their files."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from flowrl.paths import find
from flowrl.settings.model.adapters import Lora
from rewards.perception.hub import named_repository
from rewards.perception.weight_files import tensor_shapes

_ADAPTER = ".lora_"


@dataclass(frozen=True)
class StartedAdapters:
    """The adapters of a file.

    weights  number of all adapters' weights
    rank     the highest
    layers   names of the adapted layers, as the file has them: with the component's before
    dora     whether the lengths of the weights' rows are among the weights
    """

    weights: int
    rank: int
    layers: tuple[str, ...]
    dora: bool

    @classmethod
    def of(cls, lora: Lora) -> "StartedAdapters | None":
        """None without such adapters, and for those whose file is not on this machine or has no
        header that tells their shapes."""
        shapes = {
            name: shape
            for file in _files(lora)
            for name, shape in tensor_shapes(file).items()
            if _ADAPTER in name
        }
        ranks = [min(shape[:2]) for shape in shapes.values() if len(shape) > 1]
        if not ranks:
            return None
        return cls(
            weights=sum(map(math.prod, shapes.values())),
            rank=max(ranks),
            layers=tuple(dict.fromkeys(name.partition(_ADAPTER)[0] for name in shapes)),
            dora=any("magnitude" in name for name in shapes),
        )


def _files(lora: Lora) -> list[Path]:
    if lora.start is None:
        return []
    path = find(lora.start)
    if path.is_file():
        return [path]
    if not path.exists() and (repository := named_repository(lora.start)) is not None:
        folder = repository.snapshot()
        path = folder if isinstance(folder, Path) else path
    return sorted(path.glob("*.safetensors"))


def layers_of(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Full names of the linear layers that adapters have, which a file names with the component's
    name before; empty for a file with names of another form."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    ends = {name.split(".", cut)[-1] for name in names for cut in range(3)}
    return [name for name in linears if name in ends]
