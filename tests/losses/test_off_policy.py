"""The settings of REC: each bound alone, on both of its sides."""

import pytest

from flowrl.errors import UserError
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


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temperature": 0.0}, "temperature 0.0 must be above 0"),
        ({"temperature": -1.0}, "temperature -1.0 must be above 0"),
        ({"pull": -0.1}, "its pull -0.1 at least 0"),
        ({"low": 0.0}, "0 < low <= far_low <= 1"),
        ({"low": 0.7}, "0 < low <= far_low <= 1"),
        ({"far_low": 1.1}, "far_low <= 1"),
        ({"high": 0.0}, "0 < high <= far_high"),
        ({"high": 2.1}, "0 < high <= far_high"),
    ],
)
def test_settings_past_a_bound_are_named(settings, says):
    with pytest.raises(UserError, match=says):
        REC(**settings)
