"""A driven pipeline is the pipeline: its schedule, its velocities and its images, to the bit."""

import copy
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.received import PerRow
from flowrl.models.diffusers.call.levels.schedule import PipelineSchedule
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.run.evaluate.start_checks import made_form
from tests.support.driving import PROMPTS, STEPS, noise, own, policy, sample
from tests.support.tiny_pipelines import FAMILIES, SQUARE, sd3

EXPECTED = {  # (way, rows of several sigmas share a call) with guidance
    "sd3": ("pinned", True),
    "sd3 with a negative prompt": ("pinned", True),
    "sd3 with skipped layers": ("forward", False),
    "flux": ("pinned", True),
    "lumina2": ("pinned", True),
    "lumina2 with truncated guidance": ("forward", False),
    "qwen": ("pinned", True),
    "wan 2.1": ("pinned", True),
    "wan 2.2": ("pinned", False),
}


@pytest.mark.quick_cases("sd3-4.5", "flux-4.5")
@pytest.mark.parametrize(
    "guidance", [*(pytest.param(g, marks=pytest.mark.slow) for g in (None, 1.0)), 4.5]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_driven_is_the_pipelines_own_call_to_the_bit(family: str, guidance: float | None) -> None:
    """The scheduler stepped with our velocity, and decode, against `pipe(...)`."""
    build, call = FAMILIES[family]
    pipe = build()
    plain = copy.deepcopy(pipe)
    made = PipelinePolicy(pipe, call=call)
    latents = noise(made)
    name = "true_cfg_scale" if family == "qwen" else "guidance_scale"
    more = {} if guidance is None else {name: guidance}
    theirs = own(plain, latents, call, **more)
    assert torch.equal(sample(made, latents, guidance), theirs)
    assert theirs.std() > 1e-3
    proof = made.prove(PROMPTS, steps=STEPS, guidance=guidance)
    if guidance == 4.5:
        assert (proof.way, proof.mixed) == EXPECTED[family]
    assert proof.euler == (None if family.startswith("wan") else 0.0)
    made.known_proofs[STEPS, guidance] = proof
    assert proof.video == family.startswith("wan")
    assert made_form(made).kind == ("video" if proof.video else "image")
    if family.startswith("wan"):
        assert theirs.shape == (2, 5, 3, 16, 16)


@pytest.mark.slow
def test_guidance_and_arguments_change_the_velocity() -> None:
    """Equal bits would mean little if nothing mattered."""
    seen = []
    for call, guidance in (
        (SQUARE, None),  # SD3's default, 7
        (SQUARE, 1.0),
        (SQUARE, 4.5),
        (SQUARE | {"negative_prompt": "bad blurry"}, 4.5),
        (FAMILIES["sd3 with skipped layers"][1], 4.5),
    ):
        made = policy(call)
        velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=guidance)
        sigma = torch.full((2,), made.schedule(STEPS).sigmas[1])
        x = noise(made)
        seen.append(velocity(x, sigma, torch.tensor([0, 1])).detach())
    gaps = [(a - b).abs().max() for i, a in enumerate(seen) for b in seen[:i]]
    assert min(gaps) > 1e-3


def test_schedule_is_the_schedulers_own() -> None:
    build, call = FAMILIES["flux"]
    made = PipelinePolicy(build(), call=call)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    slope = (1.15 - 0.5) / (4096 - 256)  # FLUX: mu is linear in the 16 packed tokens
    mu = 16 * slope + 0.5 - slope * 256
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25], mu=mu)
    schedule = made.schedule(STEPS)
    assert schedule.sigmas == tuple(scheduler.sigmas.tolist()) and schedule.sigmas[-1] == 0
    assert schedule.timesteps.tolist() == scheduler.timesteps.tolist()
    assert made.schedule(STEPS) is schedule and len(made.schedule(6).sigmas) == 7


def test_timesteps_of_sigmas() -> None:
    build, call = FAMILIES["wan 2.1"]
    schedule = PipelinePolicy(build(), call=call).schedule(STEPS)
    sigma = torch.tensor([schedule.sigmas[2], 0.4567, schedule.sigmas[0]], dtype=torch.float64)
    assert schedule.index(sigma).tolist() == [2, -1, 0]
    # UniPC truncates, so 999.999 is 999 there and a free sigma's timestep is truncated too
    assert schedule.times(sigma).tolist() == [schedule.timesteps[2].item(), 456, 999]
    free = policy().schedule(STEPS).times(torch.tensor([0.4567]))
    assert free.item() == pytest.approx(456.7, abs=1e-4)


def test_a_scheduler_that_was_changed_after_loading_keeps_its_shift() -> None:
    pipe = sd3(shift=1.0)
    pipe.scheduler.set_shift(5.0)
    expected = FlowMatchEulerDiscreteScheduler(shift=1.0)
    expected.set_shift(5.0)
    expected.set_timesteps(STEPS)
    made = PipelinePolicy(pipe, call=SQUARE)
    assert made.schedule(STEPS).sigmas == tuple(expected.sigmas.tolist())


def test_several_sigmas_in_one_call_are_one_by_one() -> None:
    for family in ("sd3", "wan 2.2"):
        build, call = FAMILIES[family]
        made = PipelinePolicy(build(), call=call)
        velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=4.5)
        x = torch.randn(4, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
        sigma = torch.tensor([made.schedule(STEPS).sigmas[i] for i in (3, 0, 2)] + [0.3333])
        prompt = torch.tensor([1, 0, 0, 1])
        single = [velocity(x[i : i + 1], sigma[i : i + 1], prompt[i : i + 1]) for i in range(4)]
        torch.testing.assert_close(
            velocity(x, sigma, prompt), torch.cat(single), rtol=1e-5, atol=1e-5
        )


def test_chunked_is_whole_to_rounding() -> None:
    whole, parts = policy(), policy(rows=2)
    x = torch.randn(5, *whole.shape(STEPS), generator=torch.Generator().manual_seed(1))
    sigma = torch.tensor([1.0, 0.9, 0.5, 0.5, 0.1])
    prompt = torch.tensor([0, 1, 2, 1, 0])
    results = []
    for made in (whole, parts):
        conditioning = made.encode([*PROMPTS, "a dog"])
        velocity = made.bind(conditioning, steps=STEPS, guidance=4.5)
        media = made.decode(x, conditioning.take(prompt), steps=STEPS, guidance=4.5)
        assert media.dtype == torch.float32 and media.min() >= 0 and media.max() <= 1
        assert not media.requires_grad
        results.append((velocity(x, sigma, prompt), media))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_one_timestep_a_row_is_repeated_for_guidance() -> None:
    times = PerRow(torch.tensor([3.0, 5.0]))
    assert times.expand(4).tolist() == [3, 5, 3, 5]
    assert (1 - times / 10).expand(2).tolist() == pytest.approx([0.7, 0.5])
    with pytest.raises(ValueError, match="expanded"):
        times.expand(3)


def test_timesteps_are_the_schedulers_and_not_recomputed() -> None:
    schedule = PipelineSchedule((1.0, 0.5, 0.0), torch.tensor([999.5, 499.5]), 1000)
    assert schedule.times(torch.tensor([0.5, 0.25, 1.0])).tolist() == [499.5, 250, 999.5]
    other = PipelineSchedule((1.0, 0.5, 0.0), torch.tensor([990.0, 480.0]), 1000)
    assert other.times(torch.tensor([0.5, 1.0])).tolist() == [480, 990]
    with pytest.raises(UserError, match="only at its own levels"):
        other.times(torch.tensor([0.25]))


def test_dropout_is_off() -> None:
    pipe = sd3()
    pipe.transformer.train()
    pipe.text_encoder.train()
    made = PipelinePolicy(pipe, call=SQUARE)
    assert not pipe.transformer.training and not pipe.text_encoder.training
    pipe.transformer.train()
    made.bind(made.encode(PROMPTS), steps=STEPS, guidance=1.0)
    assert not pipe.transformer.training


def test_rows_that_share_the_first_ones_time_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = sd3()
    forward = pipe.transformer.forward

    def first(*args: Any, **named: Any) -> Any:
        time = named["timestep"]
        return forward(*args, **named | {"timestep": time[:1].expand(len(time))})

    monkeypatch.setattr(pipe.transformer, "forward", first)
    made = PipelinePolicy(pipe, call=SQUARE)
    proof = made.prove(PROMPTS, steps=STEPS, guidance=4.5)
    assert (proof.way, proof.mixed) == ("pinned", False)
