"""Spreads and paired errors of held-out scores."""

import pytest
import torch

from flowrl.media.statistics import Statistics
from flowrl.run.evaluate.evaluate import HeldOutResult, TrialSamples, merged_trial
from rewards import Samples, Scores


def evaluated(values: list[float], unscored: int | None = None) -> HeldOutResult:
    samples = Samples(torch.zeros(len(values), 3, 2, 2), ["a"] * 4, torch.tensor([0, 0, 1, 1]))
    scored = torch.tensor([[row != unscored] for row in range(len(values))])
    scores = Scores(torch.tensor(values)[:, None], scored, ("strict",))
    bright = Statistics({"image/brightness": 0.5}, {"image/brightness": torch.tensor(values)})
    return merged_trial(TrialSamples(samples, bright), scores)


def test_the_error_of_a_gain_is_that_of_paired_differences():
    base, now = evaluated([0.0, 1.0, 0.0, 1.0]), evaluated([0.5, 1.5, 0.5, 1.6])
    found = now.spreads({"strict": base.columns["strict"].tolist()})
    gains = torch.tensor([0.5, 0.5, 0.5, 0.6], dtype=torch.float64)
    assert found["held_out_gain_error/strict"] == pytest.approx(float(gains.std()) / 2, rel=1e-5)
    assert found["held_out_std/strict"] == pytest.approx(float(now.columns["strict"].std()))
    assert found["held_out_std/image/brightness"] == pytest.approx(found["held_out_std/strict"])
    assert "held_out_gain_error/image/brightness" not in found


def test_unscored_samples_have_no_part_in_them():
    base, now = evaluated([0.0, 1.0, 0.0, 9.0], unscored=3), evaluated([0.5, 1.5, 0.6, 1.6])
    found = now.spreads({"strict": base.columns["strict"].tolist()})
    gains = torch.tensor([0.5, 0.5, 0.6], dtype=torch.float64)
    expected = float(gains.std()) / 3**0.5
    assert found["held_out_gain_error/strict"] == pytest.approx(expected, rel=1e-5)


def test_other_counts_of_samples_are_not_compared():
    found = evaluated([0.0, 1.0, 0.0, 1.0]).spreads({"strict": [0.0, 1.0]})
    assert set(found) == {"held_out_std/strict", "held_out_std/image/brightness"}
