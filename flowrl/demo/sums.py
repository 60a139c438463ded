"""The world of the text demo: sums of two numbers of two digits, and writers who forget the carry.

A problem is a prompt such as `37+45=`; its answer is `82`. Held-out problems are chosen by a hash,
and neither pre-training nor training sees them.
"""

from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Literal

from samplers.noise import number

CHARACTERS = "0123456789+="
Split = Literal["train", "held_out", "test"]


@dataclass(frozen=True)
class Sum:
    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def carries(self) -> bool:
        """Do the ones make a ten?"""
        return self.a % 10 + self.b % 10 >= 10

    @property
    def careless(self) -> str:
        """The answer of a writer who forgets that ten."""
        return str(self.a + self.b - 10 * self.carries)

    @property
    def split(self) -> Split:
        """One problem in 16 is held out, another one in 16 is kept for the last test."""
        place = number("sums", min(self.a, self.b), max(self.a, self.b)) % 16
        return {0: "held_out", 1: "test"}.get(place, "train")  # type: ignore[return-value]


def problems(split: Split) -> list[Sum]:
    """All of a split, in a fixed order without meaning. a + b and b + a are in the same split."""
    found = [Sum(a, b) for a, b in product(range(10, 100), repeat=2)]
    found = [problem for problem in found if problem.split == split]
    Random(0).shuffle(found)
    return found
