"""Noise levels as a setting, `model.sigmas`: a shift, a list, or a function in a user's file."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydantic import Field

from flowrl.errors import UserError
from flowrl.settings.base import Settings
from flowrl.settings.parts.own_parts import is_code
from flowrl.settings.parts.trials import own_error
from flowrl.settings.words.names import unknown_name
from flowrl.settings.words.values import short_repr
from rewards.load import CodeName, user_function_of


class LevelShift(Settings):
    """Evenly spaced levels shifted towards noise: k t / (1 + (k - 1) t) with t = 1 - i / steps and
    shift k (arXiv:2403.03206, eq. 23; `sd3_time_shift` of DanceGRPO, arXiv:2505.07818)."""

    shift: float = Field(gt=0)

    def levels(self, steps: int) -> tuple[float, ...]:
        """The `steps` levels, without the final 0."""
        even = (1 - i / steps for i in range(steps))
        return tuple(self.shift * t / (1 + (self.shift - 1) * t) for t in even)


Sigmas = LevelShift | tuple[float, ...] | CodeName


def checked_sigmas(value: Any) -> Any:
    """Check a value of `model.sigmas` before conversion. ValueError, in one sentence, if it is
    invalid."""
    if value is None or isinstance(value, LevelShift):
        return value
    if isinstance(value, Mapping):
        if wrong := [name for name in value if name != "shift"]:
            raise ValueError(unknown_name(wrong[0], ["shift"]))
        shift = _number(value.get("shift"))
        if shift is None or shift <= 0:
            raise ValueError(
                f"shift must be a number above 0, not {short_repr(value.get('shift'))}"
            )
        return {"shift": shift}
    if isinstance(value, str):
        if not is_code(value):
            raise ValueError(
                f"expected {{shift: NUMBER}}, a list of levels or FILE.py:FUNCTION, not {value!r}"
            )
        return value
    return list(falling(value))


def falling(levels: Any) -> tuple[float, ...]:
    """The levels without a final 0. ValueError unless they decrease within (0, 1]."""
    if not isinstance(levels, Sequence) or isinstance(levels, str) or not levels:
        raise ValueError(
            f"expected a list of levels such as [1.0, 0.75, 0.5], not {short_repr(levels)}"
        )
    numbers = [_number(level) for level in levels]
    falling_levels = [n for n in numbers if n is not None]
    if len(falling_levels) < len(numbers):
        raise ValueError(f"{short_repr(levels[numbers.index(None)])} is not a number")
    if falling_levels[-1] == 0:
        falling_levels.pop()
    outside = next((n for n in falling_levels if not 0 < n <= 1), None)
    if outside is not None or not falling_levels:
        raise ValueError(f"levels must be above 0 and at most 1, not {outside or 0.0}")
    if rise := next(((a, b) for a, b in pairwise(falling_levels) if a <= b), None):
        raise ValueError(f"levels must decrease, but {rise[1]} follows {rise[0]}")
    return tuple(falling_levels)


def levels_of(sigmas: Sigmas, steps: int) -> tuple[float, ...]:
    """Levels for a call with this many steps, without the final 0. UserError if their number
    differs, or a user's function returns levels that `falling` rejects."""
    if isinstance(sigmas, LevelShift):
        return sigmas.levels(steps)
    if isinstance(sigmas, tuple):
        if len(sigmas) != steps:
            raise UserError(
                f"model.sigmas lists {len(sigmas)} levels, but a sample has {steps} steps: use "
                f"{len(sigmas)} steps in training (recipe.steps), evaluations (evaluate.steps) "
                "and --steps, or {shift: NUMBER} or FILE.py:FUNCTION, which fit any number "
                "of steps"
            )
        return sigmas
    try:
        levels = falling(_listed(user_function_of(sigmas)(steps)))
    except ValueError as error:
        raise UserError(f"model.sigmas: {sigmas}: {error}") from error
    except Exception as error:  # the user's own code runs here, and may raise anything
        raise UserError(f"model.sigmas: {own_error(sigmas, error)}") from error
    if len(levels) != steps:
        raise UserError(
            f"model.sigmas: {sigmas} must return {steps} levels for {steps} steps (a final 0 may "
            f"follow), not {len(levels)}"
        )
    return levels


def _listed(levels: Any) -> Any:
    """Convert an array or a tensor to a list."""
    return levels.tolist() if "tolist" in dir(levels) else levels


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
