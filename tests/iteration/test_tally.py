"""Means and extremes of a step's metrics, over chunks and processes."""

import pytest
import torch

from flowrl.iteration import tally
from flowrl.iteration.tally import Tally


def filled(*ratios: float) -> Tally:
    part = Tally()
    values = torch.tensor(ratios)
    part.add("ratio", values, torch.ones(len(ratios), dtype=torch.bool))
    part.add("mismatch", values - 1, torch.tensor([True] + [False] * (len(ratios) - 1)))
    return part


def test_means_count_entries_and_extremes_are_of_all_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, elsewhere = filled(1.5, 0.5, 1.0), filled(2.0)
    assert here.means() == {
        "ratio": 1.0, "ratio_max": 1.5, "ratio_min": 0.5, "mismatch": 0.5, "mismatch_max": 0.5,
    }  # fmt: skip
    elsewhere.settle()
    monkeypatch.setattr(tally, "gather_object", lambda parts: [*parts, elsewhere])
    assert here.means() == {
        "ratio": 1.25, "ratio_max": 2.0, "ratio_min": 0.5, "mismatch": 0.75, "mismatch_max": 1.0,
    }  # fmt: skip
