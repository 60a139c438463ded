"""Low-rank adapters (peft, arXiv:2106.09685) of a pipeline's denoisers, and their files."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_pipeline import SkyReelsV2LoraLoaderMixin, WanLoraLoaderMixin
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from flowrl.errors import UserError
from flowrl.models.adapters import ADAPTER, begin_lengths, in_order, refuse_full_weights
from flowrl.models.diffusers.lora import own_form
from flowrl.settings.model.form import is_pipeline_folder
from samplers.noise import generator

LORA_FILE = "pytorch_lora_weights.safetensors"  # the name that load_lora_weights looks for
# Pipelines of two experts: diffusers saves one denoiser a file, and reads the second one's with
# `load_lora_weights(folder, weight_name=SECOND, load_into_transformer_2=True)`.
SECOND = "pytorch_lora_weights_2.safetensors"
TWO_FILES = (WanLoraLoaderMixin, SkyReelsV2LoraLoaderMixin)
# linears of blocks that are neither attention nor feed-forward: modulation, norms, embeddings
OTHER = re.compile(r"norm|modulation|(^|_)mod$|emb|time|adaln")


@dataclass(frozen=True)
class Spec:
    rank: int
    alpha: int | float
    targets: Sequence[str] | None  # names of linears or ends of them; None: the default
    seed: int
    dora: bool = False


def add_lora(denoisers: Mapping[str, nn.Module], spec: Spec) -> None:
    """Freeze the denoisers and add float32 adapters: A ~ N(0, 1 / rank^2), B = 0, and with `dora`
    the lengths of the weights' rows.

    A is keyed by the seed and the parameter name, so it does not depend on earlier draws, the
    device or the order of modules. Raises UserError for targets that match nothing.
    """
    if spec.rank < 1:
        raise UserError(f"lora rank must be at least 1, not {spec.rank}")
    if has_lora(denoisers):
        raise UserError("the model already has adapters: add_lora needs a model without any")
    for component, denoiser in denoisers.items():
        denoiser.requires_grad_(False)
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,  # type: ignore[arg-type]
            target_modules=chosen_targets(denoiser, spec.targets),
            init_lora_weights="gaussian",
            use_dora=spec.dora,
        )
        devices = {p.device for p in denoiser.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)):
            own_form.add(denoiser, config)
        prepare_adapters(denoiser)
        for name, parameter in denoiser.named_parameters():
            if ".lora_A." in name:
                draws = generator(spec.seed, "lora", component, name)
                fresh = torch.empty(parameter.shape).normal_(std=1 / spec.rank, generator=draws)
                parameter.data.copy_(fresh)
        begin_lengths(denoiser)


def has_lora(denoisers: Mapping[str, nn.Module]) -> bool:
    modules = (module for denoiser in denoisers.values() for module in denoiser.modules())
    return any(isinstance(module, BaseTunerLayer) for module in modules)


def default_targets(denoiser: nn.Module) -> list[str]:
    """Names of the attention and feed-forward linear layers within a block."""
    lists = [name for name, module in denoiser.named_modules() if isinstance(module, nn.ModuleList)]
    blocks = [a for a in lists if not any(a.startswith(b + ".") for b in lists)]
    inside = {}
    for name, module in denoiser.named_modules():
        block = next((b for b in blocks if name.startswith(b + ".")), None)
        if block is None or not isinstance(module, nn.Linear):
            continue
        if not any(OTHER.search(part) for part in name.split(".")):
            inside[name] = name.removeprefix(block + ".").split(".", 1)[-1]
    return _shortest(denoiser, sorted(set(inside.values())), inside)


def _shortest(denoiser: nn.Module, ends: list[str], linears: Iterable[str]) -> list[str]:
    """Name endings, if they match these linear layers and nothing else; otherwise the full names.

    In FLUX.2 `attn.to_out` is a linear layer in one kind of block, and a list of modules in
    another.
    """
    named = {name for name, _ in denoiser.named_modules() if _ends(name, ends)}
    return ends if named == set(linears) else sorted(linears)


def save_lora(pipe: Any, denoisers: Mapping[str, nn.Module], folder: Path) -> None:
    """Write files, including alpha, that a plain pipeline's `load_lora_weights` reads: one file, or
    one for each expert (`SECOND`). A pipeline without that method has a file of its own form.
    """
    if not writes_adapters(pipe, denoisers):
        own_form.save(denoisers, folder, LORA_FILE)
        return
    takes = inspect.signature(pipe.save_lora_weights).parameters
    for names, weight_name, slot in lora_files(pipe, denoisers):
        arguments: dict[str, Any] = {}
        for name in names:
            denoiser = denoisers[name]
            weights = get_peft_model_state_dict(denoiser, adapter_name=ADAPTER)
            arguments[f"{slot or name}_lora_layers"] = weights
            # without this metadata a reader takes alpha to be the rank
            place = f"{slot or name}_lora_adapter_metadata"
            if place in takes:
                arguments[place] = in_order(denoiser.peft_config[ADAPTER]).to_dict()  # type: ignore
        pipe.save_lora_weights(folder, weight_name=weight_name, **arguments)


def lora_files(
    pipe: Any, denoisers: Mapping[str, nn.Module]
) -> list[tuple[list[str], str, str | None]]:
    """(denoisers, file name, argument of save_lora_weights that receives them) for each file of a
    saved adapter."""
    return _files_of(type(pipe), list(denoisers))


def _files_of(kind: type, denoisers: Sequence[str]) -> list[tuple[list[str], str, str | None]]:
    if len(denoisers) == 2 and issubclass(kind, TWO_FILES):
        first, second = denoisers
        return [([first], LORA_FILE, None), ([second], SECOND, first)]
    return [(list(denoisers), LORA_FILE, None)]


def load_lora(pipe: Any, denoisers: Mapping[str, nn.Module], folder: Path, source: str) -> None:
    """Load adapters that `save_lora` or `save_pretrained` wrote, replacing existing ones. Errors
    call the folder `source`."""
    if (folder / LORA_FILE).is_file() and not writes_adapters(pipe, denoisers):
        for denoiser in denoisers.values():
            own_form.remove(denoiser)
        own_form.load(denoisers, folder / LORA_FILE, ADAPTER, source)
        for name, denoiser in denoisers.items():
            _loaded(pipe, name, denoiser, source)
    elif (folder / LORA_FILE).is_file():
        if has_lora(denoisers):
            pipe.unload_lora_weights()
        for _, name, slot in lora_files(pipe, denoisers):
            more = {} if slot is None else {"load_into_transformer_2": True}
            pipe.load_lora_weights(folder, weight_name=name, adapter_name=ADAPTER, **more)
        for name, denoiser in denoisers.items():
            _loaded(pipe, name, denoiser, source)
    elif is_pipeline_folder(folder):
        refuse_full_weights(source, has_lora(denoisers))
        for name, denoiser in denoisers.items():
            dtype = next(denoiser.parameters()).dtype
            saved = type(denoiser).from_pretrained(folder, subfolder=name, dtype=dtype)  # type: ignore
            denoiser.load_state_dict(saved.state_dict())
    else:
        raise UserError(f"{source} has neither {LORA_FILE} nor model_index.json: no saved weights")


def _loaded(pipe: Any, name: str, denoiser: nn.Module, source: str) -> None:
    """Make a denoiser's loaded adapters trainable. UserError if it has none."""
    if not has_lora({name: denoiser}):
        raise UserError(
            f"{source} has no adapter of this {type(pipe).__name__}'s {name}: it was made "
            "for another model"
        )
    denoiser.eval()
    prepare_adapters(denoiser)


def prepare_adapters(denoiser: nn.Module) -> None:
    """Make adapters trainable, in at least float32: half-precision weights would lose small
    steps."""
    for name, parameter in denoiser.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            parameter.requires_grad_(True)


def chosen_targets(denoiser: nn.Module, wanted: Sequence[str] | None) -> list[str]:
    """Names of the linear layers that get adapters, or endings of them. UserError for a target that
    matches nothing."""
    if wanted is None:
        return default_targets(denoiser)
    names = [name for name, module in denoiser.named_modules() if isinstance(module, nn.Linear)]
    for target in wanted:
        if not _matches(denoiser, [target]):
            ends = {".".join(n.split(".")[-k:]) for n in names for k in (1, 2)}
            close = get_close_matches(target, sorted(ends), n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise UserError(f"lora target {target!r} matches no linear layer of the model{hint}")
    return _shortest(denoiser, list(wanted), _matches(denoiser, wanted))


def _matches(denoiser: nn.Module, ends: Sequence[str]) -> list[str]:
    """Whether a name matches, as peft matches target_modules."""
    return [
        name
        for name, module in denoiser.named_modules()
        if isinstance(module, nn.Linear) and _ends(name, ends)
    ]


def _ends(name: str, ends: Sequence[str]) -> bool:
    return any(("." + name).endswith("." + end) for end in ends)


def writes_adapters(pipe: Any, denoisers: Mapping[str, nn.Module]) -> bool:
    """Whether the pipeline writes adapters of all its denoisers with their alpha, and reads
    them."""
    return class_writes_adapters(type(pipe), list(denoisers))


# Wan's method, which they inherit, asks for the `image_dim` of a configuration that has none
READER_FAILS = ("WanAnimate2ModularPipeline", "WanAnimate2DistilledModularPipeline")


def class_writes_adapters(kind: type, denoisers: Sequence[str]) -> bool:
    """The same of a pipeline's class, with the names of its denoisers."""
    if "save_lora_weights" not in dir(kind) or kind.__name__ in READER_FAILS:
        return False
    takes = inspect.signature(kind.save_lora_weights).parameters  # type: ignore[attr-defined]
    ends = ("lora_layers", "lora_adapter_metadata")
    slots = [slot or n for names, _, slot in _files_of(kind, denoisers) for n in names]
    return all(f"{slot}_{end}" in takes for slot in slots for end in ends)
