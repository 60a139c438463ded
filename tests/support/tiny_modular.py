"""Tiny random modular pipelines: those with a classic form are made of its parts."""

from typing import Any

import diffusers
import torch

from tests.support.tiny_pipelines import NAMED

# modular class by the name of its classic family
TWINS = {
    "SD3": "StableDiffusion3ModularPipeline",
    "SDXL": "StableDiffusionXLModularPipeline",
    "FLUX.1": "FluxModularPipeline",
    "FLUX.2": "Flux2ModularPipeline",
    "Qwen-Image": "QwenImageModularPipeline",
    "Z-Image": "ZImageModularPipeline",
    "Wan 2.1": "WanModularPipeline",
    "Wan 2.2": "Wan22ModularPipeline",
    "LTX-Video": "LTXModularPipeline",
}


def modular(kind: str, parts: dict[str, Any]) -> Any:
    """A modular pipeline of these parts, those that its blocks expect."""
    torch.manual_seed(0)
    pipe = getattr(diffusers, kind)()
    expected = {spec.name for spec in pipe.blocks.expected_components}
    settings = {spec.name for spec in pipe.blocks.expected_configs}
    given = {n: part for n, part in parts.items() if n in expected | settings and part is not None}
    pipe.update_components(**given)
    return pipe


def twin(name: str) -> Any:
    """The modular form of a tiny classic pipeline, with its parts."""
    classic = NAMED[name].build()
    config = {n: v for n, v in classic.config.items() if n in ("boundary_ratio",)}
    return modular(TWINS[name], {**classic.components, **config})
