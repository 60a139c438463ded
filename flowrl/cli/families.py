"""The configuration of flowrl's that serves a pipeline, by the class and settings of its index.

A checkpoint that no configuration names has the settings of its family: FLUX.1-Krea-dev those of
FLUX.1-dev, Qwen-Image-Edit-2509 those of Qwen-Image-Edit. An index does not say with which guidance
and steps a checkpoint was made to be used: these are its card's, and named as guesses.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers

from flowrl.models.diffusers.call.inputs.columns import images
from flowrl.models.diffusers.call.traits.verdicts import swept_verdicts
from flowrl.models.model_index import ModelIndex

SectionTree = Mapping[str, Any]
FEW = 8  # steps of a pipeline that is distilled to few
# pipelines that also make images from texts alone, but are published for edits of an image
EDITORS = ("FluxKontextPipeline", "JoyImageEditPipeline", "BriaFiboEditPipeline")
LARGEST_SIDE = 2048  # pixels of a side that a configuration gives


@dataclass(frozen=True)
class Family:
    """Pipelines that one configuration serves.

    classes  names of their classes
    base     the configuration, without its folder and ending
    when     whether an index of these classes is of this family
    sizes    settings of `model` that an index of this family gives
    changes  sections of the run that differ from the base's, by section
    why      source of the changes
    images   columns of images, where an index needs others than its class
    """

    classes: tuple[str, ...]
    base: str
    when: Callable[[ModelIndex], bool] = lambda _: True
    sizes: Callable[[ModelIndex], SectionTree] = lambda _: {}
    changes: Mapping[str, SectionTree] = field(default_factory=dict)
    why: str = ""
    images: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return f"configs/{self.base if '/' in self.base else f'models/{self.base}'}.yaml"


def _says(name: str, value: Any = True) -> Callable[[ModelIndex], bool]:
    """Whether the index has a setting."""
    return lambda index: index.values.get(name) == value


def _denoiser(name: str, value: Any = True) -> Callable[[ModelIndex], bool]:
    """Whether the denoiser has a setting."""
    return lambda index: index.denoiser.get(name) == value


def _at_least(name: str, least: int) -> Callable[[ModelIndex], bool]:
    return lambda index: int(index.denoiser.get(name, 0)) >= least


def _two_experts(index: ModelIndex) -> bool:
    return "transformer_2" in index.configs


def _first_and_last(index: ModelIndex) -> bool:
    """Whether the denoiser has positions for the embeddings of two images."""
    return index.denoiser.get("pos_embed_seq_len") is not None


def _turbo(index: ModelIndex) -> bool:
    """Whether the scheduler is that of SD-Turbo and SDXL-Turbo (arXiv:2311.17042)."""
    scheduler = index.scheduler
    return (
        scheduler.get("_class_name") == "EulerAncestralDiscreteScheduler"
        and scheduler.get("timestep_spacing") == "trailing"
    )


def _square(pixels: int) -> Callable[[ModelIndex], SectionTree]:
    """The size that the denoiser's `sample_size` gives, with this many pixels to a latent."""

    def sizes(index: ModelIndex) -> SectionTree:
        side = index.denoiser.get("sample_size")
        if not isinstance(side, int) or not 0 < side * pixels <= LARGEST_SIDE:
            return {}
        return {"height": side * pixels, "width": side * pixels}

    return sizes


def _hunyuan(index: ModelIndex) -> SectionTree:
    """The size of a checkpoint for 720p; the configuration's is for 480p."""
    large = index.denoiser.get("target_size") == 960 and index.kind == "HunyuanVideo15Pipeline"
    return {"height": 720, "width": 1280} if large else {}


def _cogvideo(index: ModelIndex) -> SectionTree:
    denoiser = index.denoiser
    height, width = (8 * int(denoiser.get(f"sample_{side}", 0)) for side in ("height", "width"))
    if not 0 < height <= LARGEST_SIDE or not 0 < width <= LARGEST_SIDE:
        return {}
    return {"height": height, "width": width, "call": {"num_frames": denoiser["sample_frames"]}}


FEW_STEPS: Mapping[str, SectionTree] = {
    "recipe": {"steps": 4},
    "model": {"guidance": "none"},
    "evaluate": {"steps": 4, "guidance": "none"},
}
# the first row whose class and condition fit
CONFIGURED_FAMILIES: tuple[Family, ...] = (
    Family(("FluxPipeline",), "flux1_dev", _denoiser("guidance_embeds")),
    Family(("FluxPipeline",), "flux1_schnell"),
    Family(("FluxKontextPipeline",), "flux1_kontext"),
    Family(("Flux2KleinPipeline",), "flux2_klein_distilled", _says("is_distilled")),
    Family(("Flux2KleinPipeline",), "flux2_klein"),
    Family(("Flux2Pipeline",), "flux2_dev_quantized"),
    Family(("QwenImagePipeline",), "qwen_image"),
    Family(("QwenImageEditPipeline", "QwenImageEditPlusPipeline"), "qwen_image_edit"),
    Family(("ZImagePipeline",), "z_image_turbo", lambda index: index.scheduler.get("shift") == 3.0),
    Family(("ZImagePipeline",), "z_image"),
    Family(("StableDiffusion3Pipeline",), "sd35_large", _at_least("num_layers", 38)),
    Family(("StableDiffusion3Pipeline",), "sd35_medium", _at_least("num_layers", 24)),
    Family(
        ("StableDiffusionXLPipeline",), "sdxl", _turbo, _square(8), FEW_STEPS,
        "diffusers, docs/source/en/api/pipelines/stable_diffusion/sdxl_turbo.md",
    ),
    Family(
        ("StableDiffusionPipeline",), "sd15", _turbo, _square(8), FEW_STEPS,
        "diffusers, docs/source/en/api/pipelines/stable_diffusion/sdxl_turbo.md",
    ),
    Family(
        ("StableDiffusionXLPipeline",), "sdxl", _at_least("cross_attention_dim", 2048), _square(8)
    ),
    Family(("StableDiffusionPipeline",), "sd15", _at_least("cross_attention_dim", 768), _square(8)),
    Family(("SanaPipeline",), "sana", _at_least("num_layers", 20), _square(32)),
    Family(("WanPipeline",), "wan22_a14b", _two_experts),
    Family(("WanPipeline",), "wan22_5b", _says("expand_timesteps")),
    Family(("WanPipeline",), "wan21_14b", _at_least("num_layers", 40)),
    Family(("WanPipeline",), "wan21_1b", _at_least("num_layers", 30)),
    Family(
        ("WanImageToVideoPipeline",), "wan22_a14b", _two_experts,
        changes={
            "model": {
                "guidance": {"sample": 3.5, "train": 3.5}, "scheduler": {"flow_shift": 5.0},
                "call": {"guidance_scale_2": 3.5},
            },
            "evaluate": {"guidance": 3.5},
        },
        why="Wan-Video/Wan2.2, wan/configs/wan_i2v_A14B.py: sample_shift, sample_guide_scale",
    ),
    Family(("WanImageToVideoPipeline",), "wan22_5b", _says("expand_timesteps")),
    Family(
        ("WanImageToVideoPipeline",), "wan21_14b", _first_and_last,
        changes={
            "model": {"guidance": {"sample": 5.5, "train": 5.5}}, "evaluate": {"guidance": 5.5},
        },
        why="diffusers, docs/source/en/api/pipelines/wan.md, first-last-frame-to-video",
        images=("image", "last_image"),
    ),
    Family(("WanImageToVideoPipeline",), "wan21_14b", _at_least("num_layers", 30)),
    Family(
        ("HunyuanVideoPipeline",), "papers/dance_grpo_hunyuan_video", _at_least("num_layers", 20),
        changes={
            "model": {"dtype": "bfloat16", "lora": {"rank": 128, "alpha": 256}, "offload": True},
            "train": {"lr": 3.0e-4, "gradient_checkpointing": True, "rows_per_call": 1},
        },
        why="adapters in place of all weights, as in configs/models/hunyuan_video15.yaml",
    ),
    Family(
        ("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"), "hunyuan_video15",
        _at_least("num_layers", 54), _hunyuan,
    ),
    Family(("LTXPipeline", "LTXImageToVideoPipeline"), "ltx_video", _at_least("num_layers", 28)),
    Family(("LTX2Pipeline", "LTX2ImageToVideoPipeline"), "ltx2_3", _denoiser("cross_attn_mod")),
    Family(("LTX2Pipeline", "LTX2ImageToVideoPipeline"), "ltx2"),
    Family(
        ("CogVideoXPipeline", "CogVideoXImageToVideoPipeline"), "cogvideox_5b",
        _at_least("num_layers", 30), _cogvideo,
    ),
)  # fmt: skip


def family_of(index: ModelIndex) -> Family | None:
    """The family that an index belongs to; None if flowrl has no configuration for its class or
    its size."""
    fits = (
        family
        for family in CONFIGURED_FAMILIES
        if index.kind in family.classes and family.when(index)
    )
    return None if index.modular else next(fits, None)


def distilled(index: ModelIndex) -> bool:
    """Whether an index says that its model is made for a few steps without guidance."""
    return index.values.get("is_distilled") is True or index.denoiser.get("use_meanflow") is True


def image_columns(kind: str) -> tuple[str, ...]:
    """Columns of images that the prompts of a pipeline's class need."""
    if kind in EDITORS:
        return ("image",)
    swept = swept_verdicts().get("exact", {}).get(kind)
    if swept is not None:
        needs = swept.split(" | ")[3].split(" and ")
        return tuple(images(needs))
    parameters = inspect.signature(getattr(diffusers, kind).__call__).parameters
    required = [name for name, p in parameters.items() if p.default is p.empty]
    return tuple(images(required))
