"""The parts of the noise-prediction demo's StableDiffusionPipeline with random weights."""

from pathlib import Path

from demo_pipeline import TEXT_WIDTH, make_text_encoder, make_tokenizer
from diffusers import (
    AutoencoderTiny,
    DDIMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from torch import nn
from transformers import CLIPTextModel

from flowrl.demo import world

WIDTHS = (48, 64)  # channels of the two levels, 8 x 8 and 4 x 4 places
HEADS = 4


def make_unet() -> UNet2DConditionModel:
    """A U-Net whose noise prediction starts as 0; words are read at 4 x 4 places."""
    unet = UNet2DConditionModel(
        sample_size=world.SIZE // 4,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=WIDTHS,
        layers_per_block=1,
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=HEADS,  # diffusers reads it as the number of heads, as SD1.5 has it
        norm_num_groups=8,
    )
    nn.init.zeros_(unet.conv_out.weight)
    nn.init.zeros_(unet.conv_out.bias)
    return unet


def make_scheduler() -> DDIMScheduler:
    """The scheduler of SD1.5's own folder: its first level is not pure noise."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        timestep_spacing="leading",
        prediction_type="epsilon",
    )


def make_pipeline(autoencoder: Path) -> StableDiffusionPipeline:
    """The whole pipeline with random weights and the autoencoder of another one."""
    tokenizer = make_tokenizer(world.all_prompts())
    pipe = StableDiffusionPipeline(
        vae=AutoencoderTiny.from_pretrained(autoencoder, subfolder="vae"),
        text_encoder=make_text_encoder(tokenizer, CLIPTextModel),
        tokenizer=tokenizer,
        unet=make_unet(),
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.vae.eval().requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe
