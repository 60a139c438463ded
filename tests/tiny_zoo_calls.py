"""What single classes of pipelines need beside the tables: settings of parts, and arguments."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import (
    AdaptiveProjectedMixGuidance,
    ClassifierFreeGuidance,
    ControlNetXSAdapter,
    SCMScheduler,
    UNet2DConditionModel,
)
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import (
    StableUnCLIPImageNormalizer,
)
from torch import nn

from tests.tiny_pipelines_edit import Looker, Reader
from tests.tiny_pipelines_parts import decoder, tokenizer
from tests.tiny_zoo import Special, part, stirred
from tests.tiny_zoo_settings import NOISE, UNET, XL
from tests.tiny_zoo_text import Texts

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


class Unworried(nn.Module):
    """Stands for a safety checker that another library brings."""

    device = torch.device("cpu")
    dtype = torch.float32

    def check_text_safety(self, text: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


def unworried(given: Mapping[str, Any]) -> nn.Module:
    return Unworried()


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


SPECIALS: dict[str, Special] = {
    # UNets
    "(StableDiffusionXL|AnimateDiffSDXL).*": Special({"unet": XL}),
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
    "StableDiffusionParadigmsPipeline": Special({"scheduler": NOISE}),
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
    "QwenImage(Edit|Layered).*": Special(
        {
            "processor": lambda given: Looker(tokenizer(2048)),
            "text_encoder": lambda given: Reader(),
        }
    ),
    "HunyuanImage(Refiner)?Pipeline": Special(
        {"guider": lambda given: AdaptiveProjectedMixGuidance()}
    ),
    "HunyuanVideo15.*": Special(
        {
            "guider": lambda given: ClassifierFreeGuidance(),
            "feature_extractor": other("feature_extractor"),
            "image_encoder": other("SiglipVisionModel"),
        }
    ),
    "LongCatImagePipeline": Special(
        {
            "text_processor": nothing,
            "transformer": {"in_channels": 64},
            "vae": {"latent_channels": 16},
        },
        {"enable_prompt_rewrite": False},
    ),
    "Krea2Pipeline": Special({"text_encoder_select_layers": lambda given: (1, 2)}),
    "HunyuanImagePipeline": Special({"vae": {"scaling_factor": 0.5}}),
    "BriaFibo.*": Special({"text_encoder": lambda given: decoder(words=128100)}),
    "Lumina2?Pipeline": Special(call={"max_sequence_length": 64}),
    "Bria(Fibo.*)?Pipeline": Special(call={"max_sequence_length": 16}),
    "Sana.*": Special(
        call={"height": 32, "width": 32, "complex_human_instruction": None, "frames": 5}
    ),
    "Sana(Video|Image).*": Special({"vae": other("AutoencoderKLWan")}),
    "SanaSprint.*": Special(
        {
            "scheduler": lambda given: SCMScheduler(),
            "transformer": {"guidance_embeds": True},
        }
    ),
    "ZImage.*": Special(call={"max_sequence_length": 32}),
    # videos
    "AnimateDiff.*|PIA.*|I2VGen.*|TextToVideoSD.*|VideoToVideoSD.*": Special(
        call={"num_frames": 2}
    ),
    "LattePipeline": Special(call={"video_length": 2, "mask_feature": False}),
    "LTX.*": Special(call={"height": 32, "width": 32, "num_frames": 9}),
    "CogVideoX(ImageToVideo|FunControl)Pipeline|ConsisID.*": Special(
        {"transformer": {"in_channels": 8}}
    ),
    "Hunyuan(Video|Skyreels)(?!15).*": Special(
        {"tokenizer": lambda given: tokenizer(64)},
        {"prompt_template": {"template": "{}", "crop_start": 0}},
    ),
    "HunyuanSkyreels.*": Special({"transformer": {"in_channels": 8}}),
    "Cosmos.*": Special({"safety_checker": unworried}),
    "Cosmos2VideoToWorldPipeline|CosmosVideoToWorldPipeline|Cosmos2_5.*": Special(
        {"transformer": {"in_channels": 5}}
    ),
    "WanImageToVideoPipeline|SkyReelsV2ImageToVideo.*|ChronoEdit.*": Special(
        {
            "transformer": {"in_channels": 10, "image_dim": 16, "added_kv_proj_dim": 24},
        }
    ),
    "LucyEditPipeline": Special({"transformer": {"in_channels": 8}}),
    "MochiPipeline": Special({"scheduler": {"invert_sigmas": True}}, {"num_frames": 7}),
    "AllegroPipeline": Special(
        {"scheduler": NOISE}, {"num_frames": 8}, lambda pipe: pipe.vae.enable_tiling()
    ),
    "EasyAnimate.*": Special(call={"negative_prompt": "bad"}),
    "Kandinsky5.*": Special(
        {"tokenizer": lambda given: Texts(tokenizer(512))},
        after=prefix(prompt_template="{}", prompt_template_encode_start_idx=0),
    ),
    "Kandinsky5I2I.*": Special(after=prefix(resolutions=[(16, 16)])),
    "Kandinsky5I2.*": Special({"transformer": {"visual_cond": True, "in_visual_dim": 4}}),
}
