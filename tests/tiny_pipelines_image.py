"""Tiny random pipelines of images on transformers: width 16 latents, one or two layers."""

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKLFlux2,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    QwenImageEditPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel

from tests.tiny_pipelines_edit import Looker, Reader
from tests.tiny_pipelines_parts import (
    chat_tokenizer,
    clip_config,
    decoder,
    qwen_vae,
    ready,
    t5_config,
    tokenizer,
    vae,
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


def flux(kind: type[FluxPipeline] | type[FluxKontextPipeline] = FluxPipeline) -> FluxPipeline:
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
    pipe = kind(
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


def qwen_transformer() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
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


def qwen_image() -> QwenImagePipeline:
    """Prompts are padded to the longest of a batch; the mask is left out where nothing is."""
    torch.manual_seed(0)
    pipe = QwenImagePipeline(
        transformer=qwen_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=qwen_vae(),
        text_encoder=decoder(),
        tokenizer=tokenizer(2048),
    )
    return ready(pipe)


def qwen_image_edit() -> QwenImageEditPipeline:
    """The image is seen by the language model and, encoded, by the transformer.

    The pipeline's own megapixel for the image is made 16 x 16.
    """
    torch.manual_seed(0)
    vars(pipeline_qwenimage_edit)["calculate_dimensions"] = lambda area, ratio: (16, 16, None)
    pipe = QwenImageEditPipeline(
        transformer=qwen_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=qwen_vae(),
        text_encoder=Reader(),
        tokenizer=tokenizer(2048),
        processor=Looker(tokenizer(2048)),
    )
    return ready(pipe)


def flux2() -> Flux2Pipeline:
    """Packs the latents that it is given; text ids are a part of its encoding."""
    torch.manual_seed(0)
    transformer = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )
    coder = AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )
    pipe = Flux2Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=coder,
        text_encoder=decoder(),
        tokenizer=chat_tokenizer(128),
    )
    pipe.system_message = "a photo"
    return ready(pipe)


def z_image() -> ZImagePipeline:
    """Encodings are lists of tensors, and so are the denoiser's inputs and outputs."""
    torch.manual_seed(0)
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    with torch.no_grad():  # these come as whatever was in memory
        transformer.x_pad_token.normal_()
        transformer.cap_pad_token.normal_()
    pipe = ZImagePipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(),
        text_encoder=decoder(),
        tokenizer=chat_tokenizer(64),
    )
    return ready(pipe)


def sana() -> SanaPipeline:
    """A solver of second order on a flow's levels; linear attention."""
    torch.manual_seed(0)
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=16,
    )
    coder = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
    )
    pipe = SanaPipeline(
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=coder,
        text_encoder=decoder(),
        tokenizer=tokenizer(64),
    )
    return ready(pipe)
