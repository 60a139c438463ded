"""Public configurations of video models of `configs/models`: see `flowrl.models.public_configs`.

Wan's are as diffusers' conversion script and the authors' own code have them; the others are the
published sizes, which are the defaults of diffusers' classes but for CogVideoX-5b.
"""

from collections.abc import Mapping
from typing import Any

from flowrl.models.public_parts import (
    BYT5_SMALL,
    QWEN25_VL_7B_TEXT,
    T5,
    UMT5,
    WAN_VAE_COUNT,
    PublicModel,
)


def _wan(heads: int, layers: int, feed_forward: int, channels: int = 16) -> Mapping[str, Any]:
    return {
        "_class_name": "WanTransformer3DModel",
        "attention_head_dim": 128,
        "cross_attn_norm": True,
        "eps": 1e-6,
        "ffn_dim": feed_forward,
        "freq_dim": 256,
        "in_channels": channels,
        "num_attention_heads": heads,
        "num_layers": layers,
        "out_channels": channels,
        "patch_size": [1, 2, 2],
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
        "text_dim": 4096,
    }


_WAN_14B = _wan(40, 40, 13824)
_WAN_VAE = {"_class_name": "AutoencoderKLWan"}
_WAN22_VAE = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 160,
    "decoder_base_dim": 256,
    "in_channels": 12,
    "is_residual": True,
    "latents_mean": [0.0] * 48,  # the published ones change no size
    "latents_std": [1.0] * 48,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "z_dim": 48,
}
_WAN22_VAE_COUNT, _HUNYUAN15_VAE_COUNT = 704_688_668, 1_260_634_115
_LTX_VAE_COUNT, _COG_VAE_COUNT = 419_193_649, 215_583_907
_HUNYUAN_15 = {
    "_class_name": "HunyuanVideo15Transformer3DModel",
    "attention_head_dim": 128,
    "image_embed_dim": 1152,
    "in_channels": 65,
    "mlp_ratio": 4.0,
    "num_attention_heads": 16,
    "num_layers": 54,
    "num_refiner_layers": 2,
    "out_channels": 32,
    "patch_size": 1,
    "patch_size_t": 1,
    "task_type": "t2v",
    "text_embed_2_dim": 1472,
    "text_embed_dim": 3584,
}
_LTX = {
    "_class_name": "LTXVideoTransformer3DModel",
    "attention_head_dim": 64,
    "caption_channels": 4096,
    "cross_attention_dim": 2048,
    "in_channels": 128,
    "num_attention_heads": 32,
    "num_layers": 28,
    "out_channels": 128,
    "patch_size": 1,
    "patch_size_t": 1,
}
_LTX_VAE = {
    "_class_name": "AutoencoderKLLTXVideo",
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}
_COG_5B = {
    "_class_name": "CogVideoXTransformer3DModel",
    "attention_head_dim": 64,
    "in_channels": 16,
    "num_attention_heads": 48,
    "num_layers": 42,
    "out_channels": 16,
    "patch_size": 2,
    "sample_frames": 49,
    "sample_height": 60,
    "sample_width": 90,
    "text_embed_dim": 4096,
    "use_rotary_positional_embeddings": True,
}
VIDEO_MODELS: Mapping[str, PublicModel] = {
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": PublicModel(
        "WanPipeline",
        {"transformer": _WAN_14B, "vae": _WAN_VAE},
        {"text_encoder": UMT5, "vae": WAN_VAE_COUNT},
    ),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": PublicModel(
        "WanPipeline",
        {"transformer": _WAN_14B, "transformer_2": _WAN_14B, "vae": _WAN_VAE},
        {"text_encoder": UMT5, "vae": WAN_VAE_COUNT},
    ),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": PublicModel(
        "WanPipeline",
        {"transformer": _wan(24, 30, 14336, channels=48), "vae": _WAN22_VAE},
        {"text_encoder": UMT5, "vae": _WAN22_VAE_COUNT},
    ),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": PublicModel(
        "HunyuanVideo15Pipeline",
        {"transformer": _HUNYUAN_15, "vae": {"_class_name": "AutoencoderKLHunyuanVideo15"}},
        {
            "text_encoder": QWEN25_VL_7B_TEXT,
            "text_encoder_2": BYT5_SMALL,
            "vae": _HUNYUAN15_VAE_COUNT,
        },
    ),
    "Lightricks/LTX-Video": PublicModel(
        "LTXPipeline",
        {"transformer": _LTX, "vae": _LTX_VAE},
        {"text_encoder": T5, "vae": _LTX_VAE_COUNT},
    ),
    "zai-org/CogVideoX-5b": PublicModel(
        "CogVideoXPipeline",
        {"transformer": _COG_5B, "vae": {"_class_name": "AutoencoderKLCogVideoX"}},
        {"text_encoder": T5, "vae": _COG_VAE_COUNT},
    ),
}
