"""The parts of the editing demo's FluxKontextPipeline with random weights, and how it is saved."""

from pathlib import Path

from demo_pipeline import make_text_encoder
from demo_pipeline import make_tokenizer as make_clip_tokenizer
from diffusers import (
    AutoencoderTiny,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxTransformer2DModel,
)
from torch import nn
from transformers import CLIPTextModel, T5Config, T5EncoderModel
from video_pipeline import make_tokenizer as make_t5_tokenizer

from flowrl.demo import edit_world

WORDS = 8  # tokens per instruction: the longest has seven words, and an end
TEXT_WIDTH = 64
HEADS, HEAD_WIDTH = 3, 32
DOUBLE_BLOCKS, SINGLE_BLOCKS = 2, 2


def make_t5(vocabulary: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=vocabulary,
            d_model=TEXT_WIDTH,
            d_kv=16,
            d_ff=2 * TEXT_WIDTH,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=16,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def make_transformer() -> FluxTransformer2DModel:
    """The flow starts as v = 0: its last layer and the blocks' modulations are zero."""
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=DOUBLE_BLOCKS,
        num_single_layers=SINGLE_BLOCKS,
        attention_head_dim=HEAD_WIDTH,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    zero = [transformer.proj_out]
    for block in transformer.transformer_blocks:
        zero += [block.norm1.linear, block.norm1_context.linear]
    zero += [block.norm.linear for block in transformer.single_transformer_blocks]
    for linear in zero:
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    return transformer


def make_pipeline(autoencoder: Path) -> FluxKontextPipeline:
    """The whole pipeline with random weights and the autoencoder of another one."""
    instructions = edit_world.all_instructions()
    clip_tokenizer = make_clip_tokenizer(instructions)
    t5_tokenizer = make_t5_tokenizer(instructions, WORDS)
    clip = make_text_encoder(clip_tokenizer, CLIPTextModel)
    pipe = FluxKontextPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=AutoencoderTiny.from_pretrained(autoencoder, subfolder="vae"),
        text_encoder=clip,
        tokenizer=clip_tokenizer,
        text_encoder_2=make_t5(len(t5_tokenizer)),
        tokenizer_2=t5_tokenizer,
        transformer=make_transformer(),
    )
    pipe.vae.eval().requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe
