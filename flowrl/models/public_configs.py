"""Public configurations of the models of `configs/`, for estimates where their files are not here.

Denoisers, decoders and language models have the arguments of their classes, as the repositories'
`config.json` files list them; the counts are of text encoders' weights, made from the public
configurations of their classes on torch's meta device (T5 v1.1 XXL's and UMT5 XXL's encoder, CLIP
ViT-L/14 and ViT-bigG/14, Llama 3 8B and Qwen2.5-VL 7B's text part without their heads, Qwen2.5-VL
7B, Qwen3 4B, Gemma 2 2B, ByT5 small's encoder). Nothing here is read by training.
"""

from collections.abc import Mapping

from flowrl.models.public_image_models import IMAGE_MODELS
from flowrl.models.public_parts import (
    CLIP_G,
    CLIP_L,
    CLIP_L_PROJECTED,
    HUNYUAN_VAE_COUNT,
    LLAMA_8B,
    T5,
    UMT5,
    VAE16,
    VAE16_COUNT,
    WAN_VAE_COUNT,
    PublicModel,
)
from flowrl.models.public_video_models import VIDEO_MODELS

_SD35_MEDIUM = {
    "_class_name": "SD3Transformer2DModel",
    "attention_head_dim": 64,
    "caption_projection_dim": 1536,
    "dual_attention_layers": list(range(13)),
    "in_channels": 16,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 24,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
    "sample_size": 128,
}
_FLUX_DEV = {
    "_class_name": "FluxTransformer2DModel",
    "attention_head_dim": 128,
    "guidance_embeds": True,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 19,
    "num_single_layers": 38,
    "patch_size": 1,
    "pooled_projection_dim": 768,
}
_WAN21_1B = {
    "_class_name": "WanTransformer3DModel",
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "eps": 1e-6,
    "ffn_dim": 8960,
    "freq_dim": 256,
    "in_channels": 16,
    "num_attention_heads": 12,
    "num_layers": 30,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 4096,
}
_HUNYUAN_VIDEO = {
    "_class_name": "HunyuanVideoTransformer3DModel",
    "attention_head_dim": 128,
    "guidance_embeds": True,
    "in_channels": 16,
    "mlp_ratio": 4.0,
    "num_attention_heads": 24,
    "num_layers": 20,
    "num_refiner_layers": 2,
    "num_single_layers": 40,
    "out_channels": 16,
    "patch_size": 2,
    "patch_size_t": 1,
    "pooled_projection_dim": 768,
    "qk_norm": "rms_norm",
    "rope_axes_dim": [16, 56, 56],
    "rope_theta": 256.0,
    "text_embed_dim": 4096,
}


def _qwen25(hidden: int, feed_forward: int, layers: int, heads: int) -> PublicModel:
    config = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    }
    return PublicModel(None, {"model": config}, {})


PUBLIC_MODELS: Mapping[str, PublicModel] = {
    "stabilityai/stable-diffusion-3.5-medium": PublicModel(
        "StableDiffusion3Pipeline",
        {"transformer": _SD35_MEDIUM, "vae": VAE16},
        {
            "text_encoder": CLIP_L_PROJECTED,
            "text_encoder_2": CLIP_G,
            "text_encoder_3": T5,
            "vae": VAE16_COUNT,
        },
    ),
    "black-forest-labs/FLUX.1-dev": PublicModel(
        "FluxPipeline",
        {"transformer": _FLUX_DEV, "vae": VAE16},
        {"text_encoder": CLIP_L, "text_encoder_2": T5, "vae": VAE16_COUNT},
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": PublicModel(
        "WanPipeline",
        {"transformer": _WAN21_1B, "vae": {"_class_name": "AutoencoderKLWan"}},
        {"text_encoder": UMT5, "vae": WAN_VAE_COUNT},
    ),
    "hunyuanvideo-community/HunyuanVideo": PublicModel(
        "HunyuanVideoPipeline",
        {"transformer": _HUNYUAN_VIDEO, "vae": {"_class_name": "AutoencoderKLHunyuanVideo"}},
        {"text_encoder": LLAMA_8B, "text_encoder_2": CLIP_L, "vae": HUNYUAN_VAE_COUNT},
    ),
    "Qwen/Qwen2.5-1.5B": _qwen25(1536, 8960, 28, 12),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen25(1536, 8960, 28, 12),
    "Qwen/Qwen2.5-Math-1.5B": _qwen25(1536, 8960, 28, 12),
    "Qwen/Qwen2.5-3B-Instruct": _qwen25(2048, 11008, 36, 16),
    **IMAGE_MODELS,
    **VIDEO_MODELS,
}
