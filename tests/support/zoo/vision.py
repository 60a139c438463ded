"""Tiny parts of older pipelines, and stand-ins for what a library that is not here would do."""

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP
from diffusers.pipelines.stable_diffusion.clip_image_project_model import (
    CLIPImageProjection,
)
from torch import Tensor, nn
from transformers import (
    DPTConfig,
    DPTForDepthEstimation,
    Siglip2ImageProcessorPil,
    Siglip2VisionConfig,
    Siglip2VisionModel,
)

from tests.support.tiny_pipelines_parts import SPECIAL, WORDS

COUNT = len(SPECIAL) + len(WORDS)
LAYERS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def resized(pipe: Any) -> None:
    """torchvision's nearest resize is an interpolation of torch."""

    def resize(image: Tensor, size: list[int], interpolation: str) -> Tensor:
        return nn.functional.interpolate(image, size, mode=interpolation)

    transforms = SimpleNamespace(
        functional=SimpleNamespace(resize=resize),
        InterpolationMode=SimpleNamespace(NEAREST="nearest"),
    )
    for part in (pipe.transformer, vars(pipe).get("controlnet")):
        if part is not None:
            vars(sys.modules[type(part).__module__]).setdefault("transforms", transforms)


def multilingual() -> MultilingualCLIP:
    sizes = {"transformerDimSize": 16, "imageDimSize": 16, "max_position_embeddings": 130}
    return MultilingualCLIP(MCLIPConfig(vocab_size=COUNT, pad_token_id=0, **LAYERS, **sizes))


def depths() -> DPTForDepthEstimation:
    return DPTForDepthEstimation(
        DPTConfig(
            **LAYERS | {"num_hidden_layers": 4},
            image_size=32,
            patch_size=16,
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 8, 8, 8],
            fusion_hidden_size=8,
            is_hybrid=False,
        )
    )


def siglip2() -> Siglip2VisionModel:
    return Siglip2VisionModel(Siglip2VisionConfig(**LAYERS, patch_size=8, num_patches=4))


def siglip2_processor(given: Mapping[str, Any]) -> Any:
    return Siglip2ImageProcessorPil(patch_size=8, max_num_patches=4)


OLDER = {
    "MultilingualCLIP": multilingual,
    "DPTForDepthEstimation": depths,
    "Siglip2VisionModel": siglip2,
    "CLIPImageProjection": lambda: CLIPImageProjection(16),
}
