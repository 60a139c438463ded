"""The parts of the demo's StableDiffusion3Pipeline with random weights, and how it is saved."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import (
    AutoencoderTiny,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from flowrl.demo import world

TextModel = TypeVar("TextModel", CLIPTextModel, CLIPTextModelWithProjection)

WORDS = 10  # tokens per prompt: the longest has eight words, and a start and an end
TEXT_WIDTH = 64  # of each of the two text encoders
HEADS, HEAD_WIDTH, LAYERS = 3, 32, 4


def make_tokenizer(prompts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of words, with start and end around a prompt; the end also pads, as in CLIP."""
    words = sorted({word for prompt in prompts for word in prompt.split()})
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<start>", *words, "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>",
        special_tokens=[(token, vocabulary[token]) for token in ("<start>", "<end>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<start>",
        eos_token="<end>",
        pad_token="<end>",
        model_max_length=WORDS,
    )


def make_text_encoder(
    tokenizer: PreTrainedTokenizerFast, kind: type[TextModel] = CLIPTextModelWithProjection
) -> TextModel:
    return kind(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=WORDS,
            hidden_act="gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_factor=5.0,  # CLIP's embeddings of std 0.02 are too small for a short run
        )
    )


def silence(pipe: StableDiffusion3Pipeline) -> None:
    """Give the pipeline a third encoder whose output is zero, as without one.

    diffusers loads an SD3 folder without a third encoder only with extra arguments; with
    this T5 of a few kilobytes the folder loads without any. Its tokenizer drops all text, and its
    last norm's weight is zero.
    """
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer.normalizer = normalizers.Replace(Regex(r"[\s\S]"), "")
    config = T5Config(
        vocab_size=2,  # its settings name a padding and an end token
        d_model=pipe.transformer.config.joint_attention_dim,
        d_kv=4,
        d_ff=4,
        num_layers=1,
        num_heads=1,
    )
    encoder = T5EncoderModel(config)
    nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    pipe.register_modules(
        text_encoder_3=encoder,
        tokenizer_3=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>"),
    )


def make_transformer() -> SD3Transformer2DModel:
    """The flow starts as v = 0: its last layer and the blocks' modulations are zero."""
    side = world.SIZE // 4  # of the latents
    transformer = SD3Transformer2DModel(
        sample_size=side,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=LAYERS,
        attention_head_dim=HEAD_WIDTH,
        num_attention_heads=HEADS,
        caption_projection_dim=HEADS * HEAD_WIDTH,
        joint_attention_dim=2 * TEXT_WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=side // 2,
    )
    zero = [transformer.proj_out]
    for block in transformer.transformer_blocks:
        zero += [block.norm1.linear, block.norm1_context.linear]
    for linear in zero:
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    return transformer


def make_pipeline() -> StableDiffusion3Pipeline:
    """The whole pipeline with random weights. AutoencoderTiny makes 8 x 8 x 4 latents."""
    tokenizer = make_tokenizer(world.all_prompts())
    pipe = StableDiffusion3Pipeline(
        transformer=make_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=AutoencoderTiny(
            encoder_block_out_channels=(32, 32, 32),
            decoder_block_out_channels=(32, 32, 32),
            num_encoder_blocks=(0, 1, 1),
            num_decoder_blocks=(1, 2, 1),
        ),
        text_encoder=make_text_encoder(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=make_text_encoder(tokenizer),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save(pipe: StableDiffusion3Pipeline, out: Path) -> None:
    """Save diffusers' folder with weights in float16; they load as float32 by default."""
    silence(pipe)
    save_halved(pipe, out)


def save_halved(pipe: Any, out: Path) -> None:
    """Save a pipeline with AutoencoderTiny in float16, in settings that all versions read."""
    pipe.to(torch.float16)
    pipe.save_pretrained(out)
    for file in out.rglob("*.json"):
        # transformers 5 saves its fast tokenizers under a name that transformers 4 does not know
        text = file.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast")
        # transformers loads in the dtype of its settings, diffusers in float32: they must agree
        text = text.replace('"dtype": "float16"', '"dtype": "float32"')
        file.write_text(text)
    # AutoencoderTiny saves an entry that it warns about when it is loaded
    file = out / "vae" / "config.json"
    settings = json.loads(file.read_text())
    del settings["block_out_channels"]
    file.write_text(json.dumps(settings, indent=2) + "\n")
