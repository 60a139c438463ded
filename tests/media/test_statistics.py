import pytest
import torch

from flowrl.media.statistics import (
    Statistics,
    image_statistics,
    merged_means,
    text_statistics,
)

GROUP = torch.tensor([0, 0, 1, 1])


def test_statistics_of_pictures_with_known_answers():
    grey = torch.full((4, 3, 8, 8), 0.5)
    got = image_statistics(grey, GROUP).means
    assert got["brightness"] == pytest.approx(0.5)
    assert got["saturation"] == got["edges"] == got["diversity"] == 0
    assert got["entropy"] == pytest.approx(0, abs=1e-6)
    red = torch.zeros(4, 3, 8, 8)
    red[:, 0] = 1.0
    assert image_statistics(red, GROUP).means["saturation"] == pytest.approx(1.0)
    assert image_statistics(red, GROUP).means["brightness"] == pytest.approx(0.299)
    halves = torch.zeros(4, 3, 8, 8)
    halves[..., 4:] = 1.0
    got = image_statistics(halves, GROUP).means
    assert got["entropy"] == pytest.approx(1.0)  # two colours, evenly
    assert got["edges"] == pytest.approx(1 / 7)  # one column of seven


def test_diversity_looks_inside_groups_only():
    images = torch.zeros(4, 3, 8, 8)
    images[2:] = 1.0  # groups differ, samples of a group do not
    assert image_statistics(images, GROUP).means["diversity"] == 0
    images[1] = 0.5
    assert image_statistics(images, GROUP).means["diversity"] == pytest.approx((0.5 + 0) / 2)


def test_large_pictures_and_videos_are_taken_too():
    large = image_statistics(torch.rand(2, 3, 200, 100), torch.tensor([0, 0])).means
    video = image_statistics(torch.rand(2, 5, 3, 16, 16), torch.tensor([0, 0])).means
    assert large.keys() == video.keys()


def test_columns_are_the_statistics_of_each_sample():
    media, group = torch.rand(5, 3, 8, 8), torch.tensor([0, 0, 0, 1, 1])
    whole = image_statistics(media, group)
    for row in range(5):
        alone = image_statistics(media[row : row + 1], group[:1]).means
        for name in ("brightness", "saturation", "edges", "entropy"):
            assert float(whole.columns[name][row]) == pytest.approx(alone[name], rel=1e-5)
    away = [(media[3] - media[4]).square().mean().sqrt()] * 2
    assert whole.columns["diversity"][3:].tolist() == pytest.approx(torch.stack(away).tolist())
    first = [(media[0] - media[k]).square().mean().sqrt() for k in (1, 2)]
    assert float(whole.columns["diversity"][0]) == pytest.approx(float(sum(first)) / 2)


@pytest.mark.parametrize("shares", [(2, 1), (1, 2), (1, 1, 1)])
def test_means_of_processes_are_those_of_all_samples(shares):
    """Three groups of two samples on processes that have unequal shares of them."""
    media, group = torch.rand(6, 3, 8, 8), torch.arange(3).repeat_interleave(2)
    texts, lengths = ["a", "b", "a", "a", "", "c"], torch.arange(6)

    def made(rows: slice) -> tuple[Statistics, Statistics]:
        words = texts[rows], group[rows], lengths[rows], (lengths % 2)[rows]
        return image_statistics(media[rows], group[rows]), text_statistics(*words)

    whole, at, parts = made(slice(None)), 0, []
    for share in shares:
        parts.append(made(slice(at, at := at + 2 * share)))
    for kind in (0, 1):
        merged = merged_means([(part[kind].means, part[kind].size) for part in parts])
        assert merged == pytest.approx(whole[kind].means, rel=1e-6)
    assert merged_means([(whole[0].means, 6)]) == whole[0].means
