"""Whole samples beside the pipeline's own: what holds, and what a wrong number does to it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, StableDiffusionSAGPipeline

from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.whole.whole_proof import WholeProof, deviations, prove_whole
from flowrl.models.diffusers.whole.whole_sample import WholeSample
from tests.support.driving import PROMPTS, STEPS
from tests.support.tiny_modular import MODULAR, MODULAR_CALLS
from tests.support.tiny_pipelines import NAMED, SIZE
from tests.support.tiny_pipelines_unet import sdxl
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.pipelines import tiny

torch.set_num_threads(1)
THREE = [*PROMPTS, "two blue cat"]


def proven(policy: PipelinePolicy, guidance: float | None = 4.5) -> WholeProof:
    replay = policy.prove(PROMPTS, steps=STEPS, guidance=guidance, complete=False, gradient=False)
    return prove_whole(policy, THREE, (), replay)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name",
    [
        "SD1.5",
        "SD3",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("Wan 2.1", "LTX-Video with an image")),
    ],
)
def test_whole_samples_are_the_pipelines_own(name: str, dtype: torch.dtype) -> None:
    family = NAMED[name]
    proof = proven(PipelinePolicy(family.build().to(dtype), call=family.call))
    assert proof.failure() is None
    assert proof.own is not None and proof.alone is not None
    assert proof.own_steps == (name != "Wan 2.1")  # its UniPC is stood in for
    assert proof.rounding.latents > 0
    if dtype == torch.float32:
        assert proof.own.media < 5e-5 and proof.alone.media < 5e-5
    assert len(deviations([proof]).splitlines()) == 3


@pytest.mark.slow
def test_a_scheduler_that_draws_noise_is_compared_where_latents_are_given() -> None:
    pipe = sdxl()
    pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    proof = proven(PipelinePolicy(pipe, call=SIZE))
    assert proof.failure() is None and proof.own is not None and not proof.own_steps


def first_state_off(policy: PipelinePolicy) -> None:
    start = policy.loop.start(STEPS)
    policy.loop._starts[STEPS] = replace(start, noise=1.01 * start.noise)


def velocity_off(policy: PipelinePolicy) -> None:
    velocity = policy.loop.velocity
    vars(policy.loop)["velocity"] = lambda *args: 1.001 * velocity(*args)


@pytest.mark.quick_cases("SD3-velocity_off")
@pytest.mark.parametrize("wrong", [first_state_off, velocity_off])
@pytest.mark.parametrize("name", ["SD1.5", "SD3"])
def test_a_wrong_number_is_a_failure(name: str, wrong: Any) -> None:
    """The first state 1 % too large, or velocities by 0.1 %, which the proof at load cannot see."""
    family = NAMED[name]
    policy = PipelinePolicy(family.build(), call=family.call)
    replay = policy.prove(PROMPTS, steps=STEPS, guidance=4.5, complete=False, gradient=False)
    assert prove_whole(policy, THREE, (), replay).failure() is None
    wrong(policy)
    failure = prove_whole(policy, THREE, (), replay).failure()
    assert failure is not None and "away from the pipeline's own" in failure


@pytest.mark.slow
def test_a_call_within_a_call_leaves_the_attention_as_it_was() -> None:
    """SAG's loop reads attention maps, of three rows in its own call and in flowrl's within it."""
    made = tiny(StableDiffusionSAGPipeline, SPECIALS, SIZES)
    policy = PipelinePolicy(made.pipe, call=made.call)
    for guidance in (4.5, 1.0):
        proof = proven(policy, guidance)
        assert proof.failure() is None and proof.unshown is None
        assert proof.own is not None and proof.own.media < 5e-5


def test_own_steps_are_flowrls_only_where_they_are_claimed() -> None:
    """Wan's UniPC: flowrl's Euler steps end elsewhere, which is printed and no failure."""
    family = NAMED["Wan 2.1"]
    proof = proven(PipelinePolicy(family.build(), call=family.call))
    assert proof.flowrl.latents > 1e-3
    assert replace(proof, own_steps=True).failure() is not None


def test_the_pipeline_stays_as_it_was() -> None:
    pipe = NAMED["SD1.5"].build()
    policy = PipelinePolicy(pipe, call=SIZE)
    before = {name: id(part) for name, part in pipe.components.items()}
    batch = policy.open(THREE, (), STEPS)
    whole = WholeSample(policy, batch, 0, 4.5)
    whole.own()
    whole.stepped()
    assert {name: id(part) for name, part in pipe.components.items()} == before
    assert "step" not in vars(pipe.scheduler)


def test_a_loop_that_writes_into_its_latents_is_compared_from_the_same_ones() -> None:
    """Else the next call begins at what the last one left, and nothing is shown."""
    pipe = NAMED["SD3"].build()
    step = type(pipe.scheduler).step

    class InPlace(type(pipe.scheduler)):
        def step(self, model_output: Any, timestep: Any, sample: Any, **named: Any) -> Any:
            result = step(self, model_output, timestep, sample, **named)[0]
            sample.copy_(result)
            return (sample,)

    pipe.scheduler.__class__ = InPlace
    policy = PipelinePolicy(pipe, call=NAMED["SD3"].call)
    batch = policy.open(THREE, (), STEPS)
    whole = WholeSample(policy, batch, 0, 4.5)
    assert whole.given is not None
    (before,) = (each.clone() for each in whole.given.values())
    first, second = whole.own(), whole.own()
    assert torch.equal(*whole.given.values(), before)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_a_call_that_shows_nothing_is_no_claim() -> None:
    family = NAMED["SD3"]
    proof = proven(PipelinePolicy(family.build(), call=family.call))
    assert proof.unshown is None and proof.repeated
    rough = replace(proof, rounding=replace(proof.rounding, latents=0.5))
    assert rough.unshown is not None and "0.5" in rough.unshown
    assert "not shown" in deviations([rough]) and "not shown" not in deviations([proof])
    twice = replace(proof, repeated=False).unshown
    assert twice is not None and "differs from itself" in twice
    nan = replace(proof, rounding=replace(proof.rounding, media=float("nan")))
    assert nan.unshown is not None


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
def test_a_velocity_becomes_the_prediction_of_a_schedulers_kind(kind: str) -> None:
    """Of x = (1 - s) x0 + s noise and v = noise - x0, scaled to a variance-preserving state."""
    rng = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 3, 5, generator=rng, dtype=torch.float64)
    s = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)[:, None]
    x, v, size = (1 - s) * x0 + s * noise, noise - x0, ((1 - s) ** 2 + s**2).rsqrt()
    sample: Any = SimpleNamespace(policy=SimpleNamespace(loop=SimpleNamespace(traits=None)))
    sample.policy.loop.traits = SimpleNamespace(kind=kind)
    wanted = {
        "epsilon": noise,
        "sample": x0,
        "v_prediction": (1 - s) * size * noise - s * size * x0,
    }
    found = WholeSample._prediction(sample, x, x, v, s[:, 0])
    torch.testing.assert_close(found, wanted[kind], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_rows_are_decoded_together_where_the_decoder_draws_noise() -> None:
    """As the pipeline's own call does: LTX-2.5's decoder is a diffusion model, and a run decodes
    its samples one by one, with other noise."""
    made = PipelinePolicy(MODULAR["ltx25"](), call=MODULAR_CALLS["ltx25"])
    proof = made.prove(PROMPTS, steps=3, guidance=1.0)
    whole = prove_whole(made, PROMPTS, (), proof)
    assert proof.drawn and whole.failure() is None
    assert whole.own is not None and whole.own.media == 0
