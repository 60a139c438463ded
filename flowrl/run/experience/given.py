"""One iteration's experience with given samples, alone or together with generated samples."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.likelihoods.rows import Rows, TokenRows
from flowrl.run.experience.collect import Experience, collect
from flowrl.run.state.given_samples import GivenRows, GivenSamples
from flowrl.run.state.session import Session
from rewards import Samples, Scores


@dataclass(frozen=True)
class BothCalls:
    """The model's call for the prompts of two batches; prompts from `first` on belong to the
    second one.

    All rows of one call belong to one batch, since they were made together.
    """

    drawn: Any
    given: Any
    first: int

    def __call__(self, asked: Tensor | TokenRows, *more: Any) -> Any:
        prompt = asked.prompt if isinstance(asked, TokenRows) else more[1]
        if not len(prompt) or int(prompt[0]) < self.first:
            return self.drawn(asked, *more)
        if isinstance(asked, TokenRows):
            return self.given(replace(asked, prompt=prompt - self.first), *more)
        return self.given(asked, more[0], prompt - self.first)


def collect_given(session: Session, data: GivenSamples, iteration: int) -> Experience:
    """Collect an iteration with given samples, for all of its draws or a share of them."""
    given = data.rows(iteration)
    if data.settings.share == 1:
        return _given_alone(data, given, iteration)
    return _joined(data, collect(session, iteration), given, iteration)


def _given_alone(data: GivenSamples, given: GivenRows, iteration: int) -> Experience:
    nothing = Samples(torch.empty(0, 3, 1, 1), [], torch.empty(0, dtype=torch.long))
    scores = Scores(torch.empty(0, 0), torch.empty(0, 0, dtype=torch.bool), ())
    metrics = _metrics(data, given, iteration) | {"count/sampling": 0.0, "count/scored": 0.0}
    return Experience(given.rows, given.draws, given.policy, metrics, nothing, scores)


def _joined(data: GivenSamples, drawn: Experience, given: GivenRows, iteration: int) -> Experience:
    """Join given and generated rows. Given rows come first, so that their positions do not depend
    on the others."""
    first = len(drawn.draws)
    moved: list[Rows] = [replace(each, prompt=each.prompt + first) for each in given.rows]
    return replace(
        drawn,
        rows=(*moved, *drawn.rows),
        draws=(*drawn.draws, *given.draws),
        policy=BothCalls(drawn.policy, given.policy, first),
        metrics=drawn.metrics | _metrics(data, given, iteration),
    )


def _metrics(data: GivenSamples, given: GivenRows, iteration: int) -> dict[str, float]:
    """`count/given`, the number of given samples in the iteration, and `given/epochs`, the epochs
    so far."""
    epochs = (iteration + 1) * given.count / len(data.file.rows)
    return {"count/given": float(given.count * data.file.group), "given/epochs": epochs}
