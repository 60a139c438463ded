"""Tiny random pipelines, built in code: no file and no download."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from diffusers import CogVideoXImageToVideoPipeline, FluxKontextPipeline, LTXImageToVideoPipeline

from tests.support.tiny_pipelines_image import (
    flux,
    flux2,
    lumina2,
    qwen_image,
    qwen_image_edit,
    sana,
    sd3,
    z_image,
)
from tests.support.tiny_pipelines_parts import TOKENS, WORDS
from tests.support.tiny_pipelines_unet import sd15, sdxl
from tests.support.tiny_pipelines_video import cog_video, hunyuan_video, ltx, wan, wan_image

__all__ = ["FAMILIES", "NAMED", "SQUARE", "TOKENS", "WORDS", "flux", "qwen_image", "sd3"]

SIZE = {"height": 16, "width": 16}
SQUARE = SIZE | {"max_sequence_length": TOKENS}
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


class Family(NamedTuple):
    """`unusual` are settings beside `call` for a second replay. `images`: it wants one."""

    build: Callable[[], Any]
    call: dict[str, Any]
    unusual: dict[str, Any] = {"negative_prompt": "bad blurry"}  # noqa: RUF012
    images: bool = False
    embedded: bool = False  # the guidance scale is an input of the denoiser
    forward: bool = False  # its unusual settings need the loop's index
    scaled: bool = False  # its scheduler's states are not what the denoiser sees


VIDEO = SQUARE | {"num_frames": 5}
WIDE = {"height": 32, "width": 32, "num_frames": 9, "max_sequence_length": TOKENS}
HUNYUAN = VIDEO | {"prompt_template": {"template": "{}", "crop_start": 0}}
KONTEXT = SQUARE | {"max_area": 256, "_auto_resize": False}
FLUX2 = SIZE | {"max_sequence_length": 32, "text_encoder_out_layers": (0, 1, 2)}
SANA = {"height": 32, "width": 32, "max_sequence_length": TOKENS, "use_resolution_binning": False}
SANA |= {"complex_human_instruction": None}
TRUE_CFG = {"negative_prompt": "bad", "true_cfg_scale": 3.0}

NAMED: dict[str, Family] = {
    "SD1.5": Family(sd15, SIZE, {"guidance_rescale": 0.7, "negative_prompt": "bad"}),
    "SDXL": Family(
        sdxl,
        SIZE,
        {"guidance_rescale": 0.7, "negative_prompt": "bad", "crops_coords_top_left": (4, 4)},
        scaled=True,
    ),
    "SD3": Family(
        sd3, SQUARE, {"skip_guidance_layers": [1], "skip_layer_guidance_stop": 0.6}, forward=True
    ),
    "FLUX.1": Family(flux, SQUARE, TRUE_CFG, embedded=True),
    "FLUX.1-Kontext": Family(
        partial(flux, FluxKontextPipeline), KONTEXT, TRUE_CFG, images=True, embedded=True
    ),
    "FLUX.2": Family(flux2, FLUX2, {"text_encoder_out_layers": (2, 1, 0)}, embedded=True),
    "Qwen-Image": Family(qwen_image, SQUARE | {"negative_prompt": "bad"}, {"negative_prompt": ""}),
    "Qwen-Image-Edit": Family(
        qwen_image_edit, SQUARE | {"negative_prompt": "bad"}, {"negative_prompt": ""}, images=True
    ),
    "Z-Image": Family(
        z_image,
        SIZE | {"max_sequence_length": 32},
        {"cfg_truncation": 0.5, "cfg_normalization": True},
        forward=True,
    ),
    "Sana": Family(sana, SANA),
    "HunyuanVideo": Family(hunyuan_video, HUNYUAN, TRUE_CFG, embedded=True),
    "Wan 2.1": Family(wan, VIDEO),
    "Wan 2.1 image to video": Family(wan_image, VIDEO, images=True),
    "Wan 2.2": Family(partial(wan, 2), VIDEO, {"guidance_scale_2": 2.0}),
    "LTX-Video": Family(ltx, WIDE, {"guidance_rescale": 0.7, "negative_prompt": "bad"}),
    "LTX-Video with an image": Family(
        partial(ltx, LTXImageToVideoPipeline), WIDE, {"guidance_rescale": 0.7}, images=True
    ),
    "CogVideoX": Family(cog_video, VIDEO, {"use_dynamic_cfg": True}),
    "CogVideoX with an image": Family(
        partial(cog_video, CogVideoXImageToVideoPipeline, dpm=False), VIDEO, images=True
    ),
}
