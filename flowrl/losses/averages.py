"""Additional policies that losses read: slow averages of the weights, and loaded teachers."""

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowrl.errors import UserError

TEACHER = "teacher"  # the role of the loaded teacher of a row's prompt
_RESERVED = frozenset({"new", "old", "ref", "current", TEACHER})


@dataclass(frozen=True)
class Decay:
    """Decay d of an average at optimizer step s.

        d(s) = 0 if s < flat else min(most, start + slope (s - flat))

    At d = 0 the average is a copy of the current weights.
    """

    start: float = 0.0
    slope: float = 0.0
    flat: int = 0
    most: float = 1.0

    def __post_init__(self) -> None:
        if self.flat < 0:
            raise UserError(f"average.flat must be at least 0, not {self.flat}")
        if not 0 <= self.slope < math.inf or not (0 <= self.start <= 1 and 0 <= self.most <= 1):
            raise UserError(
                f"an average's decay starts at {self.start} and grows by {self.slope} to "
                f"{self.most}: start and most must be in [0, 1], the slope at least 0"
            )

    def __call__(self, step: int) -> float:
        if step < self.flat:
            return 0.0
        return min(self.most, self.start + self.slope * (step - self.flat))


@dataclass(frozen=True)
class Refresh:
    """When an average becomes a copy of the current weights: GARDO (arXiv:2512.24138).

    `every` so many iterations, and after one whose mean divergence from the average, `kl_NAME`, is
    `above` a bound. Either starts a new count.
    """

    every: int
    above: float | None = None

    def __post_init__(self) -> None:
        if self.every < 1 or (self.above is not None and not 0 < self.above < math.inf):
            raise UserError(
                f"an average is refreshed every 1 or more iterations, and above a KL larger than "
                f"0, not {self.every} and {self.above}"
            )

    def due(self, iterations: int, kl: float) -> bool:
        """`iterations` after the last time."""
        return iterations >= self.every or (self.above is not None and kl > self.above)


@dataclass(frozen=True)
class Average:
    """A slow copy of the weights, updated after each iteration.

    average <- d average + (1 - d) current,  d = 0 where a `refresh` is due
    """

    name: str
    decay: Decay
    refresh: Refresh | None = None


def check_policies(averages: Sequence[str], behaviour: str, roles: Iterable[str]) -> None:
    """UserError if names of averages clash, or a required policy is missing."""
    for name in averages:
        if name in _RESERVED or averages.count(name) > 1:
            raise UserError(f"an average called {name!r} already exists: choose another name")
    if behaviour != "current":
        _check_known(behaviour, ["current", *averages], "behaviour")
    for role in sorted(roles):
        _check_known(role, ["old", "ref", TEACHER, *averages], "the loss")


def _check_known(name: str, names: Sequence[str], reader: str) -> None:
    if name in names:
        return
    close = difflib.get_close_matches(name, names, 1)
    guess = f"; did you mean {close[0]!r}?" if close else ""
    raise UserError(
        f"{reader} needs the policy {name!r}, but there are only {', '.join(names)}: add an "
        f"Average of that name{guess}"
    )
