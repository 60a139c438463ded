"""The worlds of the text demos: sums of two numbers, and writers who forget the carry.

A problem is a prompt such as `37+45=`; its answer is `82`. Held-out problems are chosen by a hash,
and neither pre-training nor training sees them. Models that know English get questions
such as `5 + 9`, with numbers up to 12.
"""

from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Literal

from samplers.noise import key_hash

CHARACTERS = "0123456789+="
SumSplit = Literal["train", "held_out", "test"]


@dataclass(frozen=True)
class Addition:
    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def question(self) -> str:
        return f"{self.a} + {self.b}"

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def carries(self) -> bool:
        """Whether adding the ones digits carries."""
        return self.a % 10 + self.b % 10 >= 10

    @property
    def careless(self) -> str:
        """The answer of someone who forgets the carry."""
        return str(self.a + self.b - 10 * self.carries)

    @property
    def split(self) -> SumSplit:
        """Split of a problem: one in 16 is held out, another one in 16 is reserved for the final
        test."""
        place = key_hash("sums", min(self.a, self.b), max(self.a, self.b)) % 16
        return {0: "held_out", 1: "test"}.get(place, "train")  # type: ignore[return-value]


def problems(split: SumSplit) -> list[Addition]:
    """All sums of a split in a fixed random order. a + b and b + a are in the same split."""
    sums = [Addition(a, b) for a, b in product(range(10, 100), repeat=2)]
    sums = [problem for problem in sums if problem.split == split]
    Random(0).shuffle(sums)
    return sums


def questions(split: Literal["train", "held_out"]) -> list[Addition]:
    """All sums of two numbers from 1 to 12 in a fixed order; one in four is held out."""
    sums = [Addition(a, b) for a, b in product(range(1, 13), repeat=2)]
    sums = [
        problem
        for problem in sums
        if (key_hash("questions", min(problem.a, problem.b), max(problem.a, problem.b)) % 4 == 0)
        == (split == "held_out")
    ]
    Random(0).shuffle(sums)
    return sums
