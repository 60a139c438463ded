"""Loaded teachers: additional weights of the run's policy, and the rows that each of them
judges."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.likelihoods.rows import Evaluation, Rows, take
from flowrl.losses.averages import TEACHER
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.policy import Policy
from flowrl.paths import find
from flowrl.run.state.policies import NamedWeights
from flowrl.settings import Run


def load_teachers(run: Run, policy: Policy) -> dict[str, NamedWeights]:
    """Load the weights of all teachers, by policy name (`teacher/TASK`). UserError if they do not
    fit the student."""
    if run.teachers is None:
        return {}
    from flowrl.models.diffusers.lora.teacher_weights import teacher_weights

    assert isinstance(policy, PipelinePolicy), "opd is a recipe for images and videos"
    return {
        policy_name(task): teacher_weights(policy, find(folder), f"teachers.folders.{task}")
        for task, folder in run.teachers.folders.items()
    }


def policy_name(task: str) -> str:
    return f"{TEACHER}/{task}"


@torch.no_grad()
def judged_by_teachers(learner: Any, policy: Any, rows: Rows, tasks: Sequence[str]) -> Evaluation:
    """Evaluate each row with its prompt's teacher. `tasks`: the tasks of the batch's prompts."""
    prompts: list[int] = rows.prompt.tolist()
    own = [tasks[place] for place in prompts]
    parts, places = list[Evaluation](), list[Tensor]()
    for task in sorted(set(own)):
        at = torch.tensor([i for i, each in enumerate(own) if each == task])
        at = at.to(rows.prompt.device)
        with learner.policies.using(policy_name(task)):
            parts.append(learner.algorithm.likelihood.evaluate(policy, take(rows, at)))
        places.append(at)
    order = torch.cat(places).argsort()
    out = [part.out for part in parts if part.out is not None]
    assert len(out) == len(parts), "steps have means"
    return Evaluation(torch.cat([part.logp for part in parts])[order], torch.cat(out)[order])
