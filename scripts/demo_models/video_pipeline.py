"""The parts of the video demo's WanPipeline with random weights, and how it is saved."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from flowrl.demo import moving_world

WORDS = 12  # tokens per prompt: the longest has eleven words, and an end
TEXT_WIDTH = 64
NEARNESS = 4.0  # initial bias of the attention's logit at the distance that a head prefers
HEADS, HEAD_WIDTH, LAYERS = 4, 24, 5
CHANNELS = 8  # of a latent; 3 x 4 x 4 of them make a video
JITTER = 0.1  # noise of the latents that the decoder is trained on, and the posterior's std


def make_tokenizer(prompts: Sequence[str], most: int) -> PreTrainedTokenizerFast:
    """A tokenizer of words, with an end after a prompt, as T5 has it; at most `most` tokens."""
    words = sorted({word for prompt in prompts for word in prompt.split()})
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=most,
    )


def make_text_encoder(tokenizer: PreTrainedTokenizerFast) -> UMT5EncoderModel:
    """An encoder whose initial attention prefers nearby words, so that a motion has its object.

    In each layer three heads prefer the word one, two and three places before. So the code of
    "right" contains its shape and its colour from the start. With T5's own initial values, which
    prefer no position, a short training does not learn this: it confuses "a red circle moving right
    and a blue square moving left" with the prompt that has the two motions swapped.
    """
    encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer),
            d_model=TEXT_WIDTH,
            d_kv=16,
            d_ff=2 * TEXT_WIDTH,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=16,
            dropout_rate=0.0,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    for block in encoder.encoder.block:
        bias = block.layer[0].SelfAttention.relative_attention_bias.weight
        with torch.no_grad():
            for head, back in enumerate((1, 2, 3)):  # T5 numbers distances back from 0
                bias[back, head] += NEARNESS
    return encoder


def make_transformer() -> WanTransformer3DModel:
    """The flow starts as v = 0: its last layer is zero, and so are the modulations."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=64,
        ffn_dim=3 * HEADS * HEAD_WIDTH,
        num_layers=LAYERS,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    for linear in (transformer.proj_out, transformer.condition_embedder.time_proj):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    return transformer


def make_autoencoder() -> AutoencoderKLWan:
    """Patches of 2 x 2 pixels, then a quarter of the sides and half of the later frames.

    Its posterior's spread is JITTER everywhere: nothing trains it, and the decoder knows it.
    """
    vae = AutoencoderKLWan(
        base_dim=32,
        z_dim=CHANNELS,
        dim_mult=[1, 1, 1],
        num_res_blocks=0,
        temperal_downsample=[True, False],
        is_residual=True,
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=2,
        scale_factor_spatial=8,
    )
    with torch.no_grad():
        vae.quant_conv.weight[CHANNELS:] = 0
        vae.quant_conv.bias[CHANNELS:] = 2 * math.log(JITTER)
    return vae


def make_pipeline() -> WanPipeline:
    """The whole pipeline with random weights."""
    tokenizer = make_tokenizer(moving_world.all_moving_prompts(), WORDS)
    pipe = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=make_text_encoder(tokenizer),
        vae=make_autoencoder(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        transformer=make_transformer(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save(pipe: WanPipeline, out: Path) -> None:
    """Save diffusers' folder with weights in float16; they load as float32 by default."""
    for module in (pipe.transformer, pipe.vae, pipe.text_encoder):
        for parameter in module.parameters():  # their own `to` keeps some in float32
            parameter.data = parameter.data.half()
    pipe.save_pretrained(out)
    for file in out.rglob("*.json"):
        # transformers 5 saves its fast tokenizers under a name that transformers 4 does not know
        text = file.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast")
        # transformers loads in the dtype of its settings, diffusers in float32: they must agree
        text = text.replace('"dtype": "float16"', '"dtype": "float32"')
        file.write_text(text)
