"""What single classes of pipelines need beside the tables: settings of parts, and arguments."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import (
    AdaptiveProjectedMixGuidance,
    ControlNetXSAdapter,
    SCMScheduler,
    UNet2DConditionModel,
)
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import (
    StableUnCLIPImageNormalizer,
)
from tokenizers import processors
from torch import nn
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_pipelines_edit import Looker, Reader
from tests.support.tiny_pipelines_parts import chat_tokenizer, decoder, tokenizer
from tests.support.zoo.pipelines import Special, part, stirred
from tests.support.zoo.settings import UNET, XL
from tests.support.zoo.text import seeing
from tests.support.zoo.vision import siglip2_processor

SIZES: dict[str, Any] = {
    "height": 16,
    "width": 16,
    "num_frames": 5,
    "max_sequence_length": 16,
    "use_resolution_binning": False,
    "clean_caption": False,
    "strength": 0.75,
}
CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}


def beside(**more: Any) -> Any:
    """A control network that takes its form from the UNet."""
    return lambda given: stirred(
        ControlNetXSAdapter.from_unet(
            given["unet"],
            size_ratio=1,
            learn_time_embedding=True,
            conditioning_embedding_out_channels=(8, 8),
            **more,
        )
    )


def two_layers(**more: Any) -> Any:
    def make(given: Mapping[str, Any]) -> nn.Module:
        torch.manual_seed(0)
        settings = UNET | {"layers_per_block": 2, "use_linear_projection": True, **more}
        return UNet2DConditionModel(**settings)

    return make


def prefix(**settings: Any) -> Any:
    """Fixed in a constructor: templates of chats and how many of their tokens are cut off."""

    def put(pipe: Any) -> None:
        vars(pipe).update(settings)

    return put


def small(count: int) -> Any:
    """A module's own megapixels for conditioning images, made 16 x 16."""

    def put(pipe: Any) -> None:
        sides = (16, 16, None)[:count]
        vars(sys.modules[type(pipe).__module__])["calculate_dimensions"] = lambda area, ratio: sides

    return put


def other(name: str, **settings: Any) -> Any:
    """Another class than the annotation's."""
    return lambda given: part(name, [name], settings)


def nothing(given: Mapping[str, Any]) -> None:
    return None


def marked() -> PreTrainedTokenizerFast:
    """It has words for where pictures are, and begins with none."""
    made = chat_tokenizer(2048)
    made.add_tokens(["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"])
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    return made


def drawn(pipe: Any) -> None:
    """Parameters that come as whatever was in memory."""
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in pipe.transformer.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draws))


def tapped(pipe: Any) -> None:
    """The module's own layers of a large text encoder, made those of a small one."""
    vars(sys.modules[type(pipe).__module__])["QWEN3_VL_ACTIVATION_LAYERS"] = (0, 1)


SPECIALS: dict[str, Special] = {
    # UNets
    "(StableDiffusionXL|AnimateDiffSDXL|TextToVideoZeroSDXL).*": Special({"unet": XL}),
    "StableDiffusionXLControlNet(?!XS).*": Special({"controlnet": XL}),
    "StableDiffusion.*ControlNetXSPipeline": Special(
        {"unet": two_layers(), "controlnet": beside()},
    ),
    "StableDiffusionXLControlNetXSPipeline": Special({"unet": two_layers(**XL)}),
    "StableDiffusion(XL)?(PAG)?InpaintPipeline|StableDiffusion.*ControlNet.*Inpaint.*": Special(
        {"unet": {"in_channels": 9}}
    ),
    "StableDiffusion(XL)?InstructPix2PixPipeline": Special({"unet": {"in_channels": 8}}),
    "StableDiffusion(XL)?AdapterPipeline": Special({"unet": CROSS}),
    "AnimateDiffSparse.*": Special({"unet": CROSS}),
    "StableDiffusionDepth2ImgPipeline": Special({"unet": {"in_channels": 5}}),
    "LatentConsistency.*": Special({"unet": {"time_cond_proj_dim": 8}}),
    "StableDiffusionParadigmsPipeline": Special({"scheduler": other("DDIMParallelScheduler")}),
    "HunyuanImageRefiner.*": Special(
        {
            "transformer": {
                "in_channels": 16,
                "out_channels": 8,
                "patch_size": (1, 1, 1),
                "rope_axes_dim": (2, 2, 4),
            }
        }
    ),
    "ZImageControlNetInpaint.*": Special({"controlnet": {"control_in_dim": 9}}),
    "ZImageOmni.*": Special({"siglip_processor": siglip2_processor}),
    "StableDiffusionGLIGENTextImage.*": Special(
        {
            "processor": lambda given: Looker(tokenizer(77)),
            "unet": {"attention_type": "gated-text-image"},
        },
        {"gligen_phrases": ["a cat"], "gligen_boxes": [[0.1, 0.1, 0.6, 0.7]]},
    ),
    "CycleDiffusion.*": Special(call={"source_prompt": "a blue ball"}),
    "StableDiffusionAttendAndExcite.*": Special(call={"token_indices": [1], "attn_res": (4, 4)}),
    "Kandinsky(Img2Img|Inpaint)?Pipeline": Special(
        {
            "movq": {"norm_type": "group"},
            "unet": {
                "out_channels": 8,
                "addition_embed_type": "text_image",
                "encoder_hid_dim": 16,
                "encoder_hid_dim_type": "text_image_proj",
            },
        },
        {"image_embeds": torch.rand(1, 16), "negative_image_embeds": torch.rand(1, 16)},
    ),
    "KandinskyInpaintPipeline": Special({"unet": {"in_channels": 9}}),
    "StableDiffusionXL.*ControlNetUnion.*": Special(
        {"unet": {"in_channels": 4}}, {"control_mode": [0]}
    ),
    "StableDiffusionModelEditingPipeline": Special({"scheduler": other("DDIMScheduler")}),
    "AltDiffusion.*": Special({"tokenizer": {"length": 77}}),
    "I2VGenXLPipeline": Special(call={"clip_skip": None}),
    "Kandinsky3.*": Special(
        {"movq": {"norm_type": "group"}, "unet": {"layers_per_block": 3}},
        {"height": 64, "width": 64},
    ),
    ".*(InpaintPipelineLegacy|TextToVideoZeroPipeline)": Special({"safety_checker": nothing}),
    "StableUnCLIP.*": Special(
        {
            "image_normalizer": lambda given: StableUnCLIPImageNormalizer(16),
            "unet": {"class_embed_type": "projection", "projection_class_embeddings_input_dim": 32},
            "image_noising_scheduler": other("DDPMScheduler"),
            "prior_scheduler": other("UnCLIPScheduler"),
        }
    ),
    "StableDiffusionGLIGENPipeline": Special(
        {"unet": {"attention_type": "gated"}},
        call={"gligen_phrases": ["a cat"], "gligen_boxes": [[0.1, 0.1, 0.6, 0.7]]},
    ),
    "PIAPipeline": Special({"unet": {"in_channels": 9}}, {"strength": 1.0}),
    # Stable Diffusion 3, FLUX
    "StableDiffusion3InpaintPipeline": Special(
        {
            "transformer": {"in_channels": 33, "out_channels": 16},
            "vae": {"latent_channels": 16},
        }
    ),
    "StableDiffusion3ControlNetInpaintingPipeline": Special(
        {"controlnet": {"extra_conditioning_channels": 1}}
    ),
    "StableDiffusion3(?!.*(PAG|XS)).*": Special({"text_encoder_3": lambda given: None}),
    "StableDiffusion3.*PAG.*": Special({"text_encoder_3": lambda given: None}),
    "FluxControl(Img2Img|Inpaint)?Pipeline": Special(
        {"transformer": {"in_channels": 32, "out_channels": 16}}
    ),
    "FluxFillPipeline": Special({"transformer": {"in_channels": 48, "out_channels": 16}}),
    "FluxKontext.*": Special(call={"max_area": 256, "_auto_resize": False}),
    "Flux2.*": Special(
        call={"max_sequence_length": 32, "text_encoder_out_layers": (0, 1, 2)},
    ),
    # others of images
    "PixArtAlphaPipeline": Special(
        {"scheduler": {"prediction_type": "epsilon", "use_flow_sigmas": False}}
    ),
    "CogView4ControlPipeline": Special({"transformer": {"in_channels": 8}}),
    "QwenImage.*": Special(call={"negative_prompt": "bad"}),
    "QwenImageControlNetInpaintPipeline": Special({"controlnet": {"extra_condition_channels": 4}}),
    "QwenImageEditInpaintPipeline": Special(after=small(3)),
    "QwenImage(EditPlus|Layered)Pipeline": Special(after=small(2)),
    "(QwenImage(Edit|Layered|21)|NucleusMoE|DreamLite|BriaFibo2|JoyImage).*": Special(
        {
            "processor": lambda given: Looker(chat_tokenizer(2048)),
            "text_encoder": lambda given: Reader(),
        }
    ),
    "LongCatImageEdit.*": Special(
        {
            "text_processor": lambda given: Looker(tokenizer(2048)),
            "text_encoder": lambda given: Reader(),
            "transformer": {"in_channels": 64},
            "vae": {"latent_channels": 16},
        },
        after=small(2),
    ),
    "NucleusMoE.*": Special(
        {"transformer": {"capacity_factors": 1.0}},
        {"return_index": -1, "negative_prompt": "bad", "max_sequence_length": 128},
        drawn,
    ),
    "QwenImage21.*": Special(
        {
            "processor": lambda given: Looker(marked()),
            "text_encoder": lambda given: Reader(words=32),
        },
        {"output_resolution": 64, "height": 64, "width": 64},
    ),
    "BriaFibo2Pipeline": Special(
        {"text_encoder": lambda given: Reader(layers=3)},
        after=prefix(text_encoder_out_layers=((0, 1, 2), (1, 2, 3))),
    ),
    "BriaFiboEdit.*": Special({"vae": other("AutoencoderKLWan")}),
    "DreamLite.*": Special({"vae": {"latent_channels": 4}}),
    "Ideogram4.*": Special(
        {"text_encoder": lambda given: seeing()}, {"guidance_schedule": None}, tapped
    ),
    "HunyuanImage(Refiner)?Pipeline": Special(
        {"guider": lambda given: AdaptiveProjectedMixGuidance()}
    ),
    "LongCatImagePipeline": Special(
        {
            "text_processor": nothing,
            "transformer": {"in_channels": 64},
            "vae": {"latent_channels": 16},
        },
        {"enable_prompt_rewrite": False},
    ),
    "Krea2Pipeline": Special(
        {
            "text_encoder_select_layers": lambda given: (1, 2),
            "text_encoder": lambda given: seeing(),
        }
    ),
    "HunyuanImagePipeline": Special({"vae": {"scaling_factor": 0.5}}),
    "BriaFibo(Edit)?Pipeline": Special({"text_encoder": lambda given: decoder(words=128100)}),
    "Lumina2?Pipeline": Special(call={"max_sequence_length": 64}),
    "Bria(Fibo.*)?Pipeline": Special(call={"max_sequence_length": 16}),
    "Sana.*": Special(
        call={"height": 32, "width": 32, "complex_human_instruction": None, "frames": 5}
    ),
    "SanaSprint.*": Special(
        {
            "scheduler": lambda given: SCMScheduler(),
            "transformer": {"guidance_embeds": True},
        },
        {"intermediate_timesteps": None},  # its default is for two steps alone
    ),
    "ZImage.*": Special(call={"max_sequence_length": 32}),
}
