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

from tests.tiny_pipelines_parts import clip_config, ready, tokenizer, vae

# as Stable Diffusion's checkpoints say
TRAINED: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}


def unet(**more: Any) -> UNet2DConditionModel:
    settings: dict[str, Any] = {
        "sample_size": 8,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 16,
        "norm_num_groups": 4,
        "attention_head_dim": 2,
    }
    return UNet2DConditionModel(**settings | more)


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
        unet=unet(
            cross_attention_dim=32,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=64,
            use_linear_projection=True,
        ),
        scheduler=EulerDiscreteScheduler(**TRAINED, timestep_spacing="leading"),
        vae=vae(),
        text_encoder=CLIPTextModel(clip_config()),
        tokenizer=tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(clip_config()),
        tokenizer_2=tokenizer(),
        add_watermarker=False,
    )
    return ready(pipe)
