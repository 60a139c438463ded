"""Models of published size with random weights, for scripts/benchmarks/real_sizes.py.

Denoisers and the language model have their published configuration. Text encoders have the
published width and one layer, and decoders the published factors of size with few channels, since
neither is trained.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5EncoderModel,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.tiny_models import model  # noqa: E402
from tests.support.tiny_pipelines_parts import SPECIAL, WORDS, clip_config, tokenizer  # noqa: E402
from tests.support.zoo.settings import FLOW  # noqa: E402

SD35 = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 24,
    "attention_head_dim": 64, "num_attention_heads": 24, "joint_attention_dim": 4096,
    "caption_projection_dim": 1536, "pooled_projection_dim": 2048, "out_channels": 16,
    "pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm",
}  # fmt: skip
SDXL = {
    "sample_size": 128, "in_channels": 4, "out_channels": 4, "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280), "transformer_layers_per_block": (1, 2, 10),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (5, 10, 20), "cross_attention_dim": 2048, "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
WAN = {
    "patch_size": (1, 2, 2), "num_attention_heads": 12, "attention_head_dim": 128,
    "in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 8960,
    "num_layers": 30, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6,
}  # fmt: skip
QWEN = {  # Qwen2.5-0.5B
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
DECODER = {  # an eighth of the side
    "block_out_channels": (8, 8, 8, 8), "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "norm_num_groups": 4,
}  # fmt: skip
WAN_DECODER = {  # an eighth of the side, a quarter of the frames
    "dim_mult": [1, 1, 1, 1], "temperal_downsample": [False, True, True], "z_dim": 16,
    "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16,
    "scale_factor_temporal": 4, "scale_factor_spatial": 8,
}  # fmt: skip
TRAINED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
TOKENS = 77


def t5_encoder() -> T5EncoderModel:
    words = len(SPECIAL) + len(WORDS)
    size = {"d_model": 4096, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5EncoderModel(T5Config(vocab_size=words, **size))


def clip_of_width(width: int, heads: int) -> CLIPTextConfig:
    config = clip_config(TOKENS).to_dict()
    config |= {"hidden_size": width, "projection_dim": width, "num_attention_heads": heads}
    return CLIPTextConfig(**config | {"num_hidden_layers": 1})


def numbered(words: int) -> PreTrainedTokenizerFast:
    """A word for each token of the vocabulary: w0 pads, w1 stops."""
    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w1")


def _sd35() -> Any:
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(**SD35),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=model("AutoencoderKL", **DECODER, latent_channels=16),
        text_encoder=CLIPTextModelWithProjection(clip_of_width(768, 12)),
        tokenizer=tokenizer(TOKENS),
        text_encoder_2=CLIPTextModelWithProjection(clip_of_width(1280, 20)),
        tokenizer_2=tokenizer(TOKENS),
        text_encoder_3=t5_encoder(),
        tokenizer_3=tokenizer(TOKENS),
    )


def _sdxl() -> Any:
    return diffusers.StableDiffusionXLPipeline(
        unet=diffusers.UNet2DConditionModel(**SDXL),
        scheduler=diffusers.EulerDiscreteScheduler(**TRAINED, timestep_spacing="leading"),
        vae=model("AutoencoderKL", **DECODER, latent_channels=4),
        text_encoder=CLIPTextModel(clip_of_width(768, 12)),
        tokenizer=tokenizer(TOKENS),
        text_encoder_2=CLIPTextModelWithProjection(clip_of_width(1280, 20)),
        tokenizer_2=tokenizer(TOKENS),
        add_watermarker=False,
    )


def _wan() -> Any:
    return diffusers.WanPipeline(
        transformer=diffusers.WanTransformer3DModel(**WAN),
        scheduler=diffusers.UniPCMultistepScheduler(**FLOW),
        vae=model("AutoencoderKLWan", **WAN_DECODER),
        text_encoder=t5_encoder(),
        tokenizer=tokenizer(TOKENS),
    )


PIPELINES: dict[str, Callable[[], Any]] = {"sd35": _sd35, "sdxl": _sdxl, "wan": _wan}


def save(name: str, seed: int, folder: Path) -> None:
    """Write the model's folder, in bfloat16."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    if name == "text":
        Qwen2ForCausalLM(Qwen2Config(**QWEN)).save_pretrained(folder)
        numbered(QWEN["vocab_size"]).save_pretrained(folder)
    else:
        PIPELINES[name]().save_pretrained(folder)


def has_adapter(name: str, folder: Path, run: Path) -> bool:
    """Whether a plain pipeline, or peft, takes the run's adapter and has weights of it."""
    if name == "text":
        from peft import PeftModel

        base = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        network: Any = PeftModel.from_pretrained(base, run / "adapter")
    else:
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
        pipe.load_lora_weights(run / "adapter")
        network = pipe.unet if name == "sdxl" else pipe.transformer
    return any(
        "lora_B" in name and bool(weight.any()) for name, weight in network.named_parameters()
    )
