"""Tiny random pipelines of videos: 2 to 3 latent frames of width 2 to 8."""

from types import SimpleNamespace

import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
)
from diffusers.pipelines.wan import pipeline_wan_i2v
from transformers import (
    CLIPImageProcessor,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5EncoderModel,
)

from tests.support.tiny_models import model
from tests.support.tiny_pipelines_parts import (
    clip_config,
    decoder,
    ready,
    t5_config,
    tokenizer,
    wan_vae,
)
from tests.support.zoo.settings import COG, FLOW
from tests.support.zoo.text import VISION


def wan(experts: int = 1) -> WanPipeline:
    """Video; UniPC on flow sigmas with integer timesteps. Two experts: Wan 2.2."""
    torch.manual_seed(0)
    scheduler = UniPCMultistepScheduler(**FLOW)
    pipe = WanPipeline(
        transformer=model("WanTransformer3DModel"),
        transformer_2=model("WanTransformer3DModel") if experts == 2 else None,
        boundary_ratio=0.8 if experts == 2 else None,
        scheduler=scheduler,
        vae=wan_vae(),
        text_encoder=T5EncoderModel(t5_config()),
        tokenizer=tokenizer(),
    )
    return ready(pipe)


def wan_image() -> WanImageToVideoPipeline:
    """The image goes in as latents beside the state, and through a vision encoder."""
    torch.manual_seed(0)
    if "ftfy" not in vars(pipeline_wan_i2v):  # it mends texts; not needed for ours
        vars(pipeline_wan_i2v)["ftfy"] = SimpleNamespace(fix_text=str)
    vision = CLIPVisionConfig(**VISION)
    pipe = WanImageToVideoPipeline(
        transformer=model(
            "WanTransformer3DModel", in_channels=10, image_dim=16, added_kv_proj_dim=24
        ),
        scheduler=UniPCMultistepScheduler(**FLOW),
        vae=wan_vae(),
        text_encoder=T5EncoderModel(t5_config()),
        tokenizer=tokenizer(),
        image_encoder=CLIPVisionModel(vision),
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
    )
    return ready(pipe)


def hunyuan_video() -> HunyuanVideoPipeline:
    """Two encoders, embedded guidance."""
    torch.manual_seed(0)
    transformer = model("HunyuanVideoTransformer3DModel")
    coder = model("AutoencoderKLHunyuanVideo")
    pipe = HunyuanVideoPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=coder,
        text_encoder=decoder(),
        tokenizer=tokenizer(64),
        text_encoder_2=CLIPTextModel(clip_config(77)),
        tokenizer_2=tokenizer(77),
    )
    return ready(pipe)


def ltx(kind: type[LTXPipeline] | type[LTXImageToVideoPipeline] = LTXPipeline) -> LTXPipeline:
    """Packed latents; the one with an image steps all frames but the first."""
    torch.manual_seed(0)
    transformer = model("LTXVideoTransformer3DModel")
    coder = model("AutoencoderKLLTXVideo")
    pipe = kind(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
        vae=coder,
        text_encoder=T5EncoderModel(t5_config()),
        tokenizer=tokenizer(),
    )
    return ready(pipe)


def cog_video(
    kind: type[CogVideoXPipeline] | type[CogVideoXImageToVideoPipeline] = CogVideoXPipeline,
    *,
    dpm: bool = True,
) -> CogVideoXPipeline:
    """Predicts v, from pure noise on (zero terminal SNR); a stochastic solver of its own."""
    torch.manual_seed(0)
    image = kind is CogVideoXImageToVideoPipeline
    transformer = model("CogVideoXTransformer3DModel", in_channels=8 if image else 4)
    coder = model("AutoencoderKLCogVideoX")
    scheduler = CogVideoXDPMScheduler if dpm else CogVideoXDDIMScheduler
    pipe = kind(
        transformer=transformer,
        scheduler=scheduler(**COG),
        vae=coder,
        text_encoder=T5EncoderModel(t5_config()),
        tokenizer=tokenizer(),
    )
    return ready(pipe)
