"""One iteration, in six stages. This is the page to read first.

    draw     choose prompts                                      flowrl/iteration/draw.py
    sample   encode them, roll the plans out, decode             flowrl/iteration/sample.py
    score    ask the rewards                                     flowrl/iteration/score.py
    credit   turn scores into advantages                         flowrl/iteration/credit.py
    rows     select what a likelihood is trained on              flowrl/iteration/rows.py
    update   evaluate policies, the loss, optimizer steps        flowrl/iteration/update.py

Each stage gets the records of those before it (flowrl/iteration/records.py). The six files hold
the path of every run. A feature, such as a sampling budget or a joint run of two models, is a file
of flowrl/iteration/features that wraps one or more stages; `flowrl/iteration/open.py` decides from
a run's settings which ones do. One of them stands in every run on a GPU that asks no people:
features/overlap.py scores rollouts within `sample`, while the next ones are drawn.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.records import (
    Credited,
    Drawn,
    Iteration,
    Sampled,
    Scored,
    TrainingRows,
    Updated,
)


@runtime_checkable
class Draw(Protocol):
    def __call__(self, iteration: int) -> Drawn:
        """Choose the prompts of an iteration, the same on all processes."""
        ...


@runtime_checkable
class Sample(Protocol):
    def __call__(self, drawn: Drawn) -> Sampled:
        """Sample this process's draws. Collective."""
        ...


@runtime_checkable
class Score(Protocol):
    def __call__(self, samples: Sampled) -> Scored:
        """Score this process's samples, and gather all scores. Collective."""
        ...


@runtime_checkable
class AssignCredit(Protocol):
    def __call__(self, samples: Sampled, scores: Scored) -> Credited:
        """Turn the scores of all processes into advantages of this process's samples."""
        ...


@runtime_checkable
class MakeRows(Protocol):
    def __call__(self, samples: Sampled, scores: Scored, credit: Credited) -> TrainingRows:
        """Select the rows to train on."""
        ...


@runtime_checkable
class Update(Protocol):
    def __call__(self, rows: TrainingRows) -> Updated:
        """Take the optimizer steps. Collective."""
        ...


@dataclass(frozen=True)
class Stages:
    """The stages of a run, and the clock that times their phases."""

    draw: Draw
    sample: Sample
    score: Score
    credit: AssignCredit
    rows: MakeRows
    update: Update
    clock: PhaseClock

    def collected(self, iteration: int) -> TrainingRows:
        """The rows of an iteration, without an update."""
        samples = self.sample(self.draw(iteration))
        scores = self.score(samples)
        return self.rows(samples, scores, self.credit(samples, scores))

    def iterate(self, iteration: int) -> Iteration:
        """Run one iteration; `iteration` counts from 0.

        NotFiniteError, on all processes, if weights, averages, rewards or the loss are not finite.
        """
        draws = self.draw(iteration)
        samples = self.sample(draws)
        scores = self.score(samples)
        credit = self.credit(samples, scores)
        rows = self.rows(samples, scores, credit)
        updated = self.update(rows)
        metrics = {**rows.metrics, **updated.metrics, **self.clock.taken()}
        return Iteration(
            number=iteration + 1,
            samples=samples,
            scores=scores,
            credit=credit,
            rows=rows,
            updated=updated,
            metrics=metrics,
        )
