"""Parts of tiny random pipelines: a tokenizer of a few words, encoders, decoders."""

from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLQwenImage, AutoencoderKLWan
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPTextConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2Model, T5Config

from tests.support.tiny_models import model

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
    return model("AutoencoderKL", latent_channels=channels)


def decoder_config(
    length: int = 2048, words: int = len(SPECIAL) + len(WORDS), layers: int = 2
) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=words,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=length,
    )


def decoder(**settings: int) -> Qwen2Model:
    """Stands for the language models that encode prompts of Lumina and Qwen-Image."""
    return Qwen2Model(decoder_config(**settings))


def t5_config() -> T5Config:
    return T5Config(
        vocab_size=len(SPECIAL) + len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
    )


def qwen_vae() -> AutoencoderKLQwenImage:
    """Halves the side once."""
    return model("AutoencoderKLQwenImage")


def wan_vae() -> AutoencoderKLWan:
    """A quarter of the side, half of the frames."""
    return model("AutoencoderKLWan")


# a chat, its messages behind one another; contents are texts or lists of parts
CHAT = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] + ' ' }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] + ' ' }}{% endfor %}{% endif %}{% endfor %}"
)


def chat_tokenizer(length: int) -> PreTrainedTokenizerFast:
    made = tokenizer(length)
    made.chat_template = CHAT
    return made
