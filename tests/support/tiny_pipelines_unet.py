"""Tiny random pipelines on UNets, of models that predict the noise or v: width 8 latents."""

from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from tests.support.tiny_pipelines_parts import clip_config, ready, tokenizer, vae
from tests.support.zoo.settings import TRAINED, UNET, XL


def unet(**more: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(**UNET | more)


def sd15(scheduler: type = DDIMScheduler, **more: Any) -> StableDiffusionPipeline:
    """Predicts the noise, unless `more` says something else to the scheduler."""
    torch.manual_seed(0)
    settings = TRAINED | ({"clip_sample": False} if scheduler is DDIMScheduler else {})
    pipe = StableDiffusionPipeline(
        unet=unet(),
        scheduler=scheduler(**settings | more),
        vae=vae(),
        text_encoder=CLIPTextModel(clip_config()),
        tokenizer=tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return ready(pipe)


def sdxl() -> StableDiffusionXLPipeline:
    """Its scheduler scales the initial noise and every input of the denoiser."""
    torch.manual_seed(0)
    pipe = StableDiffusionXLPipeline(
        unet=unet(**XL),
        scheduler=EulerDiscreteScheduler(**TRAINED, timestep_spacing="leading"),
        vae=vae(),
        text_encoder=CLIPTextModel(clip_config()),
        tokenizer=tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(clip_config()),
        tokenizer_2=tokenizer(),
        add_watermarker=False,
    )
    return ready(pipe)
