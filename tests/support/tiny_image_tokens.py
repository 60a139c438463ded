"""Tiny random Janus and Emu3 models with processors, made without any download."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    Emu3Config,
    Emu3ForConditionalGeneration,
    Emu3ImageProcessor,
    Emu3Processor,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

from tests.support.tiny_lm import LETTERS, sharpened

PAD, END, BOS, IMAGE, BOI, EOI = range(6)
MARKS = ("<pad>", "<end>", "<bos>", "<image>", "<boi>", "<eoi>")
CODES = 12  # entries of the codebook of both
CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}:{% for p in m['content'] %}{{ p['text'] }}"
    "{% endfor %} {% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
EMU3_MARKS = (
    "<|extra_200|>", "<|extra_201|>", "<|image token|>", *"0123456789*",
    *(f"<|visual token {code:06d}|>" for code in range(CODES)),
)  # fmt: skip


def words(more: tuple[str, ...] = (), begin: bool = True, **special: str) -> Any:
    """A token a letter, with marks of images. `begin`: texts get <bos> before them."""
    every = {word: i for i, word in enumerate((*MARKS, *LETTERS, *more))}
    inner = Tokenizer(models.WordLevel(every, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    if begin:
        inner.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    marks = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>", **special}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", bos_token="<bos>",
        extra_special_tokens=marks,
    )  # fmt: skip


def text_config(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 96, "pad_token_id": PAD, "bos_token_id": BOS,
        "eos_token_id": END, "attention_dropout": 0.0,
    }  # fmt: skip


def janus(seed: int = 0, side: int = 3) -> JanusForConditionalGeneration:
    """Images of `side` x `side` codes, twice as many pixels each way."""
    torch.manual_seed(seed)
    config = JanusConfig(
        text_config={"model_type": "llama", **text_config(len(MARKS) + len(LETTERS))},
        vision_config={
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 4 * side, "patch_size": 4, "projection_dim": 16, "mlp_ratio": 2.0,
            "num_image_tokens": side**2,
        },
        vq_config={
            "embed_dim": 4, "num_embeddings": CODES, "latent_channels": 32, "base_channels": 32,
            "channel_multiplier": [1, 1], "num_res_blocks": 1, "projection_dim": 16,
            "image_token_embed_dim": 16,
        },
        image_token_id=IMAGE, tie_word_embeddings=False,
    )  # fmt: skip
    made: Any = JanusForConditionalGeneration(config)
    sharpened(made.model.language_model)
    sharpened(made.model.generation_head)
    settings = made.generation_config
    settings._from_model_config = False  # as published models: other names stay in their file
    settings.guidance_scale = 3.0
    settings.pad_token_id, settings.bos_token_id = PAD, BOS
    settings.generation_kwargs = {"boi_token_id": BOI}
    return made


def janus_processor(chat: bool = True) -> JanusProcessor:
    return JanusProcessor(
        image_processor=JanusImageProcessorPil(size={"height": 12, "width": 12}),
        tokenizer=words(),
        chat_template=CHAT if chat else None,
        num_image_tokens=9,
    )


def emu3(seed: int = 0) -> Emu3ForConditionalGeneration:
    torch.manual_seed(seed)
    tokens = words(EMU3_MARKS, False).get_vocab()
    config = Emu3Config(
        text_config=text_config(len(tokens)),
        vq_config={
            "codebook_size": CODES, "embed_dim": 4, "latent_channels": 4, "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [3],
            "hidden_size": 32, "temporal_downsample_factor": 2,
        },
        vocabulary_map=tokens,
    )  # fmt: skip
    made: Any = Emu3ForConditionalGeneration(config)
    sharpened(made.model.text_model)
    sharpened(made.lm_head)
    return made


def emu3_processor() -> Emu3Processor:
    made = words(
        EMU3_MARKS, False, image_wrapper_token="<|image token|>", eof_token="<|extra_201|>"
    )
    return Emu3Processor(Emu3ImageProcessor(), made)


def write(folder: Path, kind: str = "janus", **settings: bool) -> Path:
    """A model with its processor, as published models are."""
    if kind == "janus":
        janus().save_pretrained(folder)
        janus_processor(**settings).save_pretrained(folder)
    else:
        emu3().save_pretrained(folder)
        emu3_processor().save_pretrained(folder)
    return folder
