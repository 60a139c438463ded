"""Public configurations of image models of `configs/models`: see `flowrl.models.public_configs`.

FLUX.2's and SD3.5-large's are as diffusers' conversion scripts and tests have them; the others are
the published sizes, which are the defaults of diffusers' classes.
"""

from collections.abc import Mapping

from flowrl.models.public_parts import (
    CLIP_G,
    CLIP_L,
    CLIP_L_PROJECTED,
    GEMMA2_2B,
    QWEN3_4B,
    QWEN25_VL_7B,
    T5,
    VAE16,
    VAE16_COUNT,
    WAN_VAE_COUNT,
    PublicModel,
)

_SD35_LARGE = {
    "_class_name": "SD3Transformer2DModel",
    "attention_head_dim": 64,
    "caption_projection_dim": 2432,
    "in_channels": 16,
    "joint_attention_dim": 4096,
    "num_attention_heads": 38,
    "num_layers": 38,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
    "sample_size": 128,
}
_FLUX2_KLEIN_4B = {
    "_class_name": "Flux2Transformer2DModel",
    "attention_head_dim": 128,
    "axes_dims_rope": [32, 32, 32, 32],
    "guidance_embeds": False,
    "in_channels": 128,
    "joint_attention_dim": 7680,
    "mlp_ratio": 3.0,
    "num_attention_heads": 24,
    "num_layers": 5,
    "num_single_layers": 20,
    "patch_size": 1,
}
_QWEN_IMAGE = {
    "_class_name": "QwenImageTransformer2DModel",
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
    "guidance_embeds": False,
    "in_channels": 64,
    "joint_attention_dim": 3584,
    "num_attention_heads": 24,
    "num_layers": 60,
    "out_channels": 16,
    "patch_size": 2,
}
_Z_IMAGE = {
    "_class_name": "ZImageTransformer2DModel",
    "axes_dims": [32, 48, 48],
    "cap_feat_dim": 2560,
    "dim": 3840,
    "in_channels": 16,
    "n_heads": 30,
    "n_kv_heads": 30,
    "n_layers": 30,
    "n_refiner_layers": 2,
}
_UNET_15 = {
    "_class_name": "UNet2DConditionModel",
    "attention_head_dim": 8,
    "block_out_channels": [320, 640, 1280, 1280],
    "cross_attention_dim": 768,
    "layers_per_block": 2,
    "sample_size": 64,
}
_UNET_XL = {
    "_class_name": "UNet2DConditionModel",
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "layers_per_block": 2,
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}
_SANA = {
    "_class_name": "SanaTransformer2DModel",
    "attention_head_dim": 32,
    "caption_channels": 2304,
    "cross_attention_dim": 2240,
    "cross_attention_head_dim": 112,
    "in_channels": 32,
    "mlp_ratio": 2.5,
    "num_attention_heads": 70,
    "num_cross_attention_heads": 20,
    "num_layers": 20,
    "patch_size": 1,
    "sample_size": 32,
}
_DC_BLOCKS = ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3
_DC_SCALES = [[], [], [], [5], [5], [5]]
_DC = {
    "_class_name": "AutoencoderDC",
    "decoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
    "decoder_block_types": _DC_BLOCKS,
    "decoder_qkv_multiscales": _DC_SCALES,
    "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
    "encoder_block_types": _DC_BLOCKS,
    "encoder_qkv_multiscales": _DC_SCALES,
    "latent_channels": 32,
    "upsample_block_type": "interpolate",
}
_VAE4 = VAE16 | {
    "latent_channels": 4,
    "sample_size": 512,
    "use_quant_conv": True,
    "use_post_quant_conv": True,
}
_VAE4_COUNT, _FLUX2_VAE_COUNT, _DC_COUNT = 83_653_863, 84_046_115, 298_755_555


def _flux(guidance: bool, pipeline: str = "FluxPipeline") -> PublicModel:
    denoiser = {
        "_class_name": "FluxTransformer2DModel",
        "attention_head_dim": 128,
        "guidance_embeds": guidance,
        "in_channels": 64,
        "joint_attention_dim": 4096,
        "num_attention_heads": 24,
        "num_layers": 19,
        "num_single_layers": 38,
        "patch_size": 1,
        "pooled_projection_dim": 768,
    }
    counts = {"text_encoder": CLIP_L, "text_encoder_2": T5, "vae": VAE16_COUNT}
    return PublicModel(pipeline, {"transformer": denoiser, "vae": VAE16}, counts)


def _qwen(pipeline: str) -> PublicModel:
    vae = {"_class_name": "AutoencoderKLQwenImage", "dim_mult": [1, 2, 4, 4]}
    counts = {"text_encoder": QWEN25_VL_7B, "vae": WAN_VAE_COUNT}
    return PublicModel(pipeline, {"transformer": _QWEN_IMAGE, "vae": vae}, counts)


_Z = PublicModel(
    "ZImagePipeline",
    {"transformer": _Z_IMAGE, "vae": VAE16},
    {"text_encoder": QWEN3_4B, "vae": VAE16_COUNT},
)

IMAGE_MODELS: Mapping[str, PublicModel] = {
    "stabilityai/stable-diffusion-3.5-large": PublicModel(
        "StableDiffusion3Pipeline",
        {"transformer": _SD35_LARGE, "vae": VAE16},
        {
            "text_encoder": CLIP_L_PROJECTED,
            "text_encoder_2": CLIP_G,
            "text_encoder_3": T5,
            "vae": VAE16_COUNT,
        },
    ),
    "black-forest-labs/FLUX.1-schnell": _flux(guidance=False),
    "black-forest-labs/FLUX.1-Kontext-dev": _flux(guidance=True, pipeline="FluxKontextPipeline"),
    "black-forest-labs/FLUX.2-klein-base-4B": PublicModel(
        "Flux2KleinPipeline",
        {"transformer": _FLUX2_KLEIN_4B, "vae": {"_class_name": "AutoencoderKLFlux2"}},
        {"text_encoder": QWEN3_4B, "vae": _FLUX2_VAE_COUNT},
    ),
    "Qwen/Qwen-Image": _qwen("QwenImagePipeline"),
    "Qwen/Qwen-Image-Edit": _qwen("QwenImageEditPipeline"),
    "Tongyi-MAI/Z-Image": _Z,
    "Tongyi-MAI/Z-Image-Turbo": _Z,
    "stabilityai/stable-diffusion-xl-base-1.0": PublicModel(
        "StableDiffusionXLPipeline",
        {"unet": _UNET_XL, "vae": _VAE4},
        {"text_encoder": CLIP_L, "text_encoder_2": CLIP_G, "vae": _VAE4_COUNT},
    ),
    "stable-diffusion-v1-5/stable-diffusion-v1-5": PublicModel(
        "StableDiffusionPipeline",
        {"unet": _UNET_15, "vae": _VAE4},
        {"text_encoder": CLIP_L, "vae": _VAE4_COUNT},
    ),
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": PublicModel(
        "SanaPipeline",
        {"transformer": _SANA, "vae": _DC},
        {"text_encoder": GEMMA2_2B, "vae": _DC_COUNT},
    ),
}
