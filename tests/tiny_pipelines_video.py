"""Tiny random pipelines of videos: 2 to 3 latent frames of width 2 to 8."""

from types import SimpleNamespace

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.pipelines.wan import pipeline_wan_i2v
from transformers import (
    CLIPImageProcessor,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5EncoderModel,
)

from tests.tiny_pipelines_parts import (
    clip_config,
    decoder,
    ready,
    t5_config,
    tokenizer,
    wan_vae,
)


def wan_transformer(in_channels: int = 4, **more: int) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=in_channels,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        **more,
    )


def wan(experts: int = 1) -> WanPipeline:
    """Video; UniPC on flow sigmas with integer timesteps. Two experts: Wan 2.2."""
    torch.manual_seed(0)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipe = WanPipeline(
        transformer=wan_transformer(),
        transformer_2=wan_transformer() if experts == 2 else None,
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
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    pipe = WanImageToVideoPipeline(
        transformer=wan_transformer(in_channels=10, image_dim=16, added_kv_proj_dim=24),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
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
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        text_embed_dim=16,
        pooled_projection_dim=16,
        rope_axes_dim=(2, 4, 4),
    )
    coder = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
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
    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=16,
    )
    coder = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=2,
    )
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
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=8 if image else 4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=2,
        sample_height=2,
        sample_frames=5,
        max_text_seq_length=16,
    )
    coder = AutoencoderKLCogVideoX(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
    )
    scheduler = CogVideoXDPMScheduler if dpm else CogVideoXDDIMScheduler
    pipe = kind(
        transformer=transformer,
        scheduler=scheduler(
            beta_schedule="scaled_linear",
            clip_sample=False,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            snr_shift_scale=1.0,
            timestep_spacing="trailing",
        ),
        vae=coder,
        text_encoder=T5EncoderModel(t5_config()),
        tokenizer=tokenizer(),
    )
    return ready(pipe)
