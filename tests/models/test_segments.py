"""Videos that are made in segments (Wan-Animate 2), and videos of any length in columns."""

from typing import Any

import diffusers
import pytest
import torch

from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.sizes.by_size import rows_by_size
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from tests.support.advice import advice
from tests.support.driving import PROMPTS
from tests.support.flex_on_cpu import flex_on_cpu
from tests.support.tiny_modular import MODULAR, MODULAR_CALLS
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.calls_videos import VIDEO_SPECIALS
from tests.support.zoo.pipelines import tiny

torch.set_num_threads(1)
STEPS = 3


def frames(*names: str, side: int, count: int) -> dict[str, Any]:
    return dict(columns.placeholder_images(names, side, side, count))


@pytest.mark.slow
def test_a_driving_video_has_as_many_parts_as_segments() -> None:
    """Rows of one segment and of two in one run: each has a loop, whose whole samples are the
    pipeline's own. What a segment is made from is decoded in each velocity."""
    texts = [*PROMPTS, *PROMPTS]
    meta = [frames("image", "driving_video", side=32, count=count) for count in (5, 5, 9, 9)]
    meta[1], meta[3] = meta[0], meta[2]
    with flex_on_cpu():
        made = PipelinePolicy(MODULAR["wan_animate"](), call=MODULAR_CALLS["wan_animate"])
        groups = rows_by_size(made, texts, meta)
        assert [group.rows for group in groups] == [[0, 1], [2, 3]]
        for group, parts in zip(groups, (0, 2), strict=True):
            rows = group.take(meta)
            proof = group.policy.prove(PROMPTS, steps=STEPS, guidance=4.5, meta=rows)
            assert len(proof.parts) == parts and proof.own_steps
            whole = prove_whole(
                group.policy, PROMPTS, group.policy.loop.extras(rows, PROMPTS), proof
            )
            assert whole.failure() is None and whole.own is not None and whole.own.media == 0
            clockwork = group.policy.loop.driver.clockwork
            assert (clockwork is not None and clockwork.reads_decoded) == (parts > 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AnyFlowPipeline", "AnyFlowFARPipeline"])
def test_a_loop_that_asks_for_negative_encodings_is_driven_without_guidance(name: str) -> None:
    """AnyFlow puts them before the prompts' wherever there are any, whatever the scale."""
    with flex_on_cpu():
        built = tiny(getattr(diffusers, name), SPECIALS | VIDEO_SPECIALS, SIZES)
        made = PipelinePolicy(built.pipe, call=built.call)
        for guidance in (1.0, 4.5):
            proof = made.prove(PROMPTS, steps=STEPS, guidance=guidance)
            assert proof.own_steps
    (encoding,) = made.loop.traits.encodings.values()
    assert encoding.plain is None and encoding.guided_only == (1,)


def test_a_column_of_videos_sets_the_number_of_frames() -> None:
    """Which was that of a placeholder, 9, so that any other video was refused."""
    built = tiny(diffusers.WanVideoToVideoPipeline, SPECIALS | VIDEO_SPECIALS, SIZES)
    made = PipelinePolicy(built.pipe, call=built.call)
    meta = [frames("video", side=16, count=count) for count in (5, 9, 5)]
    groups = rows_by_size(made, ["a", "b", "c"], meta)
    assert [group.rows for group in groups] == [[0, 2], [1]]
    for group, latent_frames in zip(groups, (3, 5), strict=True):
        batch = group.policy.encode(group.take(["a", "b", "c"])[:1], group.take(meta)[:1])
        shape = group.policy.shape(STEPS)
        assert shape[1] == latent_frames
        x, level = torch.zeros(1, *shape), torch.tensor([group.policy.schedule(STEPS).sigmas[0]])
        velocity = group.policy.bind(batch, steps=STEPS, guidance=1.0)
        with torch.no_grad():
            assert velocity(x, level, torch.tensor([0])).shape == x.shape


def test_videos_of_several_lengths_do_not_share_a_batch() -> None:
    built = tiny(diffusers.WanVideoToVideoPipeline, SPECIALS | VIDEO_SPECIALS, SIZES)
    made = PipelinePolicy(built.pipe, call=built.call)
    meta = [frames("video", side=16, count=count) for count in (5, 9)]
    advice(
        "makes latents {} from this image, video or sound but {} from others: use images of one "
        "size, and videos and sounds of one length",
        lambda: made.encode(["a", "b"], meta),
        lambda: made.encode(["a", "b"], meta[1:] * 2),
    )
