"""Live pipelines: what a run records of them, and what its copy could not have."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload_with_hook
from diffusers import AutoencoderOobleck, StableDiffusion3Pipeline
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.embeddings import ImageProjection

from flowrl.api.models import beyond_files, model_settings
from flowrl.api.same_files import has_weights_of, is_pipeline_of
from flowrl.errors import UserError
from tests.support import tiny_pipelines_image as image
from tests.support import tiny_pipelines_video as video
from tests.support.advice import advice
from tests.support.tiny_pipelines_image import live
from tests.support.tiny_pipelines_unet import sd15, sdxl

PIPELINES = (
    *(image.sd3, image.flux, image.lumina2, image.qwen_image, image.flux2, image.z_image),
    *(image.sana, sd15, sdxl, video.wan, video.hunyuan_video, video.ltx, video.cog_video),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pipeline_is_recorded_by_the_name_that_it_came_from(
    pipeline: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    pipe = live(pipeline, dtype)
    named = model_settings(pipe, None, "nft", tmp_path)
    assert named == {"pipeline": str(pipeline), "dtype": str(dtype).removeprefix("torch.")}
    assert not list(tmp_path.iterdir())


def changed_weight(pipe: Any) -> None:
    next(pipe.text_encoder.parameters()).data[0, 0] += 1e-3


def changed_scheduler(pipe: Any) -> None:
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, shift=5.0)


def changed_vae(pipe: Any) -> None:
    pipe.vae.register_to_config(scaling_factor=0.5)


def changed_tokenizer(pipe: Any) -> None:
    pipe.tokenizer.model_max_length -= 1


@pytest.mark.quick_cases("changed_weight")
@pytest.mark.parametrize(
    "change", [changed_weight, changed_scheduler, changed_vae, changed_tokenizer]
)
def test_another_pipeline_is_saved_into_the_run(
    pipeline: Path, tmp_path: Path, change: Any
) -> None:
    pipe = live(pipeline)
    change(pipe)
    saved = Path(model_settings(pipe, None, "nft", tmp_path)["pipeline"])
    assert saved == tmp_path / "pipeline"
    assert has_weights_of(pipe.text_encoder, saved / "text_encoder")
    again = live(saved)
    assert again.tokenizer.model_max_length == pipe.tokenizer.model_max_length
    assert again.vae.config.scaling_factor == pipe.vae.config.scaling_factor
    assert again.scheduler.config.shift == pipe.scheduler.config.shift


class OwnPipeline(StableDiffusion3Pipeline):
    """A pipeline of a user's own."""


class StableDiffusion3Pipeline2(StableDiffusion3Pipeline):
    """A pipeline of a user's own, with the name of diffusers'."""


StableDiffusion3Pipeline2.__name__ = "StableDiffusion3Pipeline"


@pytest.mark.parametrize("kind", [OwnPipeline, StableDiffusion3Pipeline2])
def test_a_pipeline_of_a_class_of_its_own_is_refused(
    pipeline: Path, tmp_path: Path, kind: Any
) -> None:
    pipe = kind(**live(pipeline).components)
    with pytest.raises(UserError, match="is not a class of diffusers"):
        model_settings(pipe, None, "nft", tmp_path)


def test_a_replaced_method_of_a_pipeline_is_named(pipeline: Path, tmp_path: Path) -> None:
    pipe = live(pipeline)
    pipe.encode_prompt = functools.partial(pipe.encode_prompt, num_images_per_prompt=1)
    with pytest.raises(UserError, match="encode_prompt of this pipeline has been replaced"):
        model_settings(pipe, None, "nft", tmp_path)


def doubled(module: Any, *_: Any) -> None:
    module.doubled = True


class OwnProcessor(AttnProcessor2_0):
    """A processor of a user's own."""


LOST = {
    "a decoder": lambda pipe: vars(pipe.vae).update(decode=pipe.vae.decode),
    "a hook of the VAE": lambda pipe: pipe.vae.register_forward_hook(doubled),
    "FreeU": lambda pipe: pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4),
    "a processor": lambda pipe: pipe.unet.set_attn_processor(OwnProcessor()),
    "a hook": lambda pipe: pipe.unet.mid_block.register_forward_hook(doubled),
    "a forward": lambda pipe: vars(pipe.unet).update(forward=pipe.unet.forward),
    "a module": lambda pipe: setattr(pipe.unet, "conv_out", torch.nn.Identity()),
}
KEPT = {
    "nothing": lambda pipe: None,
    "gradient checkpointing": lambda pipe: pipe.unet.enable_gradient_checkpointing(),
    "offloading": lambda pipe: cpu_offload_with_hook(pipe.unet, "cpu"),
}


@pytest.mark.parametrize("change", LOST)
def test_what_the_files_of_a_live_pipeline_cannot_hold_is_named(
    tmp_path: Path, change: str
) -> None:
    pipe = sd15()
    LOST[change](pipe)
    told = r"not contain all parts of this pipeline \((unet|vae): .*disable_freeu"
    with pytest.raises(UserError, match=told):
        model_settings(pipe, None, "nft", tmp_path)


def with_hook_and_back(pipe: Any) -> Callable[[], object]:
    return pipe.unet.mid_block.register_forward_hook(doubled).remove


def with_ip_adapter_and_back(pipe: Any) -> Callable[[], object]:
    """The adapter's weights are those that the UNet's own processors and projection begin with."""
    unet, wide = pipe.unet, pipe.unet.config.cross_attention_dim
    crossing = [m for n, m in unet.named_modules() if n.endswith("attn2")]
    layers = {
        f"{2 * i + 1}.to_{side}_ip.weight": torch.zeros(attention.to_k.out_features, wide)
        for i, attention in enumerate(crossing)
        for side in "kv"
    }
    projection = ImageProjection(wide, wide, num_image_text_embeds=4).state_dict()
    renamed = {n.replace("image_embeds", "proj"): weight for n, weight in projection.items()}
    unet._load_ip_adapter_weights([{"image_proj": renamed, "ip_adapter": layers}])
    return pipe.unload_ip_adapter


def with_slices_and_back(pipe: Any) -> Callable[[], object]:
    pipe.enable_attention_slicing()
    return pipe.disable_attention_slicing


def with_freeu_and_back(pipe: Any) -> Callable[[], object]:
    LOST["FreeU"](pipe)
    return pipe.disable_freeu


@pytest.mark.parametrize(
    "change",
    [with_freeu_and_back, with_ip_adapter_and_back, with_slices_and_back, with_hook_and_back],
)
def test_what_a_message_undoes_is_undone(tmp_path: Path, change: Any) -> None:
    """By the call that the message names, and by loading the pipeline again."""
    made = sd15()
    made.save_pretrained(tmp_path / "base")
    absent = {name: None for name, part in made.components.items() if part is None}

    def loaded() -> Any:
        return type(made).from_pretrained(tmp_path / "base", **absent)

    def settings_of(pipe: Any) -> dict[str, Any]:
        return model_settings(pipe, None, "nft", tmp_path)

    pipe = loaded()
    undo = change(pipe)
    settings = advice(
        "which do not contain all parts of this pipeline ({}): take the pipeline as "
        "from_pretrained loads it, or undo what was changed",
        lambda: settings_of(pipe),
        lambda: settings_of(loaded()),
    )
    undo()
    assert settings_of(pipe) == settings


@pytest.mark.parametrize("change", KEPT)
def test_what_changes_no_output_of_a_live_pipeline_is_no_matter(change: str) -> None:
    pipe = sd15()
    KEPT[change](pipe)
    assert beyond_files(pipe.unet) == []


def test_hooks_that_a_class_has_by_itself_are_in_its_files() -> None:
    """Weight norm is a hook of torch's, and its numbers are weights."""
    vae = AutoencoderOobleck(
        encoder_hidden_size=4,
        downsampling_ratios=[2],
        channel_multiples=[1],
        decoder_channels=4,
        decoder_input_channels=2,
    )
    assert beyond_files(vae) == []
    vae.decoder.conv1.register_forward_pre_hook(doubled)
    assert beyond_files(vae) == ["a hook on decoder.conv1"]


def test_tiles_of_a_live_vae_stay_and_other_dtypes_are_said(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = live(pipeline)
    pipe.vae.enable_tiling()
    pipe.transformer.to(torch.bfloat16)
    made = model_settings(pipe, None, "nft", tmp_path)
    assert made["vae"] == {"tiling": True} and made["dtype"] == "bfloat16"
    said = "the pipeline has its vae in float32; the run loads all parts in bfloat16"
    assert said in capsys.readouterr().out


@pytest.mark.quick_cases("sd3", "flux2", "qwen_image", "wan")
@pytest.mark.parametrize("make", PIPELINES, ids=lambda make: make.__name__)
def test_a_pipeline_is_recognized_in_its_files(make: Callable[[], Any], tmp_path: Path) -> None:
    made = make()
    made.save_pretrained(tmp_path)
    absent = {name: None for name, part in made.components.items() if part is None}
    pipe = type(made).from_pretrained(tmp_path, **absent)
    assert is_pipeline_of(pipe, tmp_path)
    assert not [what for part in pipe.components.values() for what in beyond_files(part)]
