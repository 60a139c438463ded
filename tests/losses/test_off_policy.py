"""The settings of REC: each bound alone, on both of its sides."""

import pytest

from flowrl.losses.off_policy import REC


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-9},
        {"pull": 0.0},
        {"pull": 0.1},
        {"low": 0.6, "far_low": 0.6},
        {"far_low": 1.0},
        {"high": 2.0, "far_high": 2.0},
    ],
)
def test_settings_at_their_bounds_are_accepted(settings):
    assert REC(**settings)
