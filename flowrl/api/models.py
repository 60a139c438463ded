"""Models passed from Python: a folder, a hub name, a live pipeline or a live language model.

A run reads a live model and trains its own copy. The model is recorded by the folder or hub name
that it came from if its weights are unchanged; otherwise it is saved into the run's folder.
"""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from safetensors import safe_open
from safetensors.torch import save_model
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from flowrl.api.parts import place_of
from flowrl.errors import UserError
from flowrl.models.description import local_folder
from flowrl.models.diffusers.call.driver import DENOISERS
from flowrl.models.open import DTYPES
from flowrl.paths import find
from flowrl.settings.own_parts import OWN_NAME
from flowrl.settings.read import run_from

STORAGE_HOOKS = ("group_offloading", "lazy_prefetch", "layer_execution", "layerwise_casting")
PIPELINE_INDEX, LANGUAGE_INDEX = "model_index.json", "config.json"


def model_settings(
    model: Any, tokenizer: Any, recipe: Mapping[str, Any] | str, files: Path
) -> dict[str, Any]:
    """Settings of `model:` for a live model. A model without a folder or hub name is saved into
    `files`.

    UserError for an object of another kind, or for a tokenizer without a live language model.
    """
    _refuse_quantized(model)
    if isinstance(model, DiffusionPipeline) and tokenizer is None:
        return {"pipeline": _pipeline_name(model, files), "dtype": _dtype(_denoiser(model))}
    if isinstance(model, PreTrainedModel):
        if tokenizer is None:
            raise UserError(
                "flowrl.train: a live language model needs its tokenizer: pass tokenizer="
            )
        return {"language": _language_name(model, tokenizer, files), "dtype": _dtype(model)}
    if tokenizer is None and (found := own_model_settings(model, files)) is not None:
        return found
    if tokenizer is not None:
        raise UserError(
            "flowrl.train: tokenizer is only for a live language model; a pipeline, a folder or a "
            "hub name has its own"
        )
    if not isinstance(model, str | Path):
        raise UserError(
            "flowrl.train: the model must be a folder, a hub name, a diffusers pipeline, a "
            "transformers causal language model or your own model (docs/own_models.md), not "
            f"{type(model).__name__}"
        )
    return {"language" if _is_language(str(model), recipe) else "pipeline": str(model)}


def _refuse_quantized(model: Any) -> None:
    """UserError for a live model of fewer bits, which a run could not read again as it is."""
    parts = model.components.values() if isinstance(model, DiffusionPipeline) else [model]
    for part in parts:
        if isinstance(part, nn.Module) and getattr(part, "hf_quantizer", None) is not None:
            raise UserError(
                f"flowrl.train: {type(part).__name__} is quantized, and a run reads its model from "
                "files: pass the folder or hub name instead, and settings="
                "{'model': {'quantization': {'backend': 'bitsandbytes', 'bits': 4}}}"
            )


def own_model_settings(model: Any, files: Path) -> dict[str, Any] | None:
    """Settings of a user's own model; None for any other model. A module's weights are saved into
    `files`. UserError for a class that is not in an importable file, or whose arguments are
    unknown."""
    if isinstance(model, str) and OWN_NAME.fullmatch(model):
        return {"own": model}
    if isinstance(model, Mapping) and "own" in model:
        return dict(model) | {"own": _own_named(model["own"])}
    if isinstance(model, type) or inspect.isfunction(model):
        return {"own": _own_named(model)}
    if not isinstance(model, nn.Module):
        return None
    kind = type(model)
    if kind.__init__ is not nn.Module.__init__ and len(inspect.signature(kind).parameters):
        raise UserError(
            f"flowrl.train: {kind.__name__} takes arguments, which a run file must list: save its "
            f"weights (safetensors.torch.save_model), and pass {{'own': {{'name': "
            f"'FILE.py:{kind.__name__}', ...arguments}}, 'weights': FILE}}"
        )
    saved = files / "weights.safetensors"
    found = {"own": _own_named(kind), "weights": str(saved), "dtype": _dtype(model)}
    save_model(model, str(saved))
    return found


def _own_named(model: Any) -> Any:
    """FILE.py:NAME of a class or function; other values are returned unchanged."""
    if not isinstance(model, type) and not inspect.isfunction(model):
        return model
    name = place_of(model)
    if name is None:
        raise UserError(
            f"flowrl.train: {model.__name__} is not in a file that a later start could import: "
            "put it into its own file, and import it from there"
        )
    return name


def _is_language(source: str, recipe: Mapping[str, Any] | str) -> bool:
    """Whether a folder has a language model; for a hub name, whether the recipe is for one."""
    folder = find(source)
    if folder.is_dir():
        return not (folder / PIPELINE_INDEX).is_file() and (folder / LANGUAGE_INDEX).is_file()
    rest = {"model": {"pipeline": source}, "prompts": {"train": "-"}, "rewards": "length"}
    return run_from({"recipe": recipe, **rest}, "flowrl.train").algorithm().text


def _denoiser(pipe: Any) -> nn.Module:
    names = ("transformer", "unet")
    found = next((pipe.components[n] for n in names if pipe.components.get(n) is not None), None)
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    if found is None and not modules:
        raise UserError(f"{type(pipe).__name__} has no weights: there is nothing to train")
    return modules[0] if found is None else found


def _dtype(model: nn.Module) -> str:
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    names = [name for name, each in DTYPES.items() if each is dtype]
    if not names:
        raise UserError(
            f"flowrl.train: weights of {dtype} are not supported; use {', '.join(DTYPES)}"
        )
    return names[0]


def _pipeline_name(pipe: Any, files: Path) -> str:
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    if any(".lora_" in name for module in modules for name, _ in module.named_parameters()):
        raise UserError(
            "flowrl.train: the pipeline has adapters: merge them with pipe.fuse_lora(), then "
            "remove them with pipe.unload_lora_weights()"
        )
    parts = {name: pipe.components.get(name) for name in DENOISERS}
    lost = [f"{name}: {what}" for name, part in parts.items() for what in beyond_files(part)]
    if lost:
        raise UserError(
            "flowrl.train: a run trains a copy that is loaded from files, which do not contain "
            f"all parts of this pipeline ({'; '.join(lost[:3])}): remove them "
            "(pipe.disable_freeu(), "
            "pipe.unload_ip_adapter(), set_default_attn_processor(), remove the hooks)"
        )
    source = str(pipe.config.get("_name_or_path") or "")
    folder = local_folder(source) if source else None
    if folder is not None and is_pipeline_of(pipe, folder):
        return source
    saved = files / "pipeline"
    pipe.save_pretrained(saved)
    return str(saved)


def beyond_files(part: Any) -> list[str]:
    """List the parts of a diffusers model that change its output but are not in its files.

    These are hooks, and modules, attention processors and plain numbers (FreeU's) that differ from
    those created from its configuration. Quantized modules are not compared.
    """
    if not isinstance(part, ModelMixin) or getattr(part.config, "quantization_config", None):
        return []
    kind: Any = type(part)
    with init_empty_weights():
        plain = kind.from_config(part.config)
    theirs = dict(plain.named_modules())
    found: list[str] = []
    for name, module in part.named_modules():
        at, other = name or type(part).__name__, theirs.get(name)
        if _hooked(module):
            found.append(f"a hook on {at}")
        if other is None or type(other) is not type(module):
            found.append(f"{type(module).__name__} at {at}")
            continue
        ours, made = _numbers(module), _numbers(other)
        found += [f"{key} of {at}" for key in sorted(ours) if ours[key] != made.get(key)]
    return found


def _hooked(module: nn.Module) -> bool:
    """Whether a hook can change the output; hooks that only move or store weights cannot."""
    values = vars(module)
    registry = values.get("_diffusers_hook")
    if registry is not None:
        return any(not name.startswith(STORAGE_HOOKS) for name in registry.hooks)
    replaced = "forward" in values and "_hf_hook" not in values
    return replaced or bool(values["_forward_hooks"] or values["_forward_pre_hooks"])


def _numbers(module: nn.Module) -> dict[str, Any]:
    """A module's own numbers and the kind of its attention processor."""
    values = vars(module)
    numbers = {k: v for k, v in values.items() if type(v) in (int, float) and k[0] != "_"}
    processor = values.get("processor")
    if processor is not None:
        numbers["processor"] = type(processor), getattr(processor, "_attention_backend", None)
    return numbers


def is_pipeline_of(pipe: Any, folder: Path) -> bool:
    """Whether a folder contains this pipeline: the same classes and scheduler, and bit-identical
    weights in the pipeline's dtype."""
    if not (folder / PIPELINE_INDEX).is_file():
        return False
    index = json.loads((folder / PIPELINE_INDEX).read_text())
    if index.get("_class_name") != type(pipe).__name__:
        return False
    for name, part in pipe.components.items():
        kind = (index.get(name) or [None, None])[1]
        if part is None or kind is None:
            same = part is None and kind is None
        elif isinstance(part, nn.Module):
            same = kind == type(part).__name__ and has_weights_of(part, folder / name)
        else:
            same = not isinstance(part, ConfigMixin) or _has_config(part, kind, folder / name)
        if not same:
            return False
    return True


def _has_config(part: Any, kind: str, folder: Path) -> bool:
    if type(part).__name__ != kind:
        return False
    stored = type(part).from_pretrained(str(folder)).config
    ours, theirs = ({k: v for k, v in c.items() if k[0] != "_"} for c in (part.config, stored))
    return ours == theirs


def has_weights_of(module: nn.Module, folder: Path) -> bool:
    """Whether a folder's safetensors files contain a module's weights, bit-identical in its dtype.

    Tied weights may be missing there.
    """
    files = list(folder.glob("*.safetensors"))
    files = [file for file in files if "." not in file.stem]  # not those of half precision
    left = dict(module.state_dict(keep_vars=True))
    if any(weight.is_meta for weight in left.values()):
        raise UserError(
            f"flowrl.train: weights of {type(module).__name__} are offloaded and cannot be "
            "read; pass the model's folder or hub name, and settings={'model': {'offload': "
            "True}}"
        )
    same: set[int] = set()
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in left.keys() & set(stored.keys()):
                weight, kept = left.pop(name).detach(), stored.get_tensor(name)
                if weight.shape != kept.shape or not torch.equal(
                    weight.cpu(), kept.to(weight.dtype)
                ):
                    return False
                same.add(weight.data_ptr())
    return bool(files) and all(weight.data_ptr() in same for weight in left.values())


def _language_name(model: Any, tokenizer: Any, files: Path) -> str:
    if any(".lora_" in name for name, _ in model.named_parameters()):
        raise UserError(
            "flowrl.train: the language model has adapters: merge them with merge_and_unload()"
        )
    source = str(model.name_or_path or "")
    folder = local_folder(source) if source else None
    if folder is not None and has_weights_of(model, folder) and _is_tokenizer_of(tokenizer, folder):
        return source
    saved = files / "language"
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    return str(saved)


def _is_tokenizer_of(tokenizer: Any, folder: Path) -> bool:
    try:
        stored: Any = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        return False
    pairs = [(each.get_vocab(), each.chat_template, each.eos_token) for each in (tokenizer, stored)]
    return pairs[0] == pairs[1]
