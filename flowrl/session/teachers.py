"""Loaded teachers: additional weights of the run's policy."""

from functools import partial

from flowrl.losses.averages import TEACHER
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.policy import Policy
from flowrl.models.saved_weights import load_saved
from flowrl.paths import find
from flowrl.session.policies import NamedWeights
from flowrl.settings import RunSettings


def load_teachers(run: RunSettings, policy: Policy) -> dict[str, NamedWeights]:
    """Load the weights of all teachers, by policy name (`teacher/TASK`). UserError if they do not
    fit the student."""
    if run.teachers is None:
        return {}
    from flowrl.models.diffusers.lora.teacher_weights import teacher_weights

    assert isinstance(policy, PipelinePolicy), "opd is a recipe for images and videos"
    weights = dict[str, NamedWeights]()
    for task, source in run.teachers.folders.items():
        place, folder = f"teachers.folders.{task}", find(source)
        read = partial(teacher_weights, policy, folder, place)
        weights[policy_name(task)] = load_saved(folder, place, read)
    return weights


def policy_name(task: str) -> str:
    return f"{TEACHER}/{task}"
