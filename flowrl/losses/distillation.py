"""The loss of distillation: a divergence from a teacher on the student's own states."""

from dataclasses import dataclass

from torch import Tensor

from flowrl.likelihoods.rows import Evaluations, Rows
from flowrl.likelihoods.transition import Likelihood
from flowrl.losses.averages import TEACHER
from flowrl.losses.base import Anchor, Entries, anchored, roles
from flowrl.number_checks import check_number
from samplers.number_ranges import POSITIVE


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """On-policy distillation: DiffusionOPD (arXiv:2605.15055), the `gkd` of Flow-OPD
    (arXiv:2605.08063).

        loss = weight D(new | teacher) + sum of the other anchors

    D is the likelihood's divergence. Each row has the teacher of its prompt, without a gradient.
    The states are the student's own, and their distribution is treated as a constant. Flow-OPD's
    `kl_only`, where -D is an advantage in a clipped surrogate, has this gradient plus zero-mean
    noise, so it is left out.

    Metric: `kl_teacher`, which is D.

    weight  weight of the divergence from the teacher, above 0
    """

    unit = 1
    weight: float = 1.0
    anchors: tuple[Anchor, ...] = ()

    def __post_init__(self) -> None:
        check_number("Distillation's weight", self.weight, POSITIVE)

    @property
    def every(self) -> tuple[Anchor, ...]:
        """Reorders the anchors so that the teacher's comes first."""
        return (Anchor(self.weight, TEACHER), *self.anchors)

    @property
    def roles(self) -> frozenset[str]:
        return roles(self.every)

    def __call__(self, likelihood: Likelihood, evaluations: Evaluations, rows: Rows) -> Entries:
        value, metrics = anchored(self.every, likelihood, evaluations, rows)
        assert isinstance(value, Tensor), "the teacher is always there"
        return Entries(value, "tokens", metrics)
