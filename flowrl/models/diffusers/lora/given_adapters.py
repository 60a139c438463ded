"""Existing adapters: merged into the base weights (`model.adapters`), or used as the start of
training (`model.lora.from`). diffusers reads their files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME
from safetensors.torch import save_file
from torch import nn

from flowrl.errors import UserError
from flowrl.json_text import json_text
from flowrl.models.adapters import ADAPTER, ADAPTER_WEIGHTS, in_order
from flowrl.models.diffusers.call.drive.driver import DENOISERS
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES
from flowrl.models.diffusers.lora import own_form
from flowrl.models.diffusers.lora.lora import (
    LORA_FILE,
    TWO_FILES,
    lora_files,
    prepare_adapters,
    writes_adapters,
)
from flowrl.models.diffusers.lora.lora_formats import METADATA
from flowrl.models.out_of_memory import out_of_memory
from flowrl.models.saved_weights import load_saved, tensors_and_settings
from flowrl.paths import find
from flowrl.settings.checks.machine import present_source
from flowrl.settings.model.adapters import FrozenAdapter
from rewards.perception.hub import of_network
from rewards.perception.weight_files import other_half, safetensors_header

FROZEN = "frozen"


def merge_adapters(pipe: Any, adapters: Sequence[FrozenAdapter]) -> None:
    """Add adapters to the pipeline's weights, as its `fuse_lora` does, in the given order.

    UserError, naming the setting, for a file that is missing or that the pipeline does not load
    completely.
    """
    for i, adapter in enumerate(adapters):
        place = f"model.adapters, {i + 1}"
        load_saved(find(adapter.path), place, partial(_merge_present, pipe, adapter, place))


def _merge_present(pipe: Any, adapter: FrozenAdapter, place: str) -> None:
    _merge(pipe, adapter.model_copy(update={"path": present_source(adapter.path)}), place)


def _merge(pipe: Any, adapter: FrozenAdapter, place: str) -> None:
    second = adapter.component == "transformer_2"
    if second and not isinstance(pipe, TWO_FILES):
        raise UserError(f"{place}: {type(pipe).__name__} has no transformer_2")
    denoisers = denoisers_of(pipe)
    if not writes_adapters(pipe, denoisers):
        with in_diffusers_format(pipe, adapter.path, place) as read:
            _load_own(denoisers, read, FROZEN, place, adapter.path)
        _refuse_unchanged(denoisers.values(), place, adapter.path)
        for denoiser in denoisers.values():
            own_form.merge(denoiser, adapter.scale, FROZEN)
        return
    with in_diffusers_format(pipe, adapter.path, place) as read:
        load_whole(pipe, read, FROZEN, place, adapter.path, second=second)
    filled = [name for name, module in _loadable(pipe).items() if _layers(module)]
    _refuse_unchanged([getattr(pipe, name) for name in filled], place, adapter.path)
    pipe.fuse_lora(components=filled, lora_scale=adapter.scale, adapter_names=[FROZEN])
    pipe.unload_lora_weights()


def _refuse_unchanged(modules: Iterable[nn.Module], place: str, source: str) -> None:
    """UserError, beginning with `place`, if the adapters of these modules add nothing."""
    if not any(_changes(layer) for module in modules for layer in _layers(module)):
        raise UserError(
            f"{place}: {source} changes nothing, since a matrix of each of its products is 0 (an "
            "adapter that was never trained); leave it out, or name another file"
        )


def _changes(layer: BaseTunerLayer) -> bool:
    """Whether a layer's adapter adds anything: all of its matrices have values."""
    assert isinstance(layer, nn.Module)  # as all of peft's are
    matrices = [p for name, p in layer.named_parameters() if f".{FROZEN}." in f"{name}."]
    return all(bool(p.detach().count_nonzero()) for p in matrices)


def begin_from(pipe: Any, denoisers: Mapping[str, nn.Module], source: str) -> None:
    """Add a file's adapters to the denoisers as the trained adapters, with the file's ranks.

    UserError for adapters that a run could not train or save.
    """
    place, folder = "model.lora.from", find(source)
    for denoiser in denoisers.values():
        denoiser.requires_grad_(False)
    in_own_form = not writes_adapters(pipe, denoisers)
    if in_own_form:
        with in_diffusers_format(pipe, source, place) as read:
            _load_own(denoisers, read, ADAPTER, place, source)
    elif folder.is_dir() and (folder / LORA_FILE).is_file():
        for _, name, slot in lora_files(pipe, denoisers):
            file = str(folder / name)
            load_whole(pipe, file, ADAPTER, place, file, second=slot is not None)
    else:
        with in_diffusers_format(pipe, source, place) as read:
            load_whole(pipe, read, ADAPTER, place, source)
    for name, module in {} if in_own_form else _loadable(pipe).items():
        if name not in denoisers and _layers(module):
            raise UserError(
                f"{place}: {source} also has adapters of {name}, which a run does not train: put "
                "it into model.adapters, and train new adapters"
            )
    for name, denoiser in denoisers.items():
        if not _layers(denoiser):
            raise UserError(f"{place}: {source} has no adapter of {name}, which this run trains")
        denoiser.eval()
        prepare_adapters(denoiser)


@contextmanager
def in_diffusers_format(pipe: Any, source: str, place: str) -> Iterator[str]:
    """The source, or for a folder or file that peft's `save_pretrained` wrote, a file with the same
    adapter in diffusers' format, with its alpha and patterns. UserError for what is more than
    low-rank updates and DoRA's magnitudes.
    """
    path = find(source)
    folder = path if path.is_dir() else path.parent
    of_peft = not path.is_file() or path.name == ADAPTER_WEIGHTS
    if not of_peft or not all((folder / n).is_file() for n in (ADAPTER_WEIGHTS, CONFIG_NAME)):
        yield source
        return
    config = _peft_config(folder, source, place)
    if config.bias != "none" or config.modules_to_save:
        raise UserError(
            f"{place}: {source} is not a LoRA alone (bias, modules_to_save): merge it into "
            "the model's weights, and name that model"
        )
    prefix = "unet" if "unet" in pipe.components else "transformer"
    settings = {f"{prefix}.{name}": value for name, value in in_order(config).to_dict().items()}
    saved, _ = tensors_and_settings(folder / ADAPTER_WEIGHTS, METADATA, place)
    tensors = {
        f"{prefix}.{name.removeprefix('base_model.model.')}": weight
        for name, weight in saved.items()
    }
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / LORA_FILE
        save_file(tensors, file, metadata={"format": "pt", METADATA: json_text(settings)})
        yield str(file)


def _peft_config(folder: Path, source: str, place: str) -> LoraConfig:
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, OSError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{place}: {source} has no peft adapter: {reason}") from error
    if not isinstance(config, LoraConfig):
        raise UserError(f"{place}: {source} is an adapter of kind {config.peft_type}, not a LoRA")
    return config


def load_whole(
    pipe: Any, file: str, adapter: str, place: str, source: str, *, second: bool = False
) -> None:
    """Load one adapter file, which errors call `source`. UserError unless every tensor in it is
    finite and has a matching layer."""
    kind, path = type(pipe).__name__, find(file)
    if "load_lora_weights" not in dir(pipe):
        raise UserError(f"{place}: {kind} takes no adapters")
    file_name: dict[str, Any] = {"weight_name": path.name} if path.is_file() else {}
    at = path.parent if path.is_file() else path if path.is_dir() else file
    more = {"load_into_transformer_2": True} if second else {}
    before = _count(pipe)
    try:
        wanted = pipe.lora_state_dict(at, **file_name)
        state = wanted[0] if isinstance(wanted, tuple) else wanted
        _check_tensors(state, source, place)
        pipe.load_lora_weights(at, adapter_name=adapter, **file_name, **more)
    except Exception as error:  # whatever the hub's client raises
        expected = isinstance(error, (*FAILURES, OSError)) or of_network(error)
        if isinstance(error, UserError) or out_of_memory(error) or not expected:
            raise
        reason = " ".join(str(error).split())[:200]
        hint = _of_other_tools(path)
        raise UserError(f"{place}: {kind} cannot load {source}: {reason}{hint}") from error
    named = sum(not key.endswith(("alpha", "alphas")) for key in state)
    if _count(pipe) - before != named or not named:
        raise UserError(
            f"{place}: of the {named} tensors of {source}, {_count(pipe) - before} belong to "
            f"layers of this {kind}: it was made for another model, or is not a plain LoRA"
            f"{_of_other_tools(path)}"
        )


def _check_tensors(state: Mapping[str, torch.Tensor], source: str, place: str) -> None:
    """UserError for a product with one of its matrices alone, and for NaN or infinity."""
    halves = [other for key in state if (other := other_half(key)) and other not in state]
    if halves:
        raise UserError(f"{place}: {source} lacks {halves[0]}: download it again")
    wrong = [key for key, tensor in state.items() if not tensor.float().isfinite().all()]
    if wrong:
        raise UserError(f"{place}: {source} has NaN or infinity in {wrong[0]}: download it again")


def _of_other_tools(file: Path) -> str:
    """A hint for a file with peft's keys, whose alpha is in another file, or with those of kohya
    or ComfyUI, which diffusers reads for some pipelines."""
    if not file.is_file() or file.suffix != ".safetensors":
        return ""
    keys = safetensors_header(file) or ()
    if any(key.startswith("base_model.model.") for key in keys):
        return f"; its keys are peft's: name the folder that has its {CONFIG_NAME} too"
    tools = any(key.startswith(("lora_unet_", "diffusion_model.")) for key in keys)
    return (
        "; its keys are kohya's or ComfyUI's, which diffusers does not read for this pipeline: "
        f"take the same adapter in diffusers' format ({LORA_FILE})" * tools
    )


def denoisers_of(pipe: Any) -> dict[str, nn.Module]:
    """The pipeline's denoisers, by component."""
    components = {name: pipe.components.get(name) for name in DENOISERS}
    return {name: module for name, module in components.items() if isinstance(module, nn.Module)}


def _load_own(
    denoisers: Mapping[str, nn.Module], file: str, adapter: str, place: str, source: str
) -> None:
    """Load one adapter file into the denoisers. UserErrors begin with `place`."""
    path = find(file)
    path = path / LORA_FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"{place}: {source} is neither an adapter's file nor a folder with {LORA_FILE}, which "
            "this pipeline's adapters are read from"
        )
    tensors, _ = tensors_and_settings(path, METADATA, place)
    _check_tensors(tensors, source, place)
    own_form.load(denoisers, path, adapter, source)


def _loadable(pipe: Any) -> dict[str, nn.Module]:
    """Components that can have adapters."""
    components = {name: pipe.components.get(name) for name in pipe._lora_loadable_modules}  # pyright: ignore[reportPrivateUsage]
    return {name: module for name, module in components.items() if isinstance(module, nn.Module)}


def _layers(module: nn.Module) -> list[BaseTunerLayer]:
    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


def _count(pipe: Any) -> int:
    """The number of adapter tensors in the pipeline."""
    parts = _loadable(pipe).values()
    return sum(".lora_" in name for module in parts for name, _ in module.named_parameters())
