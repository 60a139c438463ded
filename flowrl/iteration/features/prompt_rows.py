"""Rows of the prompt file, for credit that reads them."""

from dataclasses import dataclass, replace

from flowrl.credit.prompt_weights import PROMPT_ROWS
from flowrl.iteration.records import Sampled, Scored
from flowrl.iteration.stages import Score, Stages
from flowrl.session.session import Session


@dataclass(frozen=True)
class WithPromptRows:
    """Adds the column PROMPT_ROWS to the scores."""

    session: Session
    inner: Score

    def __call__(self, samples: Sampled) -> Scored:
        scores, rows = self.inner(samples), self.session.prompts.meta
        plans = [
            replace(plan, table=plan.table.with_value(PROMPT_ROWS, rows)) for plan in scores.plans
        ]
        return replace(scores, plans=tuple(plans))


def wrap(stages: Stages, session: Session) -> Stages:
    return replace(stages, score=WithPromptRows(session, stages.score))
