"""FlowBP-Lagrange: two leaps that integrate a polynomial through velocities."""

from flowrl.algorithm import Algorithm
from flowrl.likelihoods.shortcuts import Shortcuts
from flowrl.losses.reward import RewardGradient
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors
from flowrl.recipes.reward_gradient import Form, pathwise
from samplers.routes.tails import TwoLeaps


@rests_on("code")
def flow_bp_lagrange(
    *, steps: int = 25, group: int = 1, order: int = 3, second: float = 0.25, alpha: float = 0.1,
    tau: float | None = 0.2, rescale: float = 0.0, reach: int | None = 10,
    spread: tuple[float, float, float] | None = (2.5, 6.0, 2.0), form: Form = "hinge",
    bound: float = 0.55, scale: float = 1.0, kl: float = 0.0,
) -> Algorithm:  # fmt: skip
    """FlowBP-Lagrange, arXiv:2606.11075: LeapAlign whose leaps integrate the polynomial through
    `order` of their velocities; the first has its gradient, the second a `second` part of it. The
    steps after j, between k and j, and before k are Dirichlet shares (`spread`), and at most
    `reach` steps come after j. SD3.5-M, HPSv2.1: as flow_bp, with alpha 0.1 and tau 0.2; FLUX:
    rescale 0.5, reach null.

    From the authors' code. Differences: those of flow_bp.

    group   samples per prompt, at least 1; they are not compared, so that one is enough
    order   velocities through which each leap's polynomial goes, at least 1; 1 is LeapAlign
    second  scale of the gradient of the leap's second velocity, at least 0
    alpha   scale of the gradient that passes through the state between the two leaps, in [0, 1]; 0
            stops it
    reach   most steps after the second leap's start j, at least 2; smaller trains later steps; null
            has no bound
    spread  concentrations of the Dirichlet shares of the steps after j, between k and j, and before
            k; larger ones vary less; null draws k and j evenly
    """
    loss = RewardGradient(form=form, bound=bound, scale=scale, anchors=anchors(kl))
    starts = Shortcuts("lagrange", order, alpha, tau, second, rescale)
    return pathwise(steps, TwoLeaps(group, order, spread, reach), starts, loss)
