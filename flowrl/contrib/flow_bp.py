"""FlowBP-Sparse and FlowBP-Bridge: gradients through the velocities of some steps."""

from flowrl.algorithm import Algorithm
from flowrl.likelihoods.shortcuts import Shortcuts
from flowrl.losses.reward import RewardGradient
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors
from flowrl.recipes.reward_gradient import Form, pathwise
from samplers.routes.tails import SomeSteps


@rests_on("code")
def flow_bp(
    *, steps: int = 25, group: int = 1, active: int = 4, late: float = 1.0, rescale: float = 0.5,
    bridge: float | None = None, form: Form = "hinge", bound: float = 0.55, scale: float = 1.0,
    kl: float = 0.0,
) -> Algorithm:  # fmt: skip
    """FlowBP-Sparse, arXiv:2606.11075: the finished sample's reward, whose gradient passes through
    the velocities of `active` steps, each from a state that is a constant; step i is drawn with the
    weight (i + 1)^late. `bridge` is the alpha of FlowBP-Bridge: the gradient also passes through
    the state at one drawn step into the active steps before it. SD3.5-M, HPSv2.1: 25 steps, loss
    max(0.55 - r, 0), lr 1e-5, batch 64, 300 iterations; bridge: alpha 0.5, 5 steps, late 4, rescale
    0. FLUX: 3 steps, late 2, rescale 1; bridge: alpha 0.1, 5 steps, late 2, rescale 1.

    From the authors' code. Differences: steps are drawn once per iteration; guidance has its
    gradient in both branches.

    group   samples per prompt, at least 1; they are not compared, so that one is enough
    active  steps whose velocities have a gradient, at least 1 and at most `steps`; each costs an
            evaluation with a gradient
    late    preference for later steps: step i is drawn with the weight (i + 1)^late, any number; 0
            draws evenly, below 0 earlier steps are likelier
    bridge  scale of the gradient through the state at one drawn step (FlowBP-Bridge), in [0, 1];
            null has none
    """
    loss = RewardGradient(form=form, bound=bound, scale=scale, anchors=anchors(kl))
    starts = Shortcuts("euler", alpha=bridge or 0.0, rescale=rescale)
    return pathwise(steps, SomeSteps(group, active, late, bridge is not None), starts, loss)
