"""Tiny random modular pipelines: those with a classic form are made of its parts."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlavaProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    T5EncoderModel,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from flowrl.models.diffusers.modular.face import arguments_of
from tests.support.tiny_models import model
from tests.support.tiny_pipelines import NAMED
from tests.support.tiny_pipelines_parts import (
    SPECIAL,
    WORDS,
    chat_tokenizer,
    decoder,
    decoder_config,
    qwen_vae,
    t5_config,
    tokenizer,
    wan_vae,
)
from tests.support.zoo.calls import SIZES
from tests.support.zoo.calls_videos import VIDEO_SPECIALS, resized
from tests.support.zoo.pipelines import tiny

# modular class by the name of its classic family
TWINS = {
    "SD3": "StableDiffusion3ModularPipeline",
    "SDXL": "StableDiffusionXLModularPipeline",
    "FLUX.1": "FluxModularPipeline",
    "FLUX.2": "Flux2ModularPipeline",
    "Qwen-Image": "QwenImageModularPipeline",
    "Z-Image": "ZImageModularPipeline",
    "Wan 2.1": "WanModularPipeline",
    "Wan 2.2": "Wan22ModularPipeline",
    "LTX-Video": "LTXModularPipeline",
}


def processor(length: int = 80) -> LlavaProcessor:
    """Stands for Qwen3-VL's processor: a tokenizer and its chat template."""
    words = chat_tokenizer(length)
    words.add_tokens(["<image>"], special_tokens=True)  # else unknown words would be images
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"height": 8, "width": 8}),
        tokenizer=words,
        patch_size=4,
        chat_template=words.chat_template,
    )


def modular(kind: str, parts: dict[str, Any]) -> Any:
    """A modular pipeline of these parts, those that its blocks expect."""
    torch.manual_seed(0)
    pipe = getattr(diffusers, kind)()
    expected = {spec.name for spec in pipe.blocks.expected_components}
    settings = {spec.name for spec in pipe.blocks.expected_configs}
    given = {n: part for n, part in parts.items() if n in expected | settings and part is not None}
    pipe.update_components(**given)
    return pipe


def twin(name: str) -> Any:
    """The modular form of a tiny classic pipeline, with its parts."""
    classic = NAMED[name].build()
    config = {n: v for n, v in classic.config.items() if n in ("boundary_ratio",)}
    return modular(TWINS[name], {**classic.components, **config})


def anima() -> Any:
    """Two tokenizers, a conditioner between the text encoder and the transformer, guided."""
    torch.manual_seed(0)
    parts = {
        "text_encoder": decoder(),
        "tokenizer": tokenizer(64),
        "t5_tokenizer": tokenizer(64),
        "text_conditioner": diffusers.AnimaTextConditioner(
            source_dim=16,
            target_dim=16,
            model_dim=16,
            num_layers=1,
            num_attention_heads=2,
            target_vocab_size=len(SPECIAL) + len(WORDS),
            min_sequence_length=8,
        ),
        "transformer": model(
            "CosmosTransformer3DModel",
            in_channels=4,
            out_channels=4,
            text_embed_dim=16,
            concat_padding_mask=True,
            extra_pos_embed_type=None,
        ),
        "vae": qwen_vae(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    pipe = modular("AnimaModularPipeline", parts)
    resized(pipe)
    return pipe


def flux3() -> Any:
    """One prompt a call; the language model's layers are stacked; guided."""
    torch.manual_seed(0)
    parts = {
        "text_encoder": decoder(),
        "tokenizer": processor(),
        "transformer": diffusers.Flux3Transformer2DModel(
            in_channels=16,
            cond_in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            timestep_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
        ),
        "vae": model("AutoencoderKLFlux2"),
    }
    return modular("Flux3ModularPipeline", parts)


def ltx25() -> Any:
    """A video and its sound, two guiders, a decoder that is a diffusion model."""
    torch.manual_seed(0)
    built = tiny(diffusers.LTX2Pipeline, VIDEO_SPECIALS, SIZES).pipe
    parts = {**built.components}
    coder = built.vae
    parts["diffusion_decoder"] = diffusers.LTX2VideoDiffusionDecoderModel(
        latent_channels=coder.config.latent_channels,
        patch_size=coder.config.patch_size,
        decoder_head_dim=8,
        decoder_stage_channels=(8, 8, 8),
        decoder_stage_depths=(1, 1, 1),
        decoder_stage_kernels=((1, 1, 1), (1, 1, 1)),
        decoder_upsample_strides=((1, 2, 2), (2, 1, 1)),
        decoder_upsample_channel_reductions=(1, 1),
        decoder_stage5_kernel=(1, 1, 1),
        decoder_t_emb_dim=8,
        spatial_compression_ratio=coder.spatial_compression_ratio,
        temporal_compression_ratio=coder.temporal_compression_ratio,
    )
    return modular("LTX25ModularPipeline", parts)


def seeing(kind: type = Qwen3VLModel, layers: int = 36) -> Any:
    """Qwen3-VL, of whose layers blocks read some by number (the 36th last)."""
    text = {"head_dim": 8, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
    return kind(
        Qwen3VLConfig(
            text_config=decoder_config(layers=layers).to_dict() | text,
            vision_config=vision | {"intermediate_size": 16, "deepstack_visual_indexes": []},
        )
    )


def krea2(turbo: bool = False) -> Any:
    """Reads twelve layers of its language model; that of few steps has no guidance."""
    torch.manual_seed(0)
    parts = {
        "text_encoder": seeing(),
        "tokenizer": chat_tokenizer(2048),
        "transformer": model("Krea2Transformer2DModel", num_text_layers=12),
        "vae": qwen_vae(),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    }
    return modular(f"Krea2{'Turbo' * turbo}ModularPipeline", parts)


def ideogram4() -> Any:
    """A scale for each step, and a network of its own without the prompt."""
    torch.manual_seed(0)
    networks = [model("Ideogram4Transformer2DModel", llm_features_dim=13 * 16) for _ in range(2)]
    parts = {
        "text_encoder": seeing(),
        "tokenizer": chat_tokenizer(2048),
        "transformer": networks[0],
        "unconditional_transformer": networks[1],
        "vae": model("AutoencoderKLFlux2"),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }
    return modular("Ideogram4ModularPipeline", parts)


def qwen_image21(turbo: bool = False) -> Any:
    """Latents that are not packed, and a VAE of four colours; that of few steps has no guidance."""
    torch.manual_seed(0)
    parts = {
        "text_encoder": seeing(Qwen3VLForConditionalGeneration, 2),
        "processor": processor(),
        "transformer": diffusers.QwenImage21Transformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
        "vae": diffusers.AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=4,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    }
    return modular(f"QwenImage21{'Turbo' * turbo}ModularPipeline", parts)


def cosmos3() -> Any:
    """The tokens of one prompt are in its network; without a safety checker and sound."""
    torch.manual_seed(0)
    vae = wan_vae()
    channels = vae.config["z_dim"]
    parts = {
        "text_tokenizer": chat_tokenizer(512),
        "transformer": diffusers.Cosmos3OmniTransformer(
            head_dim=16,
            hidden_size=32,
            intermediate_size=32,
            latent_channel=channels,
            latent_patch_size=2,
            num_attention_heads=2,
            num_hidden_layers=1,
            num_key_value_heads=1,
            patch_latent_dim=4 * channels,
            vocab_size=200,
            rope_axes_dim=(4, 2, 2),
        ),
        "vae": vae,
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        ),
        "enable_safety_checker": False,
        "default_use_system_prompt": False,
    }
    return modular("Cosmos3OmniModularPipeline", parts)


def cosmos3_distilled() -> Any:
    """Four levels that its index lists, and steps that draw fresh noise."""
    parts = {**cosmos3().components}
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    settings: dict[str, Any] = {"enable_safety_checker": False}
    settings |= {"default_use_system_prompt": False, "distilled_sigmas": [1.0, 0.9, 0.75, 0.5]}
    return modular("Cosmos3DistilledModularPipeline", parts | settings)


def echo() -> Any:
    """LTX-2's parts in a loop without a scheduler, which puts fresh noise on clean predictions."""
    torch.manual_seed(0)
    built = tiny(diffusers.LTX2Pipeline, VIDEO_SPECIALS, SIZES).pipe
    return modular("EchoModularPipeline", {**built.components})


def minimax_h3() -> Any:
    """A video and its sound at levels of their own, as the tokens of one row; one prompt a call. No
    video is shorter than 124 frames."""
    torch.manual_seed(0)
    coder = diffusers.AutoencoderKLMiniMaxH3(
        latent_channels=4,
        block_out_channels=(4, 4, 4),
        layers_per_block=1,
        spatial_downsample_factors=(2, 2, 1),
        temporal_downsample_factors=(2, 2, 1),
        norm_num_groups=2,
        decoder_num_layers=1,
        decoder_num_attention_heads=1,
        decoder_attention_head_dim=16,
        decoder_ffn_mult=1,
        latents_mean=[0.1] * 4,
        latents_std=[0.9] * 4,
    )
    sound = diffusers.AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4,
        encoder_rates=(2, 2),
        latent_dim=16,
        latent_channels=4,
        num_attention_heads=2,
        decoder_dim=8,
        decoder_rates=(2, 2),
        decoder_kernel_sizes=(4, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1,),),
        sampling_rate=160,
        latents_mean=[0.2] * 4,
        latents_std=[1.1] * 4,
    )
    parts = {
        "text_encoder": seeing(Qwen3VLForConditionalGeneration, 51),
        "tokenizer": chat_tokenizer(512),
        "processor": processor(512),
        "transformer": diffusers.MiniMaxH3Transformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            hidden_size=16,
            num_layers=1,
            num_refiner_layers=1,
            ffn_dim=16,
            in_channels=4,
            audio_in_channels=4,
            text_dim=16,
            freq_dim=16,
            time_embed_hidden_dim=16,
            time_embed_dim=16,
            rope_freq_dim=2,
        ),
        "vae": coder,
        "audio_vae": sound,
        "scheduler": diffusers.MiniMaxH3Scheduler(shift=12.0),
        "audio_scheduler": diffusers.MiniMaxH3Scheduler(shift=3.0),
    }
    return modular("MiniMaxH3ModularPipeline", parts)


def wan_animate(distilled: bool = False) -> Any:
    """A character and a video that drives it, segment after segment; one prompt a call. Eighths of
    the side and quarters of the frames, which its network takes for granted, as it does CLIP's
    1280 features."""
    torch.manual_seed(0)
    parts = {
        "text_encoder": T5EncoderModel(t5_config()),
        "tokenizer": tokenizer(16),
        "image_encoder": CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=1280,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=224,
                patch_size=112,
            )
        ),
        "transformer": diffusers.WanAnimate2Transformer3DModel(
            text_len=16,
            in_dim=12,
            dim=32,
            ffn_dim=32,
            freq_dim=16,
            text_dim=t5_config().d_model,
            out_dim=4,
            num_heads=2,
            num_layers=1,
        ),
        "vae": diffusers.AutoencoderKLWan(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1] * 4,
            latents_std=[0.9] * 4,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
    }
    return modular(f"WanAnimate2{'Distilled' * distilled}ModularPipeline", parts)


# those without a classic form, with the arguments of their calls
MODULAR: dict[str, Callable[[], Any]] = {
    "anima": anima,
    "flux3": flux3,
    "ltx25": ltx25,
    "krea2": krea2,
    "krea2_turbo": partial(krea2, turbo=True),
    "ideogram4": ideogram4,
    "qwen_image21": qwen_image21,
    "qwen_image21_turbo": partial(qwen_image21, turbo=True),
    "cosmos3": cosmos3,
    "minimax_h3": minimax_h3,
    "cosmos3_distilled": cosmos3_distilled,
    "echo": echo,
    "wan_animate": wan_animate,
    "wan_animate_distilled": partial(wan_animate, distilled=True),
}
SMALL = {"height": 32, "width": 32}
MODULAR_CALLS: dict[str, dict[str, Any]] = {
    "anima": {"height": 16, "width": 16, "max_sequence_length": 16},
    "flux3": {
        "height": 16,
        "width": 16,
        "max_sequence_length": 80,
        "text_encoder_out_layers": (0, 1),
    },
    "ltx25": {
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "max_sequence_length": 16,
        "frame_rate": 25.0,
    },
    "krea2": {**SMALL, "max_sequence_length": 32},
    "krea2_turbo": {**SMALL, "max_sequence_length": 32},
    "ideogram4": {**SMALL, "max_sequence_length": 32},
    "qwen_image21": SMALL,
    "qwen_image21_turbo": SMALL,
    "cosmos3": {**SMALL, "num_frames": 5, "fps": 24.0},
    "minimax_h3": {"height": 8, "width": 8, "num_frames": 124},
    "cosmos3_distilled": {**SMALL, "num_frames": 5, "fps": 24.0},
    "echo": {
        "height": 64,
        "width": 64,
        "num_frames": 9,
        "max_sequence_length": 16,
        "frame_rate": 25.0,
    },
    "wan_animate": {**SMALL, "max_sequence_length": 16, "segment_frame_length": 5},
    "wan_animate_distilled": {**SMALL, "max_sequence_length": 16, "segment_frame_length": 5},
}

# classic form of the modular classes that are made of its parts
SIBLINGS = {
    "StableDiffusion3ModularPipeline": "StableDiffusion3Pipeline",
    "StableDiffusionXLModularPipeline": "StableDiffusionXLPipeline",
    "FluxModularPipeline": "FluxPipeline",
    "FluxKontextModularPipeline": "FluxKontextPipeline",
    "Flux2ModularPipeline": "Flux2Pipeline",
    "Flux2KleinModularPipeline": "Flux2KleinPipeline",
    "Flux2KleinBaseModularPipeline": "Flux2KleinPipeline",
    "QwenImageModularPipeline": "QwenImagePipeline",
    "QwenImageEditModularPipeline": "QwenImageEditPipeline",
    "QwenImageEditPlusModularPipeline": "QwenImageEditPlusPipeline",
    "QwenImageLayeredModularPipeline": "QwenImageLayeredPipeline",
    "ZImageModularPipeline": "ZImagePipeline",
    "WanModularPipeline": "WanPipeline",
    "Wan22ModularPipeline": "WanPipeline",
    "WanImage2VideoModularPipeline": "WanImageToVideoPipeline",
    "Wan22Image2VideoModularPipeline": "WanImageToVideoPipeline",
    "Wan22VaceModularPipeline": "WanVACEPipeline",
    "LTXModularPipeline": "LTXPipeline",
    "LTX2ModularPipeline": "LTX2Pipeline",
    "HunyuanVideo15ModularPipeline": "HunyuanVideo15Pipeline",
    "ErnieImageModularPipeline": "ErnieImagePipeline",
    "HeliosModularPipeline": "HeliosPipeline",
}


def shorter(pipe: Any) -> Any:
    """HunyuanVideo 1.5 pads to 1000 tokens of text and 729 of an image, which take minutes here."""
    short = {"tokenizer_max_length": 32, "tokenizer_2_max_length": 32}
    short |= {"vision_num_semantic_tokens": 4}
    kind = type(pipe)
    if kind.__name__.startswith("HunyuanVideo15"):
        pipe.__class__ = type(kind.__name__, (kind,), {**short, "__module__": kind.__module__})
    return pipe


def of_classic(kind: str, pipe: Any, call: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A modular pipeline of a classic one's parts, and those arguments that it takes."""
    parts = {**pipe.components}
    if kind.startswith("Wan22"):
        parts |= {"transformer_2": copy.deepcopy(pipe.transformer), "boundary_ratio": 0.8}
    made = shorter(modular(kind, parts))
    takes = arguments_of(made.blocks)
    given = {name: value for name, value in call.items() if name in takes}
    more = {"num_frames": 9} if "Helios" in kind else {}  # two chunks
    return made, given | more | ({"negative_prompt": "bad"} if "StableDiffusion3" in kind else {})


def flux3_distilled() -> Any:
    """FLUX.3 with a flow map: the network knows the time that a step jumps to."""
    base = flux3()
    transformer = diffusers.Flux3Transformer2DModel.from_config(
        base.transformer.config, flow_map=True
    )
    return modular("Flux3DistilledModularPipeline", {**base.components, "transformer": transformer})


MODULAR["flux3_distilled"] = flux3_distilled
MODULAR_CALLS["flux3_distilled"] = MODULAR_CALLS["flux3"]
