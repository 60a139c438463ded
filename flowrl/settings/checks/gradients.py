"""Checks of a run whose recipe uses reward gradients, before any weights are read."""

from collections.abc import Sequence

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.settings.model.pipeline import PipelineSettings
from flowrl.settings.parts.own_parts import is_code
from flowrl.settings.sections.budget import BudgetSettings
from flowrl.settings.sections.data import RewardSpec
from flowrl.settings.sections.run import RunSettings
from flowrl.settings.sections.train import StatesSettings
from rewards.checks.differentiable import GRADED, Differentiable, never_graded, no_gradient
from rewards.load import user_function_of

COMPARING = ("repeat", "flat", "subset", "replay", "rates")  # settings of budget


def _followed(run: RunSettings, algorithm: Algorithm) -> tuple[str, Sequence[RewardSpec]]:
    """The rewards whose gradient is used, and their key in the file."""
    if algorithm.reward_gradient or not run.intermediate_rewards:
        return "rewards", run.rewards
    return "intermediate_rewards", run.intermediate_rewards


def check_own_gradients(run: RunSettings) -> None:
    """UserError, naming it, for a function in a user's file that lacks a gradient. Imports the
    file."""
    algorithm = run.algorithm()
    if not algorithm.reward_gradient and "slope" not in algorithm.asks:
        return
    place, specs = _followed(run, algorithm)
    for spec in specs:
        if is_code(spec.name) and not isinstance(user_function_of(spec.name), Differentiable):
            raise UserError(f"{place}: {no_gradient(spec.label)}")


def check_gradients(run: RunSettings, algorithm: Algorithm) -> None:
    """UserError for settings that a gradient method does not support, and, naming it, for a reward
    without a gradient. Rewards from a user's file or from Python are checked once they load."""
    name = run.recipe.name  # type: ignore[attr-defined]
    if isinstance(run.model, PipelineSettings) and run.model.guidance.through == "cond":
        if not algorithm.reward_gradient:
            raise UserError(
                f"model.guidance.through: {name} uses no reward's gradient: leave it out"
            )
        if run.training_guidance == "none":
            raise UserError(
                "model.guidance.through: the loss has no guidance (guidance.train: none), so there "
                "is one prediction: leave it out"
            )
    if not algorithm.reward_gradient and "slope" not in algorithm.asks:
        return
    place, specs = _followed(run, algorithm)
    for spec in specs:
        if never_graded(spec.name):
            labels = [s.label for s in specs if s.name in GRADED]
            beside = f"; {', '.join(labels)} has a gradient" if len(labels) == 1 else ""
            raise UserError(f"{place}: {no_gradient(spec.label)}{beside}")
    plain = BudgetSettings()
    for setting in COMPARING if algorithm.reward_gradient else ():
        if getattr(run.budget, setting) != getattr(plain, setting):
            raise UserError(
                f"budget.{setting}: {name} uses the gradient of every sample's score and "
                "compares no samples: leave it out"
            )
    if run.train.states != StatesSettings():
        raise UserError(
            f"train.states: {name} keeps only one state per sample and recomputes the others "
            "with gradients: leave it out"
        )
    if isinstance(run.model, PipelineSettings) and run.model.offload:
        raise UserError(
            f"model.offload: {name} needs the decoder on the device together with the network for "
            "its gradient: leave it out (model.vae.slicing and tiling save memory)"
        )
    if run.model.dtype == "float16":
        raise UserError(
            f"model.dtype: {name} needs the decoder's gradients, which vanish in float16: "
            "use bfloat16 or float32"
        )
