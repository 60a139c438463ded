"""LOOP: DDPO with a leave-one-out baseline."""

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Clip, Estimator, LeaveOneOut
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from samplers import DDIM, Chain, Kernel


@rests_on("paper")
def loop(
    *, steps: int = 50, group: int = 4, eta: float = 1.0, clip: float = 1e-4,
    fraction: float = 1.0, kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """LOOP, arXiv:2503.00897: DDPO's clipped steps with a leave-one-out baseline and no std.

    The authors' code is not public: numbers are DDPO's, and the group size of 4 is our choice.
    """
    return Algorithm(
        steps=steps,
        plan=Chain(kernel or DDIM(eta), group, fraction),
        advantage=Estimator((LeaveOneOut(), Clip())),
        likelihood=Transition(),
        loss=Surrogate(clip, clip),
    )
