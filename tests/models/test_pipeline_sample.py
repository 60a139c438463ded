"""Both claims over the named families: the pipeline's own scheduler and flowrl's own steps."""

import copy
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from flowrl.models.diffusers.call.drive.image_cache import Posterior
from flowrl.models.diffusers.call.inputs import columns
from tests.golden_api import pipeline_sample
from tests.support.driving import STEPS
from tests.support.tiny_pipelines import NAMED, SIZE, SQUARE, qwen_image
from tests.support.tiny_pipelines_unet import sd15

torch.set_num_threads(1)
PROMPTS = ["a red cube", "two blue cat on the table"]
# families whose schedulers are Euler's or DDIM's without noise, so that flowrl's steps are theirs
OTHERS = ("Sana", "Wan 2.1", "Wan 2.1 image to video", "Wan 2.2", "CogVideoX")


@pytest.fixture(autouse=True)
def mean_posteriors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture's posterior is drawn from anew in each own call; its mean is not."""
    for kind in (DiagonalGaussianDistribution, Posterior):
        monkeypatch.setattr(kind, "sample", lambda self, generator=None: self.mean)


def own(pipe: Any, call: dict[str, Any], latents: torch.Tensor, **more: Any) -> torch.Tensor:
    given: dict[str, Any] = call | {"prompt": PROMPTS, "latents": latents} | more
    if isinstance(given.get("negative_prompt"), str):
        given["negative_prompt"] = [given["negative_prompt"]] * 2
    if "CogVideoXImage" in type(pipe).__name__:
        given["image"] = [given["image"]] * 2
    given["generator"] = torch.Generator().manual_seed(3)
    pipe.set_progress_bar_config(disable=True)
    return pipe(**given, num_inference_steps=STEPS, output_type="pt", return_dict=False)[0].float()


@pytest.mark.quick_cases("FLUX.1", "LTX-Video")
@pytest.mark.parametrize("guidance", [pytest.param(None, marks=pytest.mark.slow), 4.5])
@pytest.mark.parametrize("name", NAMED)
def test_a_sample_is_the_pipelines_own(name: str, guidance: float | None) -> None:
    family = NAMED[name]
    call = dict(family.call)
    if family.images:
        call["image"] = columns.placeholder_images(["image"], 24, 20)["image"]
    pipe = family.build()
    plain = copy.deepcopy(pipe)
    scale = "true_cfg_scale" if name.startswith("Qwen") else "guidance_scale"
    more = {} if guidance is None else {scale: guidance}
    given: dict[str, Any] = {"steps": STEPS, "guidance": guidance, "call": call, "seed": 3}
    latents, media = pipeline_sample(pipe, PROMPTS, **given)
    theirs = own(plain, call, latents, **more)
    torch.testing.assert_close(media, theirs, rtol=0, atol=5e-5)
    assert theirs.std() > 1e-3
    if guidance is None and name not in OTHERS:
        again, media = pipeline_sample(pipe, PROMPTS, **given, scheduler="flowrl")
        assert torch.equal(again, latents)
        torch.testing.assert_close(media, theirs, rtol=0, atol=5e-5)


def test_a_sample_with_negative_prompts_of_other_lengths() -> None:
    negatives = ["bad", "a bad blurry photo of the table"]
    given: dict[str, Any] = {"steps": STEPS, "guidance": 4.5, "negative_prompts": negatives}
    latents, media = pipeline_sample(qwen_image(), PROMPTS, **given, call=SQUARE)
    theirs = own(qwen_image(), SQUARE | {"negative_prompt": negatives}, latents, true_cfg_scale=4.5)
    torch.testing.assert_close(media, theirs, rtol=0, atol=5e-5)


@pytest.mark.slow
def test_a_scheduler_that_ends_above_zero() -> None:
    build = lambda: sd15(DDIMScheduler, set_alpha_to_one=False)
    given: dict[str, Any] = {"steps": STEPS, "guidance": 4.5, "call": SIZE}
    for scheduler in ("own", "flowrl"):
        latents, media = pipeline_sample(build(), PROMPTS, **given, scheduler=scheduler)
        theirs = own(build(), SIZE, latents, guidance_scale=4.5)
        torch.testing.assert_close(media, theirs, rtol=0, atol=2e-5)
