"""Checks of runs whose plans ask for rewards on the way."""

from flowrl.algorithm import Algorithm
from flowrl.credit.choices import image_plans
from flowrl.credit.intermediate import differs_between_steps
from flowrl.errors import UserError
from flowrl.settings.budget import BudgetSettings
from samplers import Particled


def asks_intermediate(algorithm: Algorithm) -> bool:
    """Whether any plan of the run scores intermediate samples."""
    return isinstance(algorithm.plan, Particled) or any(
        plan.looks or plan.thin or plan.guide for plan in image_plans(algorithm)
    )


def check_intermediate(algorithm: Algorithm, own: bool, budget: BudgetSettings) -> None:
    """UserError for intermediate rewards that are not used or cannot be compared by the credit,
    and for a budget that needs one advantage per sample. `own`: whether `intermediate_rewards` has
    any."""
    if own and not asks_intermediate(algorithm):
        raise UserError(
            "intermediate_rewards: this recipe does not score intermediate states: leave it "
            "out, use a recipe that does (potential_tree, pro_grpo), or set steer"
        )
    if own and not differs_between_steps(algorithm.transforms):
        raise UserError(
            "intermediate_rewards: this recipe subtracts intermediate rewards from the "
            "samples' rewards, so both must be the same: leave intermediate_rewards out"
        )
    for name, wanted in (("subset", budget.subset is not None), ("replay", budget.replay > 0)):
        if wanted and algorithm.by_step:
            raise UserError(
                f"budget.{name} needs one score per sample, but this recipe has credit per "
                "step: leave it out"
            )
