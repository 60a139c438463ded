"""Rows that know of each other: refused or told, by a tolerance that is measured."""

from typing import Any

import diffusers
import pytest
import torch

from flowrl.errors import UserError
from flowrl.models.diffusers.batch import Scales
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.whole.proof_cache import CachedProof
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from tests.support.driving import PROMPTS, STEPS
from tests.support.tiny_pipelines import NAMED, SQUARE, qwen_image, sd3
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.pipelines import tiny

torch.set_num_threads(1)


def mixing(pipe: Any, share: float, monkeypatch: pytest.MonkeyPatch) -> PipelinePolicy:
    """Each row's output has a share of the next row's in it."""
    forward = pipe.transformer.forward

    def mixed(*args: Any, **named: Any) -> Any:
        output = forward(*args, **named)[0]
        return (output + share * output.roll(1, 0),)

    monkeypatch.setattr(pipe.transformer, "forward", mixed)
    return PipelinePolicy(pipe, call=SQUARE | {"negative_prompt": "bad"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_a_hundredth_of_a_neighbour_is_refused(
    dtype: torch.dtype, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = mixing(sd3().to(dtype), 0.01, monkeypatch)
    with pytest.raises(UserError, match="depends on the other rows of its batch"):
        made.prove(PROMPTS, steps=STEPS, guidance=guidance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["SD3", "Qwen-Image", "Z-Image", "Wan 2.1", "SD1.5", "HunyuanVideo"]
)
def test_rounding_of_half_precision_under_guidance_is_not(name: str) -> None:
    family = NAMED[name]
    made = PipelinePolicy(family.build().to(torch.bfloat16), call=family.call)
    proof = made.prove(PROMPTS, steps=STEPS, guidance=5.0)
    assert proof.padding is None


@pytest.mark.parametrize("gain", [1.0, 10.0, 40.0])
def test_what_a_deep_network_makes_of_rounding_is_not(
    gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Wan's 30 layers in bfloat16: a row alone is rounded otherwise, by one unit and before the
    first block, and what follows enlarges it to 5 % of the prediction (gain 10) and more."""
    pipe = sd3().to(torch.bfloat16)
    forward, embed = pipe.transformer.forward, pipe.transformer.pos_embed.forward

    def rounded(x: torch.Tensor) -> torch.Tensor:
        out, rng = embed(x), torch.Generator().manual_seed(3)
        if len(x) > 1:
            return out
        signs = torch.randint(0, 2, out.shape[1:], generator=rng) * 2 - 1
        return (out.float() * (1 + torch.finfo(out.dtype).eps * signs)).to(out.dtype)

    def steep(*args: Any, **named: Any) -> Any:
        output = forward(*args, **named)[0]
        return (torch.sin(gain * output.float()).to(output.dtype),)

    monkeypatch.setattr(pipe.transformer.pos_embed, "forward", rounded)
    monkeypatch.setattr(pipe.transformer, "forward", steep)
    made = PipelinePolicy(pipe, call=SQUARE | {"negative_prompt": "bad"})
    assert made.prove(PROMPTS, steps=STEPS, guidance=1.0).padding is None


@pytest.mark.slow
def test_the_states_dtype_after_the_first_step_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """HunyuanVideo rounds its timesteps to it: float32 at the first step, bfloat16 later."""
    family, times = NAMED["HunyuanVideo"], []
    made = PipelinePolicy(family.build().to(torch.bfloat16), call=family.call)
    proof = made.prove(PROMPTS, steps=STEPS, guidance=1.0)
    whole = prove_whole(made, PROMPTS, (), proof)
    assert whole.failure() is None and whole.own is not None and whole.own.media == 0
    again = PipelinePolicy(family.build().to(torch.bfloat16), call=family.call)
    CachedProof.of(made, []).use(again)
    assert again.loop.traits.later == torch.bfloat16
    conditioning, schedule = again.encode(PROMPTS), again.schedule(STEPS)
    velocity = again.bind(conditioning, steps=STEPS, guidance=1.0)
    x = torch.randn(2, *again.shape(STEPS), generator=torch.Generator().manual_seed(1))
    again.denoisers[0].register_forward_pre_hook(
        lambda _, args, named: times.append(named["timestep"]), with_kwargs=True
    )
    with torch.no_grad():
        for levels in (schedule.sigmas[:1] * 2, schedule.sigmas[1:2] * 2, schedule.sigmas[:2]):
            velocity(x, torch.tensor(levels), torch.arange(2))
    assert [t.dtype for t in times] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert times[2].tolist() == [times[0][0].item(), times[1][0].item()]


def test_padding_without_a_mask_is_told() -> None:
    """CogView4 pads to the longest prompt of a batch: diffusers' own, so it is no refusal."""
    made = tiny(diffusers.CogView4Pipeline, SPECIALS, SIZES)
    proof = PipelinePolicy(made.pipe, call=made.call).prove(PROMPTS, steps=STEPS, guidance=4.5)
    assert proof.padding is not None and proof.padding > 1e-4
    assert "on the prompts encoded with it" in str(proof)


@pytest.mark.slow
def test_negative_prompts_as_a_column_of_any_lengths() -> None:
    """Of other lengths in the first two rows, and of equal ones there and others behind."""
    for negatives in (
        ["bad", "a bad blurry photo of the table", "bad blurry"],
        ["bad", "bad", "a bad blurry photo of the table"],
    ):
        meta = [{"negative_prompt": text} for text in negatives]
        prompts = [*PROMPTS, "a dog on the left"]
        made = PipelinePolicy(qwen_image(), call=SQUARE)
        made.prove(PROMPTS, steps=STEPS, guidance=4.5, meta=meta[:2])
        conditioning = made.encode(prompts, meta)
        velocity = made.bind(conditioning, steps=STEPS, guidance=4.5)
        x = torch.randn(3, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
        sigma, rows = torch.full((3,), made.schedule(STEPS).sigmas[1]), torch.tensor([2, 0, 1])
        with torch.no_grad():
            among = velocity(x[rows], sigma, rows)[rows.argsort()]
        for row in range(3):
            alone = made.encode(prompts[row : row + 1], meta[row : row + 1])
            single = made.bind(alone, steps=STEPS, guidance=4.5)
            with torch.no_grad():
                ours = among[row : row + 1]
                theirs = single(x[row : row + 1], sigma[:1], torch.tensor([0]))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# calls of the denoiser in a proof at load of 4 steps, before rows were compared with neighbours:
# at guidance 4.5 and 1, from the constructor on, at commit a46ab0e (Wan and Qwen call it twice a
# step under guidance)
BEFORE = {"SD1.5": 36, "SD3": 36, "Wan 2.1": 58, "Qwen-Image": 58}


@pytest.mark.quick_cases("SD3-scales1", "Qwen-Image-scales1")
@pytest.mark.parametrize("scales", [Scales(4.5, 1.0), Scales(1.0, 4.5)])
@pytest.mark.parametrize("name", BEFORE)
def test_the_proof_calls_the_denoiser_at_most_twenty_times_more(name: str, scales: Scales) -> None:
    family, calls = NAMED[name], []
    pipe = family.build()
    pipe.components.get("transformer", pipe.components.get("unet")).register_forward_hook(
        lambda *args: calls.append(1)
    )
    made = PipelinePolicy(pipe, call=family.call).guided(*scales)
    made.proofs(PROMPTS, STEPS)
    assert BEFORE[name] < len(calls) <= BEFORE[name] + 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["StableDiffusionPipelineSafe", "KandinskyInpaintPipeline", "BriaFiboPipeline"]
)
def test_guidance_of_one_is_proved_as_any(name: str) -> None:
    """Prompts without negative ones are another encoding there."""
    made = tiny(getattr(diffusers, name), SPECIALS, SIZES)
    policy = PipelinePolicy(made.pipe, call=made.call)
    for guidance in (1.0, 4.5):
        assert policy.prove(PROMPTS, steps=STEPS, guidance=guidance).first is not None
