"""Tiny random language models and tokenizers, made without any download."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Fast

LETTERS = "abcdefghij :"
CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def tokenizer(*, pad: bool = True, stop: bool = True, chat: bool = False) -> Fast:
    """A token a letter: 0 pad, 1 the stop token, then `LETTERS`."""
    words = {word: i for i, word in enumerate(("<pad>", "<end>", *LETTERS))}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>"} if pad else {}
    special |= {"eos_token": "<end>"} if stop else {}
    made = Fast(tokenizer_object=inner, **special)
    made.chat_template = CHAT if chat else None
    return made


def llama(
    *,
    stop: bool = True,
    seed: int = 0,
    positions: int = 64,
    width: int = 16,
    tied: bool = False,
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=2 + len(LETTERS), hidden_size=width, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=positions, pad_token_id=0,
        bos_token_id=None, eos_token_id=1 if stop else None, tie_word_embeddings=tied,
    )  # fmt: skip
    return sharpened(LlamaForCausalLM(config))


def gpt2() -> GPT2LMHeadModel:
    """Learned positions and dropout: what padding and training mode could spoil."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=2 + len(LETTERS), n_embd=16, n_layer=2, n_head=2, n_positions=64,
        bos_token_id=None, eos_token_id=1, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3,
    )  # fmt: skip
    return sharpened(GPT2LMHeadModel(config))


def sharpened(model):
    """Random weights of a size that makes some tokens much likelier than others."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model


def write(folder: Path, **settings: bool) -> Path:
    model = llama()
    model.generation_config.repetition_penalty = 1.7  # published settings that must not act
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    tokenizer(**settings).save_pretrained(folder)
    return folder
