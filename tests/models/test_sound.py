"""Videos with sound: loops that step several states, driven by the pipelines' own calls."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from flowrl.errors import UserError
from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.diffusers.call.levels.schedule import Way
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.replay.own_call import record
from flowrl.models.diffusers.sizes.by_size import rows_by_size
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from flowrl.settings.sections.data import DataSet
from samplers import Chain, ConstantSDE
from tests.support.advice import advice
from tests.support.driving import PROMPTS
from tests.support.tiny_pipelines import NAMED
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.calls_videos import LTX23, VIDEO_SPECIALS
from tests.support.zoo.pipelines import tiny

pytestmark = pytest.mark.long

torch.set_num_threads(1)
STEPS = 3
UNGUIDED = {
    "audio_guidance_scale": 1.0, "stg_scale": 0.0, "audio_stg_scale": 0.0,
    "modality_scale": 1.0, "audio_modality_scale": 1.0,
}  # fmt: skip
EXACT = (
    "LTX2Pipeline", "LTX2ImageToVideoPipeline", "LTX2ConditionPipeline", "LTX2InContextPipeline",
)  # fmt: skip


def sounding(name: str = "LTX2Pipeline", **more: Any) -> PipelinePolicy:
    made = tiny(getattr(diffusers, name), SPECIALS | VIDEO_SPECIALS, SIZES)
    return PipelinePolicy(made.pipe, call={**made.call, **more})


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_whole_samples_with_sound_are_the_pipelines_own(name: str):
    """With all guidance of its own (text, perturbed blocks, parts that do not see each other)."""
    made = sounding(name)
    proof = made.prove(PROMPTS, steps=STEPS, guidance=4.5)
    assert (proof.parts, proof.way, proof.levels) == (("video", "audio"), "pinned", True)
    assert "velocity of video and audio and decoder equal" in str(proof) and proof.mixed
    whole = prove_whole(made, PROMPTS, (), proof)
    assert whole.failure() is None and whole.unshown is None
    assert whole.own is not None and whole.own.latents == whole.flowrl.latents == 0
    assert whole.own.media == whole.flowrl.media == 0


@pytest.mark.slow
def test_the_newer_parts_of_the_class_are_driven_too():
    """LTX-2.3: gated attention, texts that follow the level, a sound of three times the rate."""
    made = tiny(diffusers.LTX2Pipeline, SPECIALS | VIDEO_SPECIALS | LTX23, SIZES)
    policy = PipelinePolicy(made.pipe, call=made.call)
    proof = policy.prove(PROMPTS, steps=STEPS, guidance=4.5)
    assert proof.parts == ("video", "audio") and proof.mixed
    whole = prove_whole(policy, PROMPTS, (), proof)
    assert whole.failure() is None and whole.own is not None and whole.own.media == 0


@pytest.mark.parametrize("name", ["LTX-2", "LTX-Video"])
def test_a_state_is_driven_in_the_memory_order_of_the_pipelines_own(name: str):
    """Matrix products of a transposed state round differently: LTX packs its noise by a view."""
    silent = NAMED["LTX-Video"]
    policy = (
        sounding(**UNGUIDED)
        if name == "LTX-2"
        else PipelinePolicy(silent.build(), call=dict(silent.call))
    )
    strides = list[tuple[int, ...]]()

    def note(_module, _args, named) -> None:
        strides.append(named["hidden_states"].stride())

    record(policy.loop, PROMPTS, (), 2, 1.0)
    rows = policy.encode(PROMPTS)
    with policy.pipe.transformer.register_forward_pre_hook(note, with_kwargs=True):
        steps, _, _ = record(policy.loop, PROMPTS, (), 2, 1.0)
        own = strides[0]
        assert own[1] < own[2], "the noise is a transposed view"
        way = Way(2, 1.0, forward=False, mixed=False)
        policy.loop.received(steps[0].state, torch.ones(len(PROMPTS)), rows, way)
    assert strides[-1] == own


def test_both_ways_lead_to_a_step():
    """The loop's times and levels pinned, and the loop itself up to the step, with its parts."""
    made = sounding()
    steps, _, _ = record(made.loop, PROMPTS, (), STEPS, 4.5)
    rows, sigmas = made.encode(PROMPTS), made.schedule(STEPS).sigmas
    assert len(steps) == STEPS
    for way in (
        Way(STEPS, 4.5, forward=False, mixed=True, levels=True),
        Way(STEPS, 4.5, forward=True, mixed=False),
    ):
        for k, step in enumerate(steps):
            assert step.state is not None
            with torch.no_grad():
                got = made.loop.received(step.state, torch.full((2,), sigmas[k]), rows, way)
            assert torch.equal(got.output, step.output)


@pytest.mark.slow
def test_no_guidance_is_found_where_the_sound_has_none_of_its_own():
    made = sounding(**UNGUIDED)
    assert made.scale("none") == 1.0
    proof = made.prove(PROMPTS, steps=STEPS, guidance=1.0)
    assert proof.evaluations == 1 and not prove_whole(made, PROMPTS, (), proof).failure()
    with pytest.raises(UserError, match="also applies guidance at scales 1 and 0"):
        sounding().scale("none")


@pytest.mark.slow
def test_linear_light_is_refused():
    with pytest.raises(UserError, match=r"not to images in 0\.\.1"):
        sounding("LTX2HDRPipeline").prove(PROMPTS, steps=STEPS, guidance=4.5)


@pytest.mark.slow
def test_a_batch_has_video_and_sound_and_ratio_one():
    made = sounding(**UNGUIDED).guided(1.0, 1.0)
    assert made.layout is not None and made.shape(STEPS) == (made.layout.size,)
    batch = MediaBatch(made, made.encode(PROMPTS), STEPS)
    chain = Chain(ConstantSDE(0.3), 2)
    (rollout,) = batch.rollouts(chain, [4, 7], seed=1, iteration=0)
    shown = batch.media(rollout)
    assert shown.audio is not None and shown.audio.rate == 24_000
    assert shown.media.shape[:2] == (4, 9) and shown.audio.waveform.shape[:2] == (4, 2)
    alone = MediaBatch(made, made.encode(PROMPTS[1:]), STEPS)
    (other,) = alone.rollouts(chain, [7], seed=1, iteration=0)
    torch.testing.assert_close(other.x0, rollout.x0[2:], rtol=1e-4, atol=1e-5)
    made.sizes.sampling = made.sizes.decoding = 3
    (again,) = batch.rollouts(chain, [4, 7], seed=1, iteration=0)
    cut = batch.media(again)
    assert cut.audio is not None
    torch.testing.assert_close(cut.audio.waveform, shown.audio.waveform, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_picture_fixes_the_first_frame_and_the_sound_is_whole():
    """The state has what steps move: every frame but the first, and all of the sound."""
    made = sounding("LTX2ImageToVideoPipeline")
    assert made.layout is not None
    video, audio = made.layout.shapes
    assert len(video) == 4 and len(audio) == 2
    assert made.layout.size == torch.Size(video).numel() + torch.Size(audio).numel()


@pytest.mark.slow
def test_rows_of_another_size_are_left_out_or_lose_their_size(tmp_path: Path):
    made, file = sounding(**UNGUIDED), tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a"}, {"prompt": "b", "height": 32}, {"prompt": "c"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def sizes(**selected: Any) -> int:
        prompts = DataSet(source=str(file), **selected).read("prompt", "prompts.train")
        return len(rows_by_size(made, *prompts.take(range(len(prompts)))))

    left = advice(
        "{}: it has another size than {}, but videos with sound need one size: choose rows with "
        "`where`, or leave their sizes out with `keep`",
        sizes,
        lambda: (sizes(where={"height": 32}), sizes(keep=["prompt"])),
    )
    assert left == (1, 1)
