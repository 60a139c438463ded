"""A tiny random pipeline of any class of diffusers, from what its constructor asks for.

Each part is of the class that the annotation names, small by a table of settings
(`tiny_zoo_models`); widths agree by convention: latents have 4 channels, texts and images are
encoded to 16 numbers. What a pipeline needs beside that is in `tiny_zoo_calls`.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from torch import nn

from tests.support.tiny_pipelines_parts import chat_tokenizer, ready, tokenizer
from tests.support.zoo.models import MODELS
from tests.support.zoo.settings import SCHEDULERS
from tests.support.zoo.text import ENCODERS
from tests.support.zoo.vision import OLDER

# parts that do not belong to what is driven
LEFT_OUT = frozenset(
    (
        "safety_checker", "feature_extractor", "watermarker", "image_encoder", "audio_tokenizer",
        "transformer_2", "pe", "pe_tokenizer", "audio_vae", "vocoder",
    )
)  # fmt: skip
CLASS = re.compile(r"[A-Z]\w+")
WANTED = re.compile(r"vae|(text_encoder|tokenizer|transformer)(_\d)?")  # though it has a default


class Unbuilt(ValueError):
    """No tiny part is known for something that a constructor asks for."""


class Special(NamedTuple):
    """Of the pipelines whose names match: settings of parts, or what makes them; arguments."""

    parts: Mapping[str, Any] = {}
    call: Mapping[str, Any] = {}
    after: Callable[[Any], None] | None = None  # for what a class fixes in its own constructor


class Tiny(NamedTuple):
    pipe: Any
    call: dict[str, Any]


def tiny(kind: type, specials: Mapping[str, Special], sizes: Mapping[str, Any]) -> Tiny:
    """Raises Unbuilt for a constructor that asks for what no table has."""
    torch.manual_seed(0)
    chosen = [special for name, special in specials.items() if re.fullmatch(name, kind.__name__)]
    parts: dict[str, Any] = {}
    for special in chosen:
        for name, value in special.parts.items():
            both = isinstance(value, Mapping) and isinstance(parts.get(name), Mapping)
            parts[name] = {**parts[name], **value} if both else value
    given = _given(kind, parts)
    pipe = ready(kind(**given))
    call = dict(sizes)
    for special in chosen:
        call |= special.call
        if special.after is not None:
            special.after(pipe)
    takes = inspect.signature(kind.__call__).parameters
    return Tiny(pipe, {name: value for name, value in call.items() if name in takes})


def _given(kind: type, parts: Mapping[str, Any]) -> dict[str, Any]:
    optional = {
        name for base in kind.__mro__ for name in vars(base).get("_optional_components", ())
    }
    given: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        annotation = parameter.annotation
        classes = CLASS.findall(
            annotation.__name__ if inspect.isclass(annotation) else str(annotation)
        )
        empty = parameter.default is inspect.Parameter.empty
        if name in parts and not isinstance(parts[name], Mapping):
            given[name] = parts[name](given) if callable(parts[name]) else parts[name]
        elif name == "requires_safety_checker":
            given[name] = False
        elif name not in parts and name in LEFT_OUT and name in optional:
            given[name] = None
        elif name in parts or empty or WANTED.fullmatch(name):
            given[name] = part(name, classes, parts.get(name, {}))
    return given


def part(name: str, classes: list[str], more: Mapping[str, Any]) -> Any:
    """The first of the classes that a table has, with `more` settings."""
    for found in classes:
        if found in SCHEDULERS:
            scheduler, settings = SCHEDULERS[found]
            return getattr(diffusers, scheduler)(**{**settings, **more})
        if found in MODELS:
            return stirred(getattr(diffusers, found)(**{**MODELS[found], **more}))
        if found in ENCODERS:
            return stirred(ENCODERS[found](**more))
        if found in OLDER:
            return stirred(OLDER[found](**more))
    if "tokenizer" in name:
        length = 77 if any("CLIP" in found for found in classes) else 512
        return (tokenizer if length == 77 else chat_tokenizer)(more.get("length", length))
    if "image_processor" in name or "feature_extractor" in name:
        side = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
        return transformers.CLIPImageProcessor(**side)
    raise Unbuilt(f"no tiny {name} of {' or '.join(classes)}")


def stirred(module: nn.Module) -> nn.Module:
    """Parts that start as nothing (a control network's outputs) would hide what they do."""
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            unset = "pad_token" in name or not bool(parameter.isfinite().all())
            if unset or (parameter.numel() > 1 and not bool(parameter.any())):
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=draws))
    return module
