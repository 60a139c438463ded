"""DRaFT-LV: the last step's gradient, from several new noises of each finished sample."""

from dataclasses import dataclass

from flowrl.algorithm import Algorithm
from flowrl.credit.choices import Choices
from flowrl.likelihoods.pathwise import PathRows, noise_of
from flowrl.likelihoods.rows import Rows
from flowrl.losses.reward import RewardGradient
from flowrl.number_checks import check_number
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors
from flowrl.recipes.reward_gradient import Form, pathwise
from samplers import Ode, Plan, Rollout
from samplers.number_ranges import AT_LEAST_1


@dataclass(frozen=True)
class Renoised:
    """Starts from clean samples noised `draws` times to the level of the last step and removes the
    noise in one step with gradients: DRaFT-LV (arXiv:2309.17400)."""

    draws: int = 2
    inside = True

    def __post_init__(self) -> None:
        check_number("Renoised's draws", self.draws, AT_LEAST_1)

    def refuses(self, choices: Choices) -> str | None:
        return None

    def steps(self, plan: Plan) -> list[int]:
        return [1] * self.draws

    def rows(self, rollout: Rollout, common: Rows) -> list[PathRows]:
        level, rows = rollout.plan.steps[-1].sigma, list[PathRows]()
        for draw in range(self.draws):
            noise = noise_of(rollout, "renoised", draw)
            x = (1 - level) * rollout.x0 + level * noise
            rows.append(PathRows(**vars(common), x=x, sigmas=(level, 0.0)))
        return rows


@rests_on("paper")
def draft_lv(
    *, steps: int = 50, group: int = 1, draws: int = 2, form: Form = "linear",
    bound: float = 0.0, scale: float = 1.0, kl: float = 0.0,
) -> Algorithm:  # fmt: skip
    """DRaFT-LV, arXiv:2309.17400: DRaFT-1 with lower variance. Each finished sample gets two new
    noises at the level of the last step, and the gradient passes through one step from each. 50
    steps, LoRA.

    group  samples per prompt, at least 1; they are not compared, so that one is enough
    draws  new noises of each finished sample, at least 1; more make the gradient less noisy, and
           each costs an evaluation
    """
    loss = RewardGradient(form=form, bound=bound, scale=scale, anchors=anchors(kl))
    return pathwise(steps, Ode(group), Renoised(draws), loss)
