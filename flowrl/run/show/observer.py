"""The interface of what reads a run without taking part in it: lines, pages, trackers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

from flowrl.run.evaluate.evaluate import Evaluated
from flowrl.run.experience.collect import Experience
from flowrl.run.update.update import Updated


@dataclass(frozen=True)
class Iteration:
    """An iteration as it was made.

    number   iterations done, with this one
    metrics  of its line in `metrics.jsonl`, those of alarms included
    """

    number: int
    experience: Experience
    updated: Updated
    metrics: dict[str, float]


class Observer:
    """Reads what a run makes, and changes nothing of it. All processes call each method, so that
    one may gather; those that an observer leaves out do nothing."""

    reads_values: ClassVar[bool] = False  # whether the update keeps the values of all entries

    def on_start(self, resumed: bool) -> None:
        """The model and the rewards are proven; the base is not evaluated."""

    def during(self) -> AbstractContextManager[object]:
        """A context that is open while iterations are made, and closed by whatever ends them."""
        return nullcontext()

    def on_iteration(self, made: Iteration) -> None:
        """An iteration is made, before it is recorded."""

    def on_evaluation(self, made: Evaluated) -> None:
        """An evaluation is made, before it is recorded."""

    def on_alarms(self, texts: Sequence[str]) -> None:
        """The last iteration or evaluation has raised alarms."""

    def on_record(self) -> None:
        """`metrics.jsonl` holds an evaluation, or the run's last line."""
