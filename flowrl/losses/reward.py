"""The loss of gradient methods: a function of each sample's own score, with its gradient."""

import math
from dataclasses import dataclass
from typing import Literal

from flowrl.credit.choices import Choices
from flowrl.errors import UserError
from flowrl.likelihoods.pathwise import PathRows, Pathwise
from flowrl.likelihoods.rows import Evaluations, Rows
from flowrl.likelihoods.transition import Likelihood
from flowrl.losses.base import Anchor, Entries, anchored, roles
from flowrl.number_checks import check_number
from samplers.number_ranges import ANY_NUMBER


@dataclass(frozen=True, kw_only=True)
class RewardGradient:
    """Maximises a reward by its gradient: ReFL (arXiv:2304.05977), DRaFT (arXiv:2309.17400), SRPO.

        loss = w scale phi(r), phi = -r, max(bound - r, 0), or |r - bound|

    r is the weighted sum of the rewards with its gradient, passed to this loss as the
    log-likelihood of `new`. It is not standardised, so its scale acts like a learning rate. w is
    the rows' weight, 1 without one.

    form   linear, hinge (samples that score above the bound have no gradient) or target
    words  two words for a relative reward (arXiv:2509.06942): r is (1 + strength) times the score
           for "first, prompt" minus the score for "second, prompt"; the rows hold the strength

    bound  reward at which `hinge` ends and which `target` aims at, any number; no effect with
           `linear`
    scale  factor on the loss, above 0; it acts like a learning rate
    """

    unit = 1
    form: Literal["linear", "hinge", "target"] = "linear"
    bound: float = 0.0
    scale: float = 1.0
    words: tuple[str, str] | None = None
    anchors: tuple[Anchor, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise UserError(f"the scale of a reward loss must be above 0, not {self.scale}")
        check_number("RewardGradient's bound", self.bound, ANY_NUMBER)

    @property
    def roles(self) -> frozenset[str]:
        return roles(self.anchors)

    def refuses(self, choices: Choices) -> str | None:
        """Refuses anchors that are corrected by a ratio, since paths have no ratio."""
        if any(anchor.corrected for anchor in self.anchors):
            return "with reward gradients an anchor has no ratio: leave `corrected` out"
        return None

    def __call__(self, likelihood: Likelihood, evaluations: Evaluations, rows: Rows) -> Entries:
        score = evaluations["new"].logp
        if self.form == "linear":
            pull = -score
        elif self.form == "hinge":
            pull = (self.bound - score).relu()
        else:
            pull = (score - self.bound).abs()
        value = pull if self.scale == 1 else self.scale * pull
        metrics = {"through/score": score.detach()}
        if isinstance(rows, PathRows) and rows.weight is not None:
            value, metrics["through/weight"] = value * rows.weight, rows.weight
        metrics["policy_loss"] = value.detach()
        if self.form == "hinge":
            metrics["through/satisfied"] = (score.detach() >= self.bound).to(score)
        divergence, kl = anchored(self.anchors, likelihood, evaluations, rows)
        value = value + divergence if self.anchors else value
        return Entries(value, "tokens", metrics | kl)


def check_gradient(loss: object, likelihood: Likelihood) -> None:
    """UserError if the likelihood belongs to a gradient method and the loss does not, or vice
    versa."""
    if isinstance(loss, RewardGradient) != isinstance(likelihood, Pathwise):
        raise UserError(
            "a gradient method needs both the likelihood Pathwise and the loss RewardGradient: "
            "use both or neither"
        )
