"""Integers that are too large for a float, which `math.isfinite` raises an OverflowError for."""

import math

import pytest

from flowrl.credit.prompt_weights import as_weight
from samplers import number_ranges
from samplers.number_ranges import NumberRange, is_finite

HUGE = 10**400  # a YAML file can have it
RANGES = {
    name: value for name, value in vars(number_ranges).items() if isinstance(value, NumberRange)
}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value", [HUGE, -HUGE, math.inf, math.nan])
def test_a_number_that_is_no_finite_float_is_outside_of_every_range(name, value):
    with pytest.raises(ValueError, match="eta must be a finite number"):
        RANGES[name].check("eta", value)


def test_a_weight_of_a_prompt_is_a_finite_float():
    assert as_weight(HUGE) is None and as_weight(10**30) == 1e30
    assert is_finite(10**300) and not is_finite(-HUGE)
