"""Models that are handed over: a folder, a hub name, a live pipeline or a live language model.

A run reads a live model and trains a copy of its own. It is recorded by the folder or the hub name
that it came from if its weights equal those; otherwise it is saved into the run's folder.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from safetensors import safe_open
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from flowrl.errors import UserError
from flowrl.models.description import local_folder
from flowrl.models.open import DTYPES
from flowrl.paths import find
from flowrl.settings.read import run_from

PIPELINE_INDEX, LANGUAGE_INDEX = "model_index.json", "config.json"


def model_settings(
    model: Any, tokenizer: Any, recipe: Mapping[str, Any] | str, files: Path
) -> dict[str, Any]:
    """Settings of `model:` for a handed-over model. What cannot be named is saved into `files`.

    UserError for an object of another kind, or for a tokenizer without a live language model.
    """
    if isinstance(model, DiffusionPipeline) and tokenizer is None:
        return {"pipeline": _pipeline_name(model, files), "dtype": _dtype(_denoiser(model))}
    if isinstance(model, PreTrainedModel):
        if tokenizer is None:
            raise UserError("flowrl.train: a live language model needs its tokenizer: tokenizer=")
        return {"language": _language_name(model, tokenizer, files), "dtype": _dtype(model)}
    if tokenizer is not None:
        raise UserError(
            "flowrl.train: tokenizer is for a live language model; a pipeline, a folder or a hub "
            "name has its own"
        )
    if not isinstance(model, str | Path):
        raise UserError(
            "flowrl.train: the model is a folder, a hub name, a diffusers pipeline or a "
            f"transformers causal language model, not {type(model).__name__}"
        )
    return {"language" if _is_language(str(model), recipe) else "pipeline": str(model)}


def _is_language(source: str, recipe: Mapping[str, Any] | str) -> bool:
    """Whether a folder holds a language model; for a hub name, whether the recipe is for one."""
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
        raise UserError(f"flowrl.train: weights of {dtype} are none of {', '.join(DTYPES)}")
    return names[0]


def _pipeline_name(pipe: Any, files: Path) -> str:
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    if any(".lora_" in name for module in modules for name, _ in module.named_parameters()):
        raise UserError(
            "flowrl.train: the pipeline has adapters: merge them (pipe.fuse_lora()), and then "
            "remove them (pipe.unload_lora_weights())"
        )
    source = str(pipe.config.get("_name_or_path") or "")
    folder = local_folder(source) if source else None
    if folder is not None and is_pipeline_of(pipe, folder):
        return source
    saved = files / "pipeline"
    pipe.save_pretrained(saved)
    return str(saved)


def is_pipeline_of(pipe: Any, folder: Path) -> bool:
    """Whether a folder holds this pipeline: the same classes, scheduler and weights, to the bit
    in the pipeline's dtype."""
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
    """Whether the safetensors files of a folder hold a module's weights, to the bit in its dtype.

    A weight that is tied to another may be missing there.
    """
    files = list(folder.glob("*.safetensors"))
    files = [file for file in files if "." not in file.stem]  # not those of half precision
    left = dict(module.state_dict(keep_vars=True))
    if any(weight.is_meta for weight in left.values()):
        raise UserError(
            f"flowrl.train: weights of {type(module).__name__} are offloaded and cannot be read; "
            "pass the model's folder or hub name, and settings={'model': {'offload': True}}"
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
            "flowrl.train: the language model has adapters: merge them (merge_and_unload())"
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
