"""Recipes that use a reward's own gradient, through the decoder into the network.

Their rewards need `differentiable`. Samples are not compared, so a group may be a single sample.
Rewards are not standardised: their scale acts like a learning rate. The common rules of
`flowrl/recipes/grpo.py` apply here too.
"""

from typing import Literal

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Estimator
from flowrl.credit.uncompared import Uncompared
from flowrl.likelihoods.pathwise import KnownNoise, Pathwise, Starts
from flowrl.losses.reward import RewardGradient
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors
from samplers import Ode, Planner

Form = Literal["linear", "hinge", "target"]


def pathwise(steps: int, plan: Planner, starts: Starts, loss: RewardGradient) -> Algorithm:
    """The parts that all of these recipes share."""
    return Algorithm(steps, plan, Estimator((Uncompared(),)), Pathwise(starts), loss)


@rests_on("code")
def refl(
    *, steps: int = 40, group: int = 1, first: float = 0.75, stop: float = 1.0,
    form: Form = "hinge", bound: float = 2.0, scale: float = 1e-3, kl: float = 0.0,
) -> Algorithm:  # fmt: skip
    """ReFL, arXiv:2304.05977: the clean sample predicted at one late step is decoded and scored,
    and the gradient trains that step. SD1.4: 40 steps, one of the last quarter, drawn in each
    iteration; loss 0.001 max(2 - r, 0) with ImageReward, all weights.

    Differences: samples come from an ODE, where the code has DDPM's noise before that step; all
    prompts of an iteration share the step; the paper's pre-training loss, which is not in the
    released loop, is left out. The gradient shrinks with the step's level, so the very last steps
    of a flow have little effect: `stop` leaves them out.

    group  samples per prompt, at least 1; they are not compared, so that one is enough
    first  share of the steps after which the trained one is drawn, below `stop`; smaller trains
           earlier, noisier steps
    stop   share of the steps before which the trained one is drawn, at most 1; smaller leaves out
           the last steps, whose gradient is small
    """
    from flowrl.likelihoods.shortcuts import Kept  # of states that a route keeps
    from samplers.routes.tails import OneOfSteps

    loss = RewardGradient(form=form, bound=bound, scale=scale, anchors=anchors(kl))
    return pathwise(steps, OneOfSteps(group, first, stop), Kept(project=True), loss)


@rests_on("paper")
def draft(
    *, steps: int = 50, group: int = 1, last: int = 1,
    cut: Literal["fixed", "normal", "uniform"] = "fixed", spread: float = 5.0,
    form: Form = "linear", bound: float = 0.0, scale: float = 1.0, kl: float = 0.0,
) -> Algorithm:  # fmt: skip
    """DRaFT-K, arXiv:2309.17400: the gradient of the reward through the last K sampling steps, with
    K = 1 in most of its runs; `last` is K. 50 steps, LoRA. AlignProp, arXiv:2310.03739, draws K in
    each iteration: `cut: normal`, last 8, spread 5 (or `cut: uniform`), scale 0.01.

    Sources: the methods come from the papers, AlignProp's numbers from its code. Differences:
    AlignProp's DDIM steps draw noise, while these steps do not. With K above 1 every step is
    evaluated once more in the backward pass, and only the states between steps are kept. `kl` keeps
    the velocities of these K steps near the initial policy's (DRaFT+).

    group   samples per prompt, at least 1; they are not compared, so that one is enough
    last    number K of last steps that have a gradient, at least 1; each costs an evaluation more;
            the mean of the number with `cut: normal`, and no effect with `uniform`
    cut     number of last steps with a gradient: `fixed`, `last` each time; drawn in each iteration
            from a normal distribution around `last` (`normal`) or from all numbers (`uniform`)
    spread  standard deviation, in steps, of the number that `cut: normal` draws, at least 0; no
            effect with other values of `cut`
    """
    from flowrl.likelihoods.shortcuts import Kept  # of states that a route keeps
    from samplers.routes.tails import LastSteps

    loss = RewardGradient(form=form, bound=bound, scale=scale, anchors=anchors(kl))
    return pathwise(steps, LastSteps(group, last, cut, spread), Kept(), loss)


@rests_on("code")
def srpo(
    *, steps: int = 25, group: int = 1, levels: tuple[float, float] = (0.75, 0.9642857),
    width: float = 0.101, words: tuple[str, str] | None = ("Realistic photo", "CG Render"),
    strengths: tuple[tuple[float, float], tuple[float, float]] = ((0.1, 0.25), (0.3, 0.01)),
    form: Form = "hinge", bound: float = 0.7, scale: float = 1.0, kl: float = 0.0,
) -> Algorithm:  # fmt: skip
    """SRPO, arXiv:2509.06942: Direct-Align with a relative reward. A finished sample gets its
    initial noise back, one step with gradients removes a part of it, and the known rest is
    subtracted, so that early levels can be trained. The reward is the score with one word before
    the prompt minus the score with another; a second row steps upwards, with the words exchanged.
    FLUX: 25 steps, levels 0.75 to 0.96, loss max(0.7 - r, 0), all weights, lr 5e-6, gradient norm
    0.1. PickScore: levels 0.667 to 0.964, strengths 0.1 to 0.5 and 0.6 to 0.01.

    `words: null` is Direct-Align: the plain reward, and only the step down. Differences: the words
    are examples in the style of the paper (realistic against rendered) rather than its script's;
    the strength is taken at the level m, where the script takes it at m - k (0.029 away at most).

    group      samples per prompt, at least 1; they are not compared, so that one is enough
    levels     lowest and highest noise level that is trained, 0 < low < high < 1
    width      length of the step with a gradient, as a share of `levels`, in (0, 1); larger removes
               more noise by the network and less by subtraction
    words      [word of the wanted, word of the unwanted], each put before the prompt: the reward is
               the difference of the two scores; null is the plain reward, and only the step down
    strengths  extra weight of the wanted word's score, at the lowest and the highest level, [of the
               step down, of the step up]; no effect without `words`
    """
    starts = KnownNoise(levels, width, both=words is not None, strengths=strengths)
    loss = RewardGradient(form=form, bound=bound, scale=scale, words=words, anchors=anchors(kl))
    return pathwise(steps, Ode(group), starts, loss)


@rests_on("paper")
def leap_align(
    *, steps: int = 25, group: int = 1, alpha: float = 0.3, tau: float | None = 0.1,
    form: Form = "hinge", bound: float = 0.55, scale: float = 1.0, kl: float = 0.0,
) -> Algorithm:  # fmt: skip
    """LeapAlign, arXiv:2604.15311: two leaps, from any step k to any later step j and from j to the
    end, carry the gradient of the finished sample's reward, so that early steps can be trained.
    `alpha` scales the part that passes through the state at j (eq. 10); samples whose leaps end
    near the trajectory's own states weigh more, 1 / (max(d_j, tau) + max(d_0, tau)) (eq. 12).
    FLUX, HPSv2.1: 25 steps, loss max(0.55 - r, 0), alpha 0.3 (0.1 with PickScore or HPSv3), all
    weights, lr 1e-5, batch 64, 300 iterations.

    From the paper. Differences: k and j are drawn once per iteration.

    group  samples per prompt, at least 1; they are not compared, so that one is enough
    alpha  scale of the gradient that passes through the state between the two leaps, in [0, 1]; 0
           stops it
    """
    from flowrl.likelihoods.shortcuts import Shortcuts  # of states that a route keeps
    from samplers.routes.tails import TwoLeaps

    loss = RewardGradient(form=form, bound=bound, scale=scale, anchors=anchors(kl))
    return pathwise(steps, TwoLeaps(group), Shortcuts("lagrange", alpha=alpha, tau=tau), loss)
