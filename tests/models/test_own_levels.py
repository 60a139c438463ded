"""Modular pipelines that list their noise levels, and those without a scheduler: Cosmos 3 Distilled
and Echo."""

from typing import Any

import pytest
import torch

from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.levels.user_levels import UserLevels
from flowrl.models.diffusers.modular.face import faced
from flowrl.models.diffusers.modular.own_levels import levels_between
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from tests.support.advice import advice
from tests.support.driving import PROMPTS, noise
from tests.support.tiny_modular import MODULAR, MODULAR_CALLS

torch.set_num_threads(1)
LISTED = {
    "cosmos3_distilled": (1.0, 0.9, 0.75, 0.5),
    "echo": (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875),
}


def listed(name: str, **more: Any) -> PipelinePolicy:
    return PipelinePolicy(MODULAR[name](), call=MODULAR_CALLS[name], own_sampler=True, **more)


@pytest.mark.parametrize("name", LISTED)
def test_whole_samples_are_made_by_the_listed_levels(name: str) -> None:
    made, levels = listed(name), LISTED[name]
    proof = made.prove(PROMPTS, steps=len(levels), guidance=None)
    assert proof.sampler and made.schedule(len(levels)).sigmas[:-1] == pytest.approx(levels)
    whole = prove_whole(made, PROMPTS, (), proof)
    assert whole.failure() is None and whole.own is not None and whole.flowrl is not None
    assert max(whole.own.latents, whole.own.media) == 0 and whole.flowrl.media < 5e-6


@pytest.mark.quick_cases("cosmos3_distilled")
@pytest.mark.parametrize("name", ["cosmos3", "cosmos3_distilled"])
def test_a_video_of_one_prompt_a_call_is_no_row_of_images(name: str) -> None:
    """Cosmos 3 returns its frames without a dimension of videos."""
    few = name in LISTED
    made, steps = PipelinePolicy(MODULAR[name](), call=MODULAR_CALLS[name], own_sampler=few), 4
    made.prove(PROMPTS, steps=steps, guidance=None, complete=False, gradient=False)
    rows = made.encode(PROMPTS)
    decoded = made.decoded(noise(made), rows, steps=steps, guidance=None)
    assert decoded.media.shape == (2, 5, 3, 32, 32)


@pytest.mark.parametrize("name", LISTED)
def test_a_run_may_have_levels_of_its_own(name: str) -> None:
    """Which are then those that the loop visits."""
    levels = UserLevels(lambda steps: (1.0, 0.8, 0.3)[:steps], 3)
    plain, made, count = listed(name), listed(name, levels=levels), len(LISTED[name])

    def proven(policy: PipelinePolicy, steps: int) -> None:
        policy.prove(PROMPTS, steps=steps, guidance=None, complete=False, gradient=False)

    for policy, steps in ((plain, count), (made, 3)):
        advice(
            "was distilled for the {} levels {}, not for {} steps: set recipe.steps and "
            "evaluate.steps to {}, or other levels by model.sigmas",
            lambda: proven(plain, 3),
            lambda policy=policy, steps=steps: proven(policy, steps),
        )
    assert made.schedule(3).sigmas == pytest.approx((1.0, 0.8, 0.3, 0.0))


def test_samples_are_those_of_the_blocks_before_flowrl() -> None:
    """Echo's last block is run with the steps of a scheduler, which round otherwise."""
    pipe, call = MODULAR["echo"](), MODULAR_CALLS["echo"]

    def made(kind: Any, **more: Any) -> list[torch.Tensor]:
        draws = torch.Generator().manual_seed(5)
        return kind(prompt=list(PROMPTS), generator=draws, output_type="pt", **call, **more)

    names = ["videos", "audio"]
    theirs = made(pipe, output=names)
    ours = made(faced(pipe), num_inference_steps=8)
    for name, mine in zip(names, ours, strict=True):
        away = (mine - theirs[name]).abs().max()  # type: ignore[call-overload]
        assert mine.std() > 0 and float(away) < 5e-6


def test_an_image_that_fixes_the_first_frame_is_refused() -> None:
    call = MODULAR_CALLS["echo"]
    with_image = call | columns.placeholder_images(["image"], 64, 64)
    advice(
        "fixes entries of the state between steps, which fresh noise would leave: leave the image "
        "of the first frame out",
        lambda: PipelinePolicy(MODULAR["echo"](), call=with_image, own_sampler=True),
        lambda: PipelinePolicy(MODULAR["echo"](), call=call, own_sampler=True),
    )


@pytest.mark.parametrize(
    ("levels", "steps", "expected"),
    [
        ((1.0, 0.9, 0.75, 0.5), 4, (1.0, 0.9, 0.75, 0.5)),
        ((1.0, 0.9, 0.75, 0.5), 2, (1.0, 0.75)),
        ((1.0, 0.5), 4, (1.0, 0.75, 0.5, 0.25)),
        ((1.0,), 2, (1.0, 0.5)),
    ],
)
def test_trials_take_levels_between_the_listed_ones(
    levels: tuple[float, ...], steps: int, expected: tuple[float, ...]
) -> None:
    assert levels_between(levels, steps) == pytest.approx(expected)
