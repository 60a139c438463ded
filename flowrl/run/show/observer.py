"""The interface of observers, which read a run without taking part in it: lines, pages,
trackers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from flowrl.iteration.records import Iteration
from flowrl.run.evaluate.evaluate import Evaluated


class Observer:
    """Reads what a run produces without changing it. Every process calls each method, so that an
    observer can gather data; methods that it does not define do nothing."""

    reads_values: ClassVar[bool] = False  # whether the update keeps the values of all entries

    def on_start(self, resumed: bool) -> None:
        """Called once the model and the rewards are proven, before the base model is evaluated."""

    def during(self) -> AbstractContextManager[object]:
        """A context that stays open during all iterations, and closes however they end."""
        return nullcontext()

    def on_iteration(self, iteration: Iteration) -> None:
        """Called after an iteration, before it is recorded."""

    def on_evaluation(self, evaluation: Evaluated) -> None:
        """Called after an evaluation, before it is recorded."""

    def on_alarms(self, texts: Sequence[str]) -> None:
        """Called when the last iteration or evaluation raised alarms."""

    def on_record(self) -> None:
        """Called after `metrics.jsonl` has received an evaluation, or the run's last line."""
