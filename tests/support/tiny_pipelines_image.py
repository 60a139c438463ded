"""Tiny random pipelines of images on transformers: width 16 latents, one or two layers."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    FluxKontextPipeline,
    FluxPipeline,
    Lumina2Pipeline,
    QwenImageEditPipeline,
    QwenImagePipeline,
    SanaPipeline,
    StableDiffusion3Pipeline,
    ZImagePipeline,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel

from tests.support.tiny_models import model
from tests.support.tiny_pipelines_edit import Looker, Reader
from tests.support.tiny_pipelines_parts import (
    chat_tokenizer,
    clip_config,
    decoder,
    qwen_vae,
    ready,
    t5_config,
    tokenizer,
    vae,
)
from tests.support.zoo.settings import FLOW


def sd3(shift: float = 3.0) -> StableDiffusion3Pipeline:
    torch.manual_seed(0)
    transformer = model("SD3Transformer2DModel")
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=vae(),
        text_encoder=CLIPTextModelWithProjection(clip_config()),
        tokenizer=tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(clip_config()),
        tokenizer_2=tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )
    return ready(pipe)


def flux(kind: type[FluxPipeline] | type[FluxKontextPipeline] = FluxPipeline) -> FluxPipeline:
    """Guidance is embedded, latents are packed, the schedule is shifted by resolution."""
    torch.manual_seed(0)
    transformer = model("FluxTransformer2DModel")
    pipe = kind(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae(),
        text_encoder=CLIPTextModel(clip_config()),
        tokenizer=tokenizer(),
        text_encoder_2=T5EncoderModel(t5_config()),
        tokenizer_2=tokenizer(),
    )
    return ready(pipe)


def lumina2() -> Lumina2Pipeline:
    torch.manual_seed(0)
    transformer = model("Lumina2Transformer2DModel")
    pipe = Lumina2Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(),
        text_encoder=decoder(),
        tokenizer=tokenizer(64),
    )
    return ready(pipe)


def qwen_image() -> QwenImagePipeline:
    """Prompts are padded to the longest of a batch; the mask is left out where nothing is."""
    torch.manual_seed(0)
    pipe = QwenImagePipeline(
        transformer=model("QwenImageTransformer2DModel"),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=qwen_vae(),
        text_encoder=decoder(),
        tokenizer=tokenizer(2048),
    )
    return ready(pipe)


def qwen_image_edit() -> QwenImageEditPipeline:
    """The image is seen by the language model and, encoded, by the transformer.

    The pipeline's own megapixel for the image is made 16 x 16.
    """
    torch.manual_seed(0)
    vars(pipeline_qwenimage_edit)["calculate_dimensions"] = lambda area, ratio: (16, 16, None)
    pipe = QwenImageEditPipeline(
        transformer=model("QwenImageTransformer2DModel"),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=qwen_vae(),
        text_encoder=Reader(),
        tokenizer=tokenizer(2048),
        processor=Looker(tokenizer(2048)),
    )
    return ready(pipe)


def flux2() -> Flux2Pipeline:
    """Packs the latents that it is given; text ids are a part of its encoding."""
    torch.manual_seed(0)
    transformer = model("Flux2Transformer2DModel")
    coder = model("AutoencoderKLFlux2")
    pipe = Flux2Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=coder,
        text_encoder=decoder(),
        tokenizer=chat_tokenizer(128),
    )
    pipe.system_message = "a photo"
    return ready(pipe)


def z_image() -> ZImagePipeline:
    """Encodings are lists of tensors, and so are the denoiser's inputs and outputs."""
    torch.manual_seed(0)
    transformer = model("ZImageTransformer2DModel")
    with torch.no_grad():  # these come as whatever was in memory
        transformer.x_pad_token.normal_()
        transformer.cap_pad_token.normal_()
    pipe = ZImagePipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(),
        text_encoder=decoder(),
        tokenizer=chat_tokenizer(64),
    )
    return ready(pipe)


def sana() -> SanaPipeline:
    """A solver of second order on a flow's levels; linear attention."""
    torch.manual_seed(0)
    transformer = model("SanaTransformer2DModel")
    coder = model("AutoencoderDC")
    pipe = SanaPipeline(
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(**FLOW),
        vae=coder,
        text_encoder=decoder(),
        tokenizer=tokenizer(64),
    )
    return ready(pipe)


def live(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The pipeline of a folder that `sd3` was saved into."""
    return StableDiffusion3Pipeline.from_pretrained(
        folder, dtype=dtype, text_encoder_3=None, tokenizer_3=None
    )
