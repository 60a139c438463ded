"""Spreads and paired errors of held-out scores."""

from types import SimpleNamespace

import pytest
import torch

from flowrl.iteration.records import DrawShare
from flowrl.iteration.rows import scored_samples
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


def test_statistics_of_unequal_shares_are_weighted_by_their_samples():
    """Two samples on one process and one on the other; a third has none and keeps company."""
    parts = [
        Statistics({"x": mean}, {"x": torch.full((n,), mean)}) for n, mean in ((2, 0.5), (1, 2.0))
    ]
    samples = Samples(torch.zeros(1, 3, 2, 2), ["a"], torch.tensor([0]))
    scores = Scores(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), ("strict",))

    def gather(mine):
        return [*parts, None] if isinstance(mine[0], Statistics) else mine

    merged = merged_trial(TrialSamples(samples, parts[1]), scores, gather=gather)
    assert merged.metrics["x"] == pytest.approx(1.0)


def test_company_counts_as_no_scored_sample():
    """The second process had no draw of its own, and ran the first one beside."""
    rollouts, found = [SimpleNamespace(prompt=[0] * 5)], SimpleNamespace(scored=2)
    for counts, scored in ((True, 7), (False, 0)):
        drawn = SimpleNamespace(counts=counts, shares=(DrawShare(1, range(1), counts),))
        samples = SimpleNamespace(drawn=drawn, rollouts=rollouts, unit=found)
        assert scored_samples(samples, SimpleNamespace(scored=0)) == scored
