"""Right answers by dimension, for benchmarks that report an accuracy per dimension.

A reward returns one number per sample; a benchmark such as UniGenBench also reports how often each
kind of question was answered yes, over all samples. A reward adds every answer to its tally, and an
evaluation reads the tally after scoring its samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rewards.types import Judge, Reward, parts_of


class AnswerCount(NamedTuple):
    """Number of questions asked, and how many of them were answered yes (`right`)."""

    right: float
    asked: int

    def plus(self, right: float, asked: int) -> "AnswerCount":
        return AnswerCount(self.right + right, self.asked + asked)


NO_ANSWERS = AnswerCount(0.0, 0)


@dataclass
class AnswerTally:
    """Answer counts by dimension. The part of a name before the first hyphen, as in `Attribute -
    Color`, is its primary dimension.

    overall: whether the benchmark's score is the mean of the primary dimensions' accuracies;
    otherwise it is the mean of the samples' scores
    """

    overall: bool = False
    counts: dict[str, AnswerCount] = field(default_factory=dict, repr=False)

    def add(self, dimension: str, right: float) -> None:
        self.counts[dimension] = self.counts.get(dimension, NO_ANSWERS).plus(right, 1)

    def take(self) -> dict[str, AnswerCount]:
        """Return the counts since the last call."""
        taken = dict(self.counts)
        self.counts.clear()
        return taken


Tallies = dict[str, list[tuple[AnswerTally, dict[str, AnswerCount]]]]  # by a reward's label


def primary(dimension: str) -> str:
    return dimension.partition("-")[0].strip()


def by_primary(counts: Mapping[str, AnswerCount]) -> dict[str, AnswerCount]:
    """Counts of the primary dimensions; every answer counts once."""
    by_name: dict[str, AnswerCount] = {}
    for dimension, count in counts.items():
        by_name[primary(dimension)] = by_name.get(primary(dimension), NO_ANSWERS).plus(*count)
    return by_name


def take_tallies(rewards: Mapping[str, Reward | Judge]) -> Tallies:
    """Take the counts of every tally in the rewards, by label; labels without a tally are left
    out."""
    tallies_by_label = {
        label: [(tally, tally.take()) for tally in parts_of(reward, AnswerTally)]
        for label, reward in rewards.items()
    }
    return {label: tallies for label, tallies in tallies_by_label.items() if tallies}
