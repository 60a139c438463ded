"""Ranges of numbers among the settings of parts: one sentence for all that lie outside."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsFloat


def counts_as_number(value: Any) -> bool:
    """Whether Python takes a value for a number: no text and no other part."""
    return isinstance(value, SupportsFloat)


def is_finite(value: float) -> bool:
    """Whether a number is one as a float too, which an integer of more than 308 digits is not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


@dataclass(frozen=True)
class NumberRange:
    """A range of finite numbers. NaN and infinity lie outside of every range: a comparison with NaN
    is false, so that it would pass as a number that is not too small.

    words  the range in a sentence, "above 0"
    holds  whether a finite number lies inside
    """

    words: str
    holds: Callable[[float], bool]

    def refusal(self, setting: str, value: Any) -> str | None:
        """The sentence that refuses this value of a setting, None if it lies inside. None among the
        values stands for a setting that is left out, and is never refused."""
        if value is None:
            return None
        if not counts_as_number(value):
            return f"{setting} must be {f'a number {self.words}'.strip()}, not {value!r}"
        if is_finite(value) and self.holds(value):
            return None
        words = self.words if is_finite(value) else f"a finite number {self.words}".strip()
        return f"{setting} must be {words}, not {value!s:.50}"

    def check(self, setting: str, value: float | None) -> None:
        """ValueError, naming the setting, for a value that lies outside."""
        if sentence := self.refusal(setting, value):
            raise ValueError(sentence)


ANY_NUMBER = NumberRange("", is_finite)
POSITIVE = NumberRange("above 0", lambda x: x > 0)
AT_LEAST_0 = NumberRange("at least 0", lambda x: x >= 0)
AT_LEAST_1 = NumberRange("at least 1", lambda x: x >= 1)
AT_LEAST_2 = NumberRange("at least 2", lambda x: x >= 2)
FROM_0_TO_1 = NumberRange("in [0, 1]", lambda x: 0 <= x <= 1)
FROM_0_TO_2 = NumberRange("in [0, 2]", lambda x: 0 <= x <= 2)
FROM_0_BELOW_1 = NumberRange("in [0, 1)", lambda x: 0 <= x < 1)
ABOVE_0_TO_1 = NumberRange("in (0, 1]", lambda x: 0 < x <= 1)
BETWEEN_0_AND_1 = NumberRange("in (0, 1)", lambda x: 0 < x < 1)
