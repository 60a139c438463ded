"""Losses that move the model towards good samples by regression: weighted likelihood, NFT."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from flowrl.credit.choices import Choices
from flowrl.credit.comparisons import Exponential
from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.rows import Evaluations, MatchingRows, Rows
from flowrl.likelihoods.transition import Likelihood, entries, mse
from flowrl.losses.base import Anchor, Entries, anchored, roles
from samplers.kernels import per_row


@dataclass(frozen=True)
class Weighted:
    """Weighted likelihood, with advantages as non-negative weights.

        loss = -w log p_new

    With `Exponential` weights this is reward-weighted regression (ORW-CFM-W2, arXiv:2502.06061,
    with an anchor to "ref" for its W2 term); with equal weights, fine-tuning on the policy's own
    samples.
    """

    homogeneous = True
    unit = 1
    anchors: tuple[Anchor, ...] = ()

    @property
    def roles(self) -> frozenset[str]:
        return roles(self.anchors)

    def refuses(self, choices: Choices) -> str | None:
        """Refuses weights that can be negative."""
        if not any(isinstance(transform, Exponential) for transform in choices.transforms[-1:]):
            return "Weighted needs weights of at least 0: make Exponential the last transform"
        return None

    def __call__(self, likelihood: Likelihood, evaluations: Evaluations, rows: Rows) -> Entries:
        divergence, of_anchors = anchored(self.anchors, likelihood, evaluations, rows)
        value = -rows.advantage * evaluations["new"].logp
        metrics = {"logp": evaluations["new"].logp.detach(), "policy_loss": value.detach()}
        return Entries(value + divergence, "tokens", {**metrics, **of_anchors})


@dataclass(frozen=True)
class NFT:
    """Regression towards good samples and away from bad ones: DiffusionNFT (arXiv:2509.16117).

        loss = (r |x0_good - x0|^2 + (1 - r) |x0_bad - x0|^2) advantage_max / beta

    v_good = (1 - beta) v_old + beta v and v_bad = (1 + beta) v_old - beta v predict x0_good and
    x0_bad (x0 = x - sigma v); each squared error is divided by its detached mean size.
    r = 1/2 + A / (2 advantage_max), with A clipped to +-advantage_max and then mapped by `mode`.

    mode  all | positive_only (A < 0 is 0) | negative_only (A > 0 is 0) | one_only (A > 0 is 1, all
          others 0) | binary (the sign of A)

    beta           share of the trained velocity in the two that are compared with the sample,
                   above 0; smaller makes larger updates
    advantage_max  size at which advantages are clipped, above 0
    """

    unit = 1
    beta: float = 1.0
    advantage_max: float = 5.0
    mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    anchors: tuple[Anchor, ...] = ()

    def __post_init__(self) -> None:
        if not (0 < self.beta < math.inf and 0 < self.advantage_max < math.inf):
            raise UserError(
                f"NFT needs beta and advantage_max above 0, not {self.beta} and "
                f"{self.advantage_max}"
            )

    @property
    def roles(self) -> frozenset[str]:
        return roles(self.anchors, "old")

    def refuses(self, choices: Choices) -> str | None:
        """Refuses likelihoods without velocities, and sampling with the current policy."""
        if not isinstance(choices.likelihood, Matching):
            return "NFT compares velocities: use the Matching likelihood"
        if choices.behaviour == "current":
            return (
                "NFT needs a slower policy for sampling: add an average, such as "
                "Average('trailing', Decay(slope=0.001, most=0.5)), and name it as behaviour"
            )
        return None

    def __call__(self, likelihood: Likelihood, evaluations: Evaluations, rows: Rows) -> Entries:
        v, old = evaluations["new"].out, evaluations["old"].out
        assert isinstance(rows, MatchingRows) and v is not None and old is not None
        old = old.detach()
        good = (0.5 + self._read(rows.advantage) / (2 * self.advantage_max)).clamp(0, 1)
        error_good = _x0_error((1 - self.beta) * old + self.beta * v, rows)
        error_bad = _x0_error((1 + self.beta) * old - self.beta * v, rows)
        value = (good * error_good + (1 - good) * error_bad) * self.advantage_max / self.beta
        divergence, of_anchors = anchored(self.anchors, likelihood, evaluations, rows)
        moved = mse(v.detach(), old, layout=rows.layout)
        metrics = {"moved": moved, "policy_loss": value.detach()}
        return Entries(value + divergence, "tokens", {**metrics, **of_anchors})

    def _read(self, advantage: Tensor) -> Tensor:
        a = advantage.clamp(-self.advantage_max, self.advantage_max)
        if self.mode == "positive_only":
            return a.clamp(min=0)
        if self.mode == "negative_only":
            return a.clamp(max=0)
        if self.mode == "one_only":
            return (a > 0).to(a)
        return a.sign() if self.mode == "binary" else a


def _x0_error(v: Float[Tensor, "b *d"], rows: MatchingRows) -> Float[Tensor, "b t"]:
    """Squared error of the clean sample that v predicts, over its detached mean size; of each part,
    if the parts are entries of their own."""
    error = rows.x - per_row(rows.sigma, v) * v - rows.x0
    size = entries(error.detach().abs(), None, rows.layout).clamp(min=1e-5)
    return entries(error.square(), None, rows.layout) / size
