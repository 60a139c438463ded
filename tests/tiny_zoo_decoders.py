"""Tiny settings of what encodes and decodes pictures and films: 4 latent channels where it can."""

from tests.tiny_zoo_settings import LTX_VAE, SMALL_VAE, STATISTICS, WAN_VAE, Settings

FOUR = (8, 8, 8, 8)

DECODERS: dict[str, Settings] = {
    "AutoencoderKL": SMALL_VAE | {"scaling_factor": 1.5, "shift_factor": 0.1},
    "AutoencoderKLFlux2": SMALL_VAE | {"latent_channels": 4},
    "VQModel": SMALL_VAE
    | {"latent_channels": 4, "vq_embed_dim": 4, "num_vq_embeddings": 12, "norm_type": "spatial"},
    "AutoencoderKLQwenImage": {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False],
        **STATISTICS,
    },
    "AutoencoderKLWan": WAN_VAE,
    "AutoencoderKLLTXVideo": LTX_VAE,
    "AutoencoderKLCogVideoX": {
        "latent_channels": 4,
        "block_out_channels": FOUR,
        "layers_per_block": 1,
        "norm_num_groups": 2,
    },
    "AutoencoderKLHunyuanVideo": {
        "latent_channels": 4,
        "block_out_channels": FOUR,
        "layers_per_block": 1,
        "norm_num_groups": 4,
    },
    "AutoencoderKLHunyuanVideo15": {
        "latent_channels": 4,
        "block_out_channels": (8, 8),
        "layers_per_block": 1,
        "spatial_compression_ratio": 2,
        "temporal_compression_ratio": 1,
    },
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 4,
        "block_out_channels": (32, 32),
        "layers_per_block": 1,
        "spatial_compression_ratio": 2,
        "sample_size": 16,
    },
    "AutoencoderKLAllegro": {
        "block_out_channels": FOUR,
        "layers_per_block": 1,
        "norm_num_groups": 2,
    },
    "AutoencoderKLMochi": {
        "encoder_block_out_channels": (32,) * 4,
        "decoder_block_out_channels": (32,) * 4,
        "layers_per_block": (1,) * 5,
    },
    "AutoencoderKLCosmos": {
        "latent_channels": 4,
        "encoder_block_out_channels": FOUR,
        "decode_block_out_channels": FOUR,
        "attention_resolutions": (8,),
        "resolution": 64,
        "spatial_compression_ratio": 4,
        "temporal_compression_ratio": 4,
    },
    "AutoencoderKLMagvit": {
        "latent_channels": 4,
        "block_out_channels": FOUR,
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "spatial_group_norm": False,
    },
    "AutoencoderDC": {
        "latent_channels": 4,
        "attention_head_dim": 2,
        "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "encoder_layers_per_block": (1, 1),
        "decoder_layers_per_block": (1, 1),
        "encoder_qkv_multiscales": ((), (5,)),
        "decoder_qkv_multiscales": ((), (5,)),
    },
    "AutoencoderTiny": {
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
    },
}
