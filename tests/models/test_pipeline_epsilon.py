"""Models that predict the noise, v or the clean sample: read as flows, trained by DDPO and LOOP."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
)

from flowrl.errors import UserError
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.recipes import RECIPES
from samplers import DDIM
from samplers.adapt import from_vp, level, to_vp
from tests.support.driving import PROMPTS, STEPS, learn
from tests.support.tiny_pipelines import SIZE, sd3
from tests.support.tiny_pipelines_unet import sd15, sdxl

torch.set_num_threads(1)
ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


def policy(scheduler: Any = DDIMScheduler, **more: Any) -> PipelinePolicy:
    return PipelinePolicy(sd15(scheduler, **more), call=SIZE)


@pytest.mark.quick_cases("PNDMScheduler")
@pytest.mark.parametrize(
    ("scheduler", "more"),
    [
        (PNDMScheduler, {"skip_prk_steps": True}),
        (DPMSolverMultistepScheduler, {}),
        (HeunDiscreteScheduler, {}),
        (DDIMScheduler, {"prediction_type": "v_prediction"} | ZERO_SNR),
        (EulerDiscreteScheduler, {"prediction_type": "v_prediction"} | ZERO_SNR),
        (DDIMScheduler, {"prediction_type": "sample"}),
    ],
)
def test_schedulers_of_all_kinds_are_read(scheduler: Any, more: dict[str, Any]) -> None:
    """Each one's own first step is our Euler step: the levels and the prediction are right."""
    more = {k: v for k, v in more.items() if scheduler is not HeunDiscreteScheduler}
    settings = {"steps_offset": 1} if scheduler is HeunDiscreteScheduler else {}
    made = policy(scheduler, **more | settings)
    proof = made.prove(PROMPTS, steps=STEPS, guidance=4.5)
    assert proof.first is not None and proof.first < 1e-4
    assert proof.kind == more.get("prediction_type", "epsilon") and proof.kind in str(proof)
    sigmas = made.schedule(STEPS).sigmas
    last = level(made.pipe.scheduler.alphas_cumprod[:1]).item() if scheduler is PNDMScheduler else 0
    assert len(sigmas) == STEPS + 1 and sigmas[-1] == pytest.approx(last, rel=1e-6)
    assert all(a > b for a, b in pairwise(sigmas))


@pytest.mark.slow
def test_steps_that_no_plan_has_and_levels_beside_the_list_are_told() -> None:
    with pytest.raises(
        UserError, match=r"Runge-Kutta .* set model.scheduler: \{skip_prk_steps: true\}"
    ):
        policy(PNDMScheduler, skip_prk_steps=False)
    proof = policy(DDIMScheduler, timestep_spacing="linspace").prove(PROMPTS, steps=6, guidance=4.5)
    assert "steps to other levels than the next of its list" in str(proof)


@pytest.mark.slow
def test_ddim_step_is_the_schedulers_own() -> None:
    """Our kernel at eta 1 on the driven velocity, against DDIMScheduler with the same noise."""
    made = policy()
    conditioning, schedule = made.encode(PROMPTS), made.schedule(STEPS)
    velocity = made.bind(conditioning, steps=STEPS, guidance=4.5)
    way = made.prove(PROMPTS, steps=STEPS, guidance=4.5).to_way
    scheduler = made.pipe.scheduler
    scheduler.set_timesteps(STEPS)
    draws = torch.Generator().manual_seed(2)
    x = torch.randn(2, *made.shape(STEPS), generator=draws)
    noise = torch.randn(x.shape, generator=draws)
    for step in range(STEPS - 1):  # the last one goes to alphas_cumprod[0] there, to 0 here
        sigma = torch.full((2,), schedule.sigmas[step])
        following = torch.full((2,), schedule.sigmas[step + 1])
        with torch.no_grad():
            said = made.loop.received(x, sigma, conditioning, way).output
            z = from_vp(x, sigma)
            mean, std = DDIM(1.0)(z, velocity(z, sigma, torch.tensor([0, 1])), sigma, following)
        ours = to_vp(mean + std[:, None, None, None] * noise, following)
        t = schedule.timesteps[step]
        x = scheduler.step(said, t, x, eta=1.0, variance_noise=noise, return_dict=False)[0]
        torch.testing.assert_close(ours, x, rtol=1e-4, atol=1e-5)


def test_levels_and_times_of_a_vp_model() -> None:
    made = policy()
    schedule, table = made.schedule(STEPS), made.pipe.scheduler.alphas_cumprod.double()
    times = [751, 501, 251, 1]
    assert schedule.timesteps.tolist() == times
    assert schedule.sigmas[:-1] == pytest.approx(level(table[times]).tolist(), rel=1e-12)
    # a free level is a whole time for DDIM, the lowest time below the lowest level
    between = 0.7 * level(table[400:401]) + 0.3 * level(table[401:402])
    assert schedule.times(torch.cat([between, torch.tensor([1e-3])])).tolist() == [400, 0]
    with pytest.raises(UserError, match="above the model's highest noise level"):
        schedule.times(torch.tensor([0.99]))
    euler = PipelinePolicy(sdxl(), call=SIZE).schedule(STEPS)
    assert euler.times(between).item() == pytest.approx(400.3, abs=1e-2)


@pytest.mark.slow
def test_scaled_schedulers_give_the_same_velocity() -> None:
    """Euler-discrete works on x0 + (s / alpha) noise, DDIM on alpha x0 + s noise: one model."""
    sigma, velocities = torch.tensor([0.5, 0.7]), []
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    for scheduler in (DDIMScheduler, EulerDiscreteScheduler):
        made = policy(scheduler)
        table = made.pipe.scheduler.alphas_cumprod.double()
        sigma = level(table[[400, 600]]).float()
        velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=4.5)
        velocities.append(velocity(x, sigma, torch.tensor([0, 1])).detach())
    torch.testing.assert_close(*velocities, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ddpo", "loop"])
def test_published_recipes_of_noise_models_at_ratio_1(recipe: str) -> None:
    made = policy()
    made.add_lora(rank=2, alpha=2, targets=None, seed=0)
    before = {key: value.detach().clone() for key, value in made.trainable().items()}
    assert learn(made, RECIPES[recipe](steps=5, group=3)) < 1e-4
    moved = [key for key, value in made.trainable().items() if not value.equal(before[key])]
    assert moved and all(".lora_B." in key for key in moved)  # A waits for a B that is not 0


def test_what_changes_the_prediction_is_refused() -> None:
    pipe = sd3()
    pipe.scheduler = DDIMScheduler(clip_sample=True)
    with pytest.raises(UserError, match="clip_sample enabled"):
        PipelinePolicy(pipe, call=SIZE)
    with pytest.raises(UserError, match="thresholding enabled"):
        policy(DDPMScheduler, clip_sample=False, thresholding=True)


def test_a_prediction_that_is_read_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A v-model whose scheduler we took for an epsilon one: the first step tells."""
    made = policy(prediction_type="v_prediction")
    monkeypatch.setattr(made.loop, "traits", replace(made.loop.traits, kind="epsilon"))
    with pytest.raises(UserError, match="not the assumed epsilon"):
        made.prove(PROMPTS, steps=STEPS, guidance=4.5)
