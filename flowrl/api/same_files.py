"""Whether a folder has a live model as it is: its weights, configurations and tokenizers."""

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from safetensors import safe_open
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from flowrl.errors import UserError, made_call
from flowrl.settings.checks.model_files import read_json
from flowrl.settings.model.form import PIPELINE_INDEX


def is_pipeline_of(pipe: Any, folder: Path) -> bool:
    """Whether a folder contains this pipeline: the same classes and scheduler, and bit-identical
    weights in the pipeline's dtype."""
    if not (folder / PIPELINE_INDEX).is_file():
        return False
    index = read_json(folder / PIPELINE_INDEX, "model.pipeline")
    if index.get("_class_name") != type(pipe).__name__:
        return False
    for name, part in pipe.components.items():
        kind = (index.get(name) or [None, None])[1]
        if part is None or kind is None:
            same = part is None and kind is None
        elif isinstance(part, nn.Module):
            same = kind == type(part).__name__ and has_weights_of(part, folder / name)
            same = same and _same_settings(part, folder / name)
        elif isinstance(part, PreTrainedTokenizerBase):
            same = is_tokenizer_of(part, folder / name)
        else:
            same = not isinstance(part, ConfigMixin) or _has_config(part, kind, folder / name)
        if not same:
            return False
    return _alike(pipe, {k: v for k, v in index.items() if not isinstance(v, list)})


def _same_settings(part: nn.Module, folder: Path) -> bool:
    """Whether a model of diffusers has the configuration of its folder."""
    if not isinstance(part, ModelMixin):
        return True
    kind: Any = type(part)  # `load_config` is of ConfigMixin, which every such model also is
    return _alike(part, kind.load_config(str(folder)))


def _alike(part: Any, stored: Any) -> bool:
    """Whether a configuration has the stored values, and elsewhere the defaults of its class, but
    for the parts of a pipeline."""
    parameters = inspect.signature(type(part).__init__).parameters
    parts = part.components if isinstance(part, DiffusionPipeline) else {}
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    wanted = {
        k: stored.get(k, defaults.get(k)) for k in part.config if k[0] != "_" and k not in parts
    }
    return json.dumps(wanted, default=str, sort_keys=True) == json.dumps(
        {k: part.config[k] for k in wanted}, default=str, sort_keys=True
    )


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
            f"{made_call()}: weights of {type(module).__name__} are offloaded and cannot be "
            "read; pass the model's folder or hub name, and settings={'model': {'offload': "
            "True}}"
        )
    same: set[int] = set()
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in left.keys() & set(stored.keys()):
                weight, saved = left.pop(name).detach(), stored.get_tensor(name)
                if weight.shape != saved.shape or not torch.equal(
                    weight.cpu(), saved.to(weight.dtype)
                ):
                    return False
                same.add(weight.data_ptr())
    return bool(files) and all(weight.data_ptr() in same for weight in left.values())


def is_tokenizer_of(tokenizer: Any, folder: Path) -> bool:
    try:
        stored: Any = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        return False
    attributes = (
        "chat_template",
        "eos_token",
        "model_max_length",
        "padding_side",
        "truncation_side",
    )
    ours, theirs = (
        (tokens.get_vocab(), *(getattr(tokens, name, None) for name in attributes))
        for tokens in (tokenizer, stored)
    )
    return ours == theirs
