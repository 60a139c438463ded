"""Guidance in the update: matching losses train the model's own velocity, losses on ratios compare
densities of one policy, and a guider is switched off for a call."""

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch

from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.recipes import RECIPES
from flowrl.run.watch import guidance_check
from flowrl.run.watch.guidance_check import check_guidance
from flowrl.settings import RunSettings
from flowrl.settings.checks.guidance import check_measured_guidance, compares_densities
from flowrl.settings.read import check_plan, dump, override, run_from
from tests.support.driving import PROMPTS, STEPS
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.calls_videos import VIDEO_SPECIALS
from tests.support.zoo.pipelines import tiny

torch.set_num_threads(1)
IMAGES = [name for name, recipe in RECIPES.items() if not recipe().text]
MATCHING = [name for name in IMAGES if isinstance(RECIPES[name]().likelihood, Matching)]
RATIOS = [name for name in IMAGES if compares_densities(RECIPES[name]())]
SD35, FLUX = "stabilityai/stable-diffusion-3.5-medium", "black-forest-labs/FLUX.1-dev"
Z_IMAGE, HUNYUAN = "Tongyi-MAI/Z-Image", "hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v"


def run_of(recipe: str, guidance: Any, model: str = SD35) -> RunSettings:
    return run_from(
        {
            "recipe": {"name": recipe},
            "model": {"pipeline": model, "guidance": guidance},
            "prompts": {"train": "x.txt", "per_iteration": 8},
            "rewards": ["brightness"],
        },
        "test",
    )


@pytest.mark.parametrize("name", MATCHING)
def test_matching_recipes_refuse_a_guided_velocity_before_weights(name: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.guidance\.train: {name} regresses") as refused:
        check_guidance(run_of(name, {"train": 4.0}))
    assert "set it to none" in str(refused.value)
    for way_out in ({"sample": 4.0}, {"sample": 4.0, "train": "none"}, {"train": 1.0}, None):
        run = run_of(name, way_out if way_out is not None else {"train": "none"})
        check_guidance(run)
        check_plan(run)


@pytest.mark.parametrize("name", RATIOS)
def test_recipes_with_a_ratio_train_at_the_scale_of_their_samples(name: str) -> None:
    run = run_of(name, {"sample": 4.0})
    assert run.training_guidance == 4.0
    check_plan(run)
    with pytest.raises(UserError, match="drawn at scale 4 and their densities are evaluated at 1"):
        check_plan(run_of(name, {"sample": 4.0, "train": 1.0}))
    check_plan(run_of(name, {"sample": 4.0, "train": 4.0}))


@pytest.mark.parametrize("name", IMAGES)
def test_a_scale_for_training_is_only_chosen_where_none_is_set(name: str) -> None:
    if RECIPES[name]().loss.roles & {"teacher"}:
        pytest.skip("distillation needs teachers")
    expected = "none" if name in MATCHING else 4.0
    run = run_of(name, {"sample": 4.0})
    assert run.training_guidance == run.trained_model.guidance.train == expected
    assert run_of(name, {"sample": 4.0, "train": 2.0}).training_guidance == 2.0
    assert dump(run)["model"]["guidance"] == {
        "sample": 4.0, "train": "auto", "through": "both"
    }  # fmt: skip


def test_an_option_for_sampling_alone_moves_training_too() -> None:
    """The word that we propose for diffusers' `guidance_scale` leads to a run that starts."""
    run = override(run_of("flow_grpo", {}), ["--model.guidance.sample", "4.5"])
    assert run.training_guidance == 4.5
    check_plan(run)
    run = override(run_of("nft", {}), ["--model.guidance.sample", "4.5"])
    assert run.training_guidance == "none"
    check_guidance(run)


@pytest.mark.parametrize(
    ("model", "scale", "refused"),
    [(FLUX, 3.5, False), (SD35, 1.0, False), (SD35, None, True), (Z_IMAGE, 1.0, True)],
)
def test_what_a_scale_does_is_read_from_the_model(
    model: str, scale: float | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLUX.1-dev takes its scale as an input; Z-Image is guided above 0."""
    run = run_of("nft", {"train": scale}, model)
    if model == Z_IMAGE:  # its rule, with a configuration that is in the table
        known = guidance_check.describe(run_of("nft", {}).model)
        assert known is not None
        z_image = replace(known, pipeline="ZImagePipeline")
        monkeypatch.setattr(guidance_check, "describe", lambda _: z_image)
    if not refused:
        return check_guidance(run)
    with pytest.raises(UserError, match="the velocity is guided"):
        check_guidance(run)


def test_scales_that_only_the_loaded_model_knows_are_compared_then() -> None:
    run = run_of("flow_grpo", {"sample": "none", "train": 1.0})
    check_plan(run)  # 1 is no guidance for most pipelines
    check_measured_guidance(run, run.algorithm(), 1.0, 1.0)
    with pytest.raises(UserError, match="drawn at scale none and their densities are evaluated"):
        check_measured_guidance(run, run.algorithm(), 0.0, 1.0)


@pytest.mark.parametrize(
    "name",
    [pytest.param("HunyuanVideo15Pipeline", marks=pytest.mark.slow), "MotifVideoPipeline"],
)
def test_a_guider_is_switched_off_for_the_calls_without_guidance(name: str) -> None:
    made = tiny(getattr(diffusers, name), {**SPECIALS, **VIDEO_SPECIALS}, SIZES)
    policy = PipelinePolicy(made.pipe, call=made.call)
    policy = policy.guided(None, "none")
    assert policy.guidance == (None, 0.0)
    guided, plain = (
        policy.prove(PROMPTS, steps=STEPS, guidance=scale, complete=False, gradient=scale == 0)
        for scale in policy.guidance
    )
    assert guided.evaluations == 2 and plain.evaluations == 1
    assert made.pipe.guider._enabled, "the user's guider is as it was"
    with pytest.raises(UserError, match="takes no guidance"):
        policy.prove(PROMPTS, steps=STEPS, guidance=3.0, complete=False, gradient=False)
