"""Samples of several sizes: each size has its own noise levels, and rows of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowrl.credit.values import SAMPLE_STEPS
from flowrl.iteration.records import PlanCredit, Sampled, Scored
from flowrl.iteration.rows import RowStage
from flowrl.iteration.stages import Score, Stages
from flowrl.iteration.units import SamplingUnit
from flowrl.likelihoods.rows import ROWS_INDEX, Rows, with_table
from flowrl.likelihoods.transition import Likelihood
from flowrl.models.policy import RolloutLike
from flowrl.session.session import Session
from samplers import Rollout
from samplers.mixed import MixedRollout, joined_mixed, scales_by_step


def rows_of_sizes(
    likelihood: Likelihood, rollout: Any, credit: PlanCredit, before: Sequence[Rows]
) -> list[Rows]:
    """A likelihood's rows of each size. `ROWS_INDEX` counts alike for every size."""
    first = before[-1].table[ROWS_INDEX] + 1 if before else 0
    if not isinstance(rollout, MixedRollout):  # all have one size
        rollout = joined_mixed([rollout], [0], rollout.draws)
    placed: list[Rows] = []
    for size, of_size in enumerate(rollout.by_size):
        at = rollout.samples(size).to(credit.advantages.device)
        table = credit.table.arranged(lambda column, at=at: column[at], "sample")
        for k, rows in enumerate(likelihood.rows(of_size, credit.advantages[at], credit.mask[at])):
            rows = with_table(rows, table)
            prompt = rollout.placed(size, rows.prompt)
            table_of_rows = rows.table.with_value(ROWS_INDEX, first + k)
            placed.append(replace(rows, prompt=prompt, table=table_of_rows))
    return placed


@dataclass(frozen=True)
class WithSteps:
    """Adds the column SAMPLE_STEPS to the scores."""

    inner: Score

    def __call__(self, samples: Sampled) -> Scored:
        scores = self.inner(samples)
        plans = list(scores.plans)
        for k, rollout in enumerate(samples.rollouts):
            assert isinstance(rollout, Rollout | MixedRollout), "texts have no sizes"
            table = plans[k].table.with_value(SAMPLE_STEPS, scales_by_step(rollout))
            plans[k] = replace(plans[k], table=table)
        return replace(scores, plans=tuple(plans))


def joined_sizes(units: Sequence[SamplingUnit], parts: Sequence[RolloutLike]) -> RolloutLike:
    """The rollouts of all units of a share, under one plan."""
    draws = tuple(draw for unit in units for draw in unit.ids)
    rollouts = [part for part in parts if isinstance(part, Rollout | MixedRollout)]
    return joined_mixed(rollouts, [unit.first for unit in units], draws)


def wrap(stages: Stages, session: Session) -> Stages:
    del session
    rows = stages.rows
    assert isinstance(rows, RowStage), "features that wrap the stage come later"
    rows = replace(rows, of_plan=rows_of_sizes)
    return replace(stages, score=WithSteps(stages.score), rows=rows)
