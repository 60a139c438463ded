"""Tiny random pipelines, built in code: no file and no download. Width 16 latents, 2 layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
    T5Config,
    T5EncoderModel,
)

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


def clip_config() -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
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


def sd3(shift: float = 3.0) -> StableDiffusion3Pipeline:
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    )
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=vae(),
        text_encoder=CLIPTextModelWithProjection(clip_config()),
        tokenizer=tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(clip_config()),
        tokenizer_2=tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )
    return ready(pipe)


def decoder(length: int = 2048) -> Qwen2Model:
    """Stands for the language models that encode prompts of Lumina and Qwen-Image."""
    return Qwen2Model(
        Qwen2Config(
            vocab_size=len(SPECIAL) + len(WORDS),
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


def flux() -> FluxPipeline:
    """Guidance is embedded, latents are packed, the schedule is shifted by resolution."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    pipe = FluxPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae(),
        text_encoder=CLIPTextModel(clip_config()),
        tokenizer=tokenizer(),
        text_encoder_2=T5EncoderModel(t5_config()),
        tokenizer_2=tokenizer(),
    )
    return ready(pipe)


def lumina2() -> Lumina2Pipeline:
    torch.manual_seed(0)
    transformer = Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(64, 32, 32),
        cap_feat_dim=16,
    )
    pipe = Lumina2Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(),
        text_encoder=decoder(),
        tokenizer=tokenizer(64),
    )
    return ready(pipe)


def qwen_image() -> QwenImagePipeline:
    """Prompts are padded to the longest of a batch; the mask is left out where nothing is."""
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(4, 6, 6),
    )
    coder = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1] * 4,
        latents_std=[1.5] * 4,
    )
    pipe = QwenImagePipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=coder,
        text_encoder=decoder(),
        tokenizer=tokenizer(2048),
    )
    return ready(pipe)


def wan(experts: int = 1) -> WanPipeline:
    """Video; UniPC on flow sigmas with integer timesteps. Two experts: Wan 2.2."""
    torch.manual_seed(0)
    transformers = [
        WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        )
        for _ in range(experts)
    ]
    coder = AutoencoderKLWan(
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
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipe = WanPipeline(
        transformer=transformers[0],
        transformer_2=transformers[1] if experts == 2 else None,
        boundary_ratio=0.8 if experts == 2 else None,
        scheduler=scheduler,
        vae=coder,
        text_encoder=T5EncoderModel(t5_config()),
        tokenizer=tokenizer(),
    )
    return ready(pipe)


SQUARE = {"height": 16, "width": 16, "max_sequence_length": TOKENS}
# name -> (builder, arguments of its call)
FAMILIES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "sd3": (sd3, SQUARE),
    "sd3 with a negative prompt": (sd3, SQUARE | {"negative_prompt": "bad blurry"}),
    "sd3 with skipped layers": (
        sd3,
        SQUARE | {"skip_guidance_layers": [1], "skip_layer_guidance_stop": 0.6},
    ),
    "flux": (flux, SQUARE),
    "lumina2": (lumina2, SQUARE | {"max_sequence_length": 64, "system_prompt": "a photo"}),
    "lumina2 with truncated guidance": (
        lumina2,
        SQUARE | {"max_sequence_length": 64, "cfg_trunc_ratio": 0.5},
    ),
    "qwen": (qwen_image, SQUARE | {"negative_prompt": "bad"}),
    "wan 2.1": (wan, SQUARE | {"num_frames": 5}),
    "wan 2.2": (partial(wan, 2), SQUARE | {"num_frames": 5}),
}
