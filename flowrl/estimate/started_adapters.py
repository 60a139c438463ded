"""Adapters that training starts from (`model.lora.from`): their weights, ranks and layers, from the
headers of their files; those of `torch.save` are mapped, and only their shapes are read."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers.pytorch_utils import Conv1D

from flowrl.paths import find
from flowrl.settings.model.adapters import Lora
from rewards.perception.hub import named_repository
from rewards.perception.weight_files import TORCH_SUFFIXES, tensor_shapes, weights_of_file

_ADAPTER, _KOHYA, _PLACE = ".lora_", "lora_unet_", "model.lora.from"


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
        """None without such adapters, and for those whose file is not on this machine or does not
        tell their shapes; `uncounted` says so."""
        shapes = {
            name: shape
            for file in _files(lora)
            for name, shape in _shapes(file).items()
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
    files = sorted(path.glob("*.safetensors"))
    return files or sorted(file for file in path.glob("*") if file.suffix in TORCH_SUFFIXES)


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    if file.suffix not in TORCH_SUFFIXES:
        return tensor_shapes(file)
    try:
        stored = weights_of_file(_PLACE, file)
    except ValueError:  # a damaged file, which the checks of the model refuse
        return {}
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}


def layers_of(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Full names of the linear layers that adapters have, which a file names with the component's
    name before, or as kohya's tools do (lora_unet_, with underscores for dots); empty for a file
    with names of another form."""
    kinds = (nn.Linear, Conv1D)  # of GPT-2
    linears = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    listed = list(names)
    ends = {name.split(".", cut)[-1] for name in listed for cut in range(3)}
    flat = {name.removeprefix(_KOHYA) for name in listed if name.startswith(_KOHYA)}
    return [name for name in linears if name in ends or name.replace(".", "_") in flat]


def uncounted(lora: Lora | None, models: Iterable[nn.Module]) -> str | None:
    """A sentence on given adapters whose layers an estimate does not know, and why; it counts new
    adapters in their place. None if it knows them, or not the models."""
    if lora is None or lora.start is None:
        return None
    source, instead = lora.start, "memory and time are counted as of new adapters"
    if not (files := _files(lora)):
        return f"{_PLACE}: {source} is not on this machine; {instead}"
    started = StartedAdapters.of(lora)
    if started is None:
        return (
            f"{_PLACE}: {files[0].name} of {source} names no adapters as diffusers, peft and kohya "
            f"do, so the pipeline's own reader says at the start what it is; {instead}"
        )
    listed = list(models)
    if listed and not any(layers_of(model, started.layers) for model in listed):
        return (
            f"{_PLACE}: {source} names layers as another tool does ({started.layers[0]}), which "
            f"the pipeline's own reader translates at the start; {instead} on the default layers, "
            f"of rank {started.rank}"
        )
    return None
