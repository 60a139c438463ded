"""Parts of tiny random pipelines: a tokenizer of a few words, encoders, decoders."""

from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLQwenImage, AutoencoderKLWan
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPTextConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2Model, T5Config

WORDS = (
    "a", "photo", "of", "small", "large", "red", "blue", "green", "yellow", "cube", "ball", "cat",
    "dog", "on", "the", "wide", "table", "left", "right", "one", "two", "three", "bad", "blurry",
)  # fmt: skip
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
TOKENS = 16


def tokenizer(length: int = TOKENS) -> PreTrainedTokenizerFast:
    """Words to numbers: pad 0, begin 1, end 2, unknown 3."""
    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=length, **names)


def ready(pipe: Any) -> Any:
    """As `from_pretrained` gives it: T5 has dropout."""
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            module.eval()
    return pipe


def clip_config(tokens: int = TOKENS) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokens,
        projection_dim=16,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def vae(channels: int = 4) -> AutoencoderKL:
    """Halves the side once."""
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=1.5,
        shift_factor=0.1,
    )


def decoder(length: int = 2048, words: int = len(SPECIAL) + len(WORDS)) -> Qwen2Model:
    """Stands for the language models that encode prompts of Lumina and Qwen-Image."""
    return Qwen2Model(
        Qwen2Config(
            vocab_size=words,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=length,
        )
    )


def t5_config() -> T5Config:
    return T5Config(
        vocab_size=len(SPECIAL) + len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
    )


def qwen_vae() -> AutoencoderKLQwenImage:
    """Halves the side once."""
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1] * 4,
        latents_std=[1.5] * 4,
    )


def wan_vae() -> AutoencoderKLWan:
    """A quarter of the side, half of the frames."""
    return AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        scale_factor_temporal=2,
        scale_factor_spatial=4,
        latents_mean=[0.1] * 4,
        latents_std=[1.5] * 4,
    )


# a chat, its messages behind one another; contents are texts or lists of parts
CHAT = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] + ' ' }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] + ' ' }}{% endfor %}{% endif %}{% endfor %}"
)


def chat_tokenizer(length: int) -> PreTrainedTokenizerFast:
    made = tokenizer(length)
    made.chat_template = CHAT
    return made
