"""Pro-GRPO: groups that shrink while they are sampled."""

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Clip, Estimator, Standardize
from flowrl.errors import UserError
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import KlForm, Scale, anchors
from samplers import Chain, FlowSDE, Kernel, Thinned, Thinning


@rests_on("summary")
def pro_grpo(
    *, steps: int = 10, start: int = 48, keep: tuple[int, ...] = (24, 12),
    at: tuple[int, ...] = (5, 7),
    eta: float = 0.7, clip: float = 1e-4, kl: float = 0.04, scale: Scale = "group",
    kl_form: KlForm = "published", kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """Pro-GRPO, arXiv:2512.15347, following a detailed summary of its method: a group starts with
    more samples than it trains on. Before each step of `at` the projections are scored, and the
    `keep` samples whose rewards vary most continue. SD3.5-M: 10 steps, 48 to 24 to 12 samples
    before the steps 5 and 7; Flash 24, 16, 12; SD1.4 with 50 steps 48, 32, 8 before 30 and 40. The
    mean, the std and the loss use the remaining samples.

    Our choice: advantages are scaled by the group's std, and the loss is Flow-GRPO's. The mean of
    the remaining samples is not the policy's mean.

    start  samples per prompt at the first step, at least the first of `keep`
    keep   samples per prompt that continue after each step of `at`, decreasing and at least 2; the
           last is the trained group
    at     steps before which projections are scored and samples leave, counted from 0 and
           increasing; earlier ones save more and judge less exactly
    """
    if not keep:
        raise UserError("pro_grpo: `keep` must list the sizes to which the group shrinks")
    chain = Chain(kernel or FlowSDE(eta), keep[-1])
    return Algorithm(
        steps=steps,
        plan=Thinned(chain, Thinning(at, keep, start)),
        advantage=Estimator((Standardize(scale), Clip())),
        likelihood=Transition(kl_form=kl_form),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )
