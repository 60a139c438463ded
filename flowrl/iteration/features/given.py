"""Given samples: an iteration's rows of a file, alone or together with generated samples."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flowrl.iteration.records import (
    Credited,
    Drawn,
    Sampled,
    Scored,
    TrainingRows,
)
from flowrl.iteration.stages import MakeRows, Stages
from flowrl.iteration.units import UnitSamples
from flowrl.likelihoods.rows import Rows, TokenRows
from flowrl.media.statistics import Statistics
from flowrl.prompts import Draws
from flowrl.session.given_samples import GIVEN, GivenRows, GivenSamples
from flowrl.session.session import Session


@dataclass(frozen=True)
class BothCalls:
    """The model's call for the prompts of two batches; prompts from `first` on belong to the
    second one.

    All rows of one call belong to one batch, since they were made together.
    """

    drawn: Any
    given: Any
    first: int

    def __call__(self, states_or_rows: Tensor | TokenRows, *more: Any) -> Any:
        prompt = states_or_rows.prompt if isinstance(states_or_rows, TokenRows) else more[1]
        if not len(prompt) or int(prompt[0]) < self.first:
            return self.drawn(states_or_rows, *more)
        if isinstance(states_or_rows, TokenRows):
            return self.given(replace(states_or_rows, prompt=prompt - self.first), *more)
        return self.given(states_or_rows, more[0], prompt - self.first)


@dataclass(frozen=True)
class GivenRowsAlone:
    """Rows of given samples; nothing is sampled."""

    data: GivenSamples

    def __call__(self, samples: Sampled, scores: Scored, credit: Credited) -> TrainingRows:
        del scores, credit  # nothing was sampled
        iteration, given_rows = samples.drawn.iteration, self.data.rows(samples.drawn.iteration)
        counts = {"count/sampling": 0.0, "count/scored": 0.0}
        metrics = {**given_metrics(self.data, given_rows, iteration), **counts}
        return TrainingRows(
            iteration, given_rows.rows, given_rows.draws, given_rows.policy, metrics=metrics
        )


@dataclass(frozen=True)
class GivenRowsToo:
    """Joins given and generated rows. Given rows come first, so that their positions do not depend
    on the others."""

    data: GivenSamples
    inner: MakeRows

    def __call__(self, samples: Sampled, scores: Scored, credit: Credited) -> TrainingRows:
        iteration = samples.drawn.iteration
        sampled_rows, given_rows = self.inner(samples, scores, credit), self.data.rows(iteration)
        first = len(sampled_rows.draws)
        shifted: list[Rows] = [
            replace(part, prompt=part.prompt + first) for part in given_rows.rows
        ]
        return replace(
            sampled_rows,
            rows=(*shifted, *sampled_rows.rows),
            draws=(*sampled_rows.draws, *given_rows.draws),
            policy=BothCalls(sampled_rows.policy, given_rows.policy, first),
            metrics={**sampled_rows.metrics, **given_metrics(self.data, given_rows, iteration)},
        )


def given_metrics(data: GivenSamples, given_rows: GivenRows, iteration: int) -> dict[str, float]:
    """`count/given`, the number of given samples in the iteration, and `given/epochs`, the epochs
    so far."""
    epochs = (iteration + 1) * given_rows.count / len(data.file.rows)
    return {"count/given": float(given_rows.count * data.file.group), "given/epochs": epochs}


def draw_nothing(iteration: int) -> Drawn:
    return Drawn(iteration, Draws((), (), ()), (), "current")


def sample_nothing(drawn: Drawn) -> Sampled:
    unit = UnitSamples((), (), Statistics({}, {}), 0)
    nothing: Any = None  # no prompt is encoded
    return Sampled(drawn, nothing, unit)


def score_nothing(samples: Sampled) -> Scored:
    del samples
    return Scored((), ())


def credit_nothing(samples: Sampled, scores: Scored) -> Credited:
    del samples, scores
    return Credited(())


def wrap(stages: Stages, session: Session) -> Stages:
    data = session.table[GIVEN]
    if data.settings.share < 1:
        return replace(stages, rows=GivenRowsToo(data, stages.rows))
    return replace(
        stages,
        draw=draw_nothing,
        sample=sample_nothing,
        score=score_nothing,
        credit=credit_nothing,
        rows=GivenRowsAlone(data),
    )
