import pytest
import torch

from flowrl.media.statistics import Alarms, image_statistics

GROUP = torch.tensor([0, 0, 1, 1])


def test_statistics_of_pictures_with_known_answers():
    grey = torch.full((4, 3, 8, 8), 0.5)
    got = image_statistics(grey, GROUP)
    assert got["brightness"] == pytest.approx(0.5)
    assert got["saturation"] == got["edges"] == got["diversity"] == 0
    assert got["entropy"] == pytest.approx(0, abs=1e-6)
    red = torch.zeros(4, 3, 8, 8)
    red[:, 0] = 1.0
    assert image_statistics(red, GROUP)["saturation"] == pytest.approx(1.0)
    assert image_statistics(red, GROUP)["brightness"] == pytest.approx(0.299)
    halves = torch.zeros(4, 3, 8, 8)
    halves[..., 4:] = 1.0
    got = image_statistics(halves, GROUP)
    assert got["entropy"] == pytest.approx(1.0)  # two colours, evenly
    assert got["edges"] == pytest.approx(1 / 7)  # one column of seven


def test_diversity_looks_inside_groups_only():
    images = torch.zeros(4, 3, 8, 8)
    images[2:] = 1.0  # groups differ, samples of a group do not
    assert image_statistics(images, GROUP)["diversity"] == 0
    images[1] = 0.5
    assert image_statistics(images, GROUP)["diversity"] == pytest.approx((0.5 + 0) / 2)


def test_large_pictures_and_videos_are_taken_too():
    large = image_statistics(torch.rand(2, 3, 200, 100), torch.tensor([0, 0]))
    video = image_statistics(torch.rand(2, 5, 3, 16, 16), torch.tensor([0, 0]))
    assert large.keys() == video.keys()


def run(rewards: list[float], diversity: list[float] | None = None) -> list[str]:
    alarms, signs = Alarms(), []
    for i, reward in enumerate(rewards):
        spread = diversity[i] if diversity else 0.3
        signs += alarms.watch(reward, 0.2, {"diversity": spread})
    return signs


def test_a_rising_reward_raises_no_alarm():
    assert run([0.5 + 0.01 * i for i in range(30)]) == []


def test_a_falling_reward_raises_one_once():
    (sign,) = run([0.8] * 10 + [0.8 - 0.05 * i for i in range(10)])
    assert "reward fell" in sign


def test_samples_that_become_alike_raise_one_while_the_reward_rises():
    diversity = [0.3] * 10 + [0.3 - 0.02 * i for i in range(14)]
    (sign,) = run([0.5 + 0.01 * i for i in range(24)], diversity)
    assert "diversity" in sign


def test_alarms_go_on_after_a_checkpoint():
    rewards = [0.8] * 10 + [0.8 - 0.05 * i for i in range(10)]
    alarms = Alarms()
    for reward in rewards[:12]:
        alarms.watch(reward, 0.2, {"diversity": 0.3})
    again = Alarms()
    again.restore(alarms.state())
    later = [alarms.watch(r, 0.2, {"diversity": 0.3}) for r in rewards[12:]]
    assert later == [again.watch(r, 0.2, {"diversity": 0.3}) for r in rewards[12:]]
    assert any(later)
