"""Parts that several public models share: decoders, and the numbers of weights of text encoders."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class PublicModel(NamedTuple):
    """`pipeline` is the class, None for a language model, whose configuration is `model`."""

    pipeline: str | None
    configs: Mapping[str, Mapping[str, Any]]
    counts: Mapping[str, int]


VAE16 = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 16,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "sample_size": 1024,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
T5, UMT5, CLIP_L, CLIP_L_PROJECTED = 4_762_310_656, 5_680_910_336, 123_060_480, 123_650_304
CLIP_G, LLAMA_8B = 694_659_840, 7_505_186_816
VAE16_COUNT, WAN_VAE_COUNT, HUNYUAN_VAE_COUNT = 83_819_683, 126_892_531, 246_478_803
QWEN25_VL_7B, QWEN25_VL_7B_TEXT = 8_292_166_656, 7_070_619_136
QWEN3_4B, GEMMA2_2B, BYT5_SMALL = 4_022_468_096, 2_614_341_888, 217_657_472
