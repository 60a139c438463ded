"""Teachers: further weights of the run's model, which judge the rows of their tasks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.iteration.records import Credited, Sampled, Scored, TrainingRows
from flowrl.iteration.stages import MakeRows, Stages
from flowrl.iteration.update import UpdateStage, chunk_loss
from flowrl.likelihoods.rows import Evaluation, Rows, take
from flowrl.losses.averages import TEACHER
from flowrl.session.learner import Learner
from flowrl.session.session import Session
from flowrl.session.teachers import policy_name
from flowrl.table import Column

TASKS: Column[tuple[str, ...]] = Column("tasks of the draws", "teachers", "whole")


@torch.no_grad()
def judged_by_teachers(learner: Any, policy: Any, rows: Rows, tasks: Sequence[str]) -> Evaluation:
    """Evaluate each row with its prompt's teacher. `tasks`: the tasks of the batch's prompts."""
    prompts: list[int] = rows.prompt.tolist()
    row_tasks = [tasks[index] for index in prompts]
    parts, indices = list[Evaluation](), list[Tensor]()
    for task in sorted(set(row_tasks)):
        at = torch.tensor([i for i, row_task in enumerate(row_tasks) if row_task == task])
        at = at.to(rows.prompt.device)
        with learner.policies.using(policy_name(task)):
            parts.append(learner.algorithm.likelihood.evaluate(policy, take(rows, at)))
        indices.append(at)
    order = torch.cat(indices).argsort()
    out = [part.out for part in parts if part.out is not None]
    assert len(out) == len(parts), "steps have means"
    return Evaluation(torch.cat([part.logp for part in parts])[order], torch.cat(out)[order])


def of_teachers(learner: Learner, training: TrainingRows, chunk: Rows) -> Evaluation:
    """The role TEACHER of a loss."""
    return judged_by_teachers(learner, training.policy, chunk, training.table[TASKS])


taught_loss = partial(chunk_loss, other_roles={TEACHER: of_teachers})


@dataclass(frozen=True)
class WithTasks:
    """Adds the tasks of the draws, where each task has a teacher."""

    session: Session
    inner: MakeRows

    def __call__(self, samples: Sampled, scores: Scored, credit: Credited) -> TrainingRows:
        rows, teachers = self.inner(samples, scores, credit), self.session.run.teachers
        assert teachers is not None, "the feature is theirs"
        tasks = teachers.tasks(self.session.prompts, rows.prompts)
        return replace(rows, table=rows.table.with_value(TASKS, tasks))


def wrap(stages: Stages, session: Session) -> Stages:
    update = stages.update
    assert isinstance(update, UpdateStage), "features that wrap the stage come later"
    return replace(
        stages,
        rows=WithTasks(session, stages.rows),
        update=replace(update, loss=taught_loss),
    )
