"""Which frames of a video are scored, and how their scores become one."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewards import Samples, check_reward
from rewards.perception.frames import AGGREGATES, OverFrames, frame_indices


def level(samples: Samples) -> torch.Tensor:
    """The first pixel; NaN where it is above 0.9."""
    found = torch.stack([picture[0, 0, 0] for picture in samples.media])
    return torch.where(found > 0.9, torch.nan, found)


def clips(*levels: list[float]) -> Samples:
    media = [torch.tensor(row)[:, None, None, None].expand(-1, 3, 4, 4) for row in levels]
    n = len(levels)
    return Samples(media, ["p"] * n, torch.arange(n), [{"row": i} for i in range(n)])


@pytest.mark.parametrize(
    ("frames", "aggregate", "wanted"),
    [
        ("all", "mean", 0.3),
        ("all", "min", 0.1),
        ("all", "max", 0.6),
        ("all", "last", 0.2),
        ("first", "mean", 0.3),
        ("every 2", "mean", (0.3 + 0.6) / 2),
        ("every 3", "min", 0.2),
        (2, "mean", (0.1 + 0.2) / 2),  # the middles of the two halves
        (9, "mean", 0.3),
    ],
)
def test_frames_and_aggregates(frames, aggregate, wanted):
    reward = OverFrames(level, "level", frames, aggregate)
    video = [0.3, 0.1, 0.6, 0.2]
    assert reward(clips(video)).item() == pytest.approx(wanted)
    stacked = clips(video, video[::-1])
    whole = Samples(torch.stack(list(stacked.media)), stacked.prompts, stacked.group)
    torch.testing.assert_close(reward(stacked), reward(whole))


def test_unscored_frames_do_not_count():
    reward = OverFrames(level, "level", "all", "mean")
    score = reward(clips([0.2, 0.95, 0.4], [0.95, 0.95], [0.5]))
    assert score[0] == pytest.approx(0.3) and score[1].isnan() and score[2] == 0.5
    assert OverFrames(level, "level", "all", "last")(clips([0.2, 0.95])).item() == pytest.approx(
        0.2
    )


def test_a_frame_keeps_its_videos_prompt_group_and_meta():
    seen = []

    def spy(samples: Samples) -> torch.Tensor:
        seen.append(
            (list(samples.prompts), samples.group.tolist(), [m["row"] for m in samples.meta])
        )
        return level(samples)

    videos = clips([0.1, 0.2], [0.3])
    videos = Samples(videos.media, ["p", "q"], torch.tensor([5, 6]), videos.meta)
    OverFrames(spy, "spy", "all", "mean")(videos)
    assert seen == [(["p", "p", "q"], [5, 5, 6], [0, 0, 1])]


def test_pictures_pass_through():
    media = torch.full((2, 3, 4, 4), 0.25)
    reward = OverFrames(level, "level", "first", "min")
    assert reward(Samples(media, ["p"] * 2, torch.arange(2))).tolist() == [0.25, 0.25]


@given(st.integers(1, 40), st.integers(1, 60))
def test_a_number_of_frames_is_spread_evenly(count, wanted):
    picked = frame_indices(count, wanted)
    assert len(picked) == min(wanted, count) and sorted(set(picked)) == picked
    assert picked[0] >= 0 and picked[-1] < count
    gaps = [b - a for a, b in itertools.pairwise(picked)]
    assert max(gaps, default=1) - min(gaps, default=1) <= 1
    assert abs(picked[0] - (count - 1 - picked[-1])) <= 1  # the same room at both ends


@pytest.mark.parametrize("frames", ["every 0", "every", "last", 0, -1, ""])
def test_frames_that_mean_nothing_are_refused(frames):
    with pytest.raises(ValueError, match="frames: expected all, first, 'every 4' or a number"):
        check_reward("clip", {"frames": frames})


def test_every_aggregate_is_tried_above():
    assert set(AGGREGATES) == {"mean", "min", "max", "last"}
