"""Rewards that are scored but not trained: where the trained one is doubted, and what is new.

GARDO (arXiv:2512.24138), from the abstract and the authors' code. The trained reward is a proxy of
what is wanted. Further rewards, of weight 0 in the run, show where it cannot be trusted: there
alone the KL counts. n samples of an iteration, r rewards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.credit.advantages import Standardize
from flowrl.credit.choices import Choices, independent, text_plans
from flowrl.credit.values import Context, Credit, Transform, masked_mean
from flowrl.errors import UserError
from flowrl.number_checks import check_number
from flowrl.table import Column
from rewards.types import Scores
from samplers.number_ranges import BETWEEN_0_AND_1

LEAST, MOST = 0.02, 0.2  # bounds of a share that adapts
REMEMBERED = 20  # iterations whose mean uncertainty the share is compared with
GATE: Column[Float[Tensor, "n 1"]] = Column(
    "weights of the samples in gated anchors", "gate", part="ProxyGate"
)


def standing(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Twice the number of other values below each value, equal ones counting one half: whole
    numbers from 0 to 2 (n - 1)."""
    values = values.contiguous()
    order = values.sort().values
    below, up_to = (torch.searchsorted(order, values, right=right) for right in (False, True))
    return (below + up_to - 1).double()


def doubt(
    scores: Scores, weights: Float[Tensor, " r"], auxiliary: Sequence[str]
) -> tuple[Float[Tensor, " m"], Bool[Tensor, " n"]]:
    """Surplus of a sample's rank by the weighted sum of the rewards over its mean rank by rewards
    `auxiliary`, for the m samples that have a total and that all of these scored; and which these
    are.

        u = s(R) - mean_k s(R_k),  s = share of the other samples below

    -1 to 1. Below 0 the others rank a sample higher than the proxy does.
    """
    at = [scores.names.index(name) for name in auxiliary]
    scored = scores.complete.cpu() & scores.scored.cpu()[:, at].all(1)
    values = scores.values.double().cpu()[scored]
    whole = standing((values * weights.double().cpu()).sum(1))
    auxiliary_ranks = [standing(values[:, column]) for column in at]
    count = len(auxiliary_ranks)
    more = count * whole - torch.stack(auxiliary_ranks).sum(0)  # whole numbers, so that 0 is exact
    return more / (2 * count * max(len(values) - 1, 1)), scored


class GateHistory(NamedTuple):
    """A gate's share, and the mean uncertainty of the last iterations."""

    share: float
    means: tuple[float, ...]


GATE_HISTORY: Column[GateHistory] = Column("the gate's share and history", "tracker", "whole")


def adapted(before: GateHistory, mean: float) -> GateHistory:
    """The share of an iteration whose mean uncertainty, of samples with one of at least 0, is
    `mean`: the authors' rule.

    A mean above those of the last 20 iterations makes the share 10 % larger, one below them 10 %
    smaller, between 0.02 and 0.2.
    """
    share, means = before
    if means and mean > max(means):
        share *= 1.1
    elif means and mean < min(means):
        share *= 0.9
    return GateHistory(min(max(share, LEAST), MOST), (*means, mean)[-REMEMBERED:])


@dataclass(frozen=True)
class ProxyGate:
    """The samples whose KL counts: those that the trained reward ranks too high, GARDO
    (arXiv:2512.24138). Advantages stay as they are.

        gate = n / m where u > the (1 - share) quantile of all u >= 0, else 0

    u is `doubt`, m the number of gated samples among the n in the loss. The mean over all
    samples of gate KL is then the mean KL of the gated ones, as in the code, which divides by the
    gated rows of each micro-batch instead of the iteration's. The abstract penalises samples of
    high uncertainty, which are meant here. The code numbers ranks from 1 for the best and gates
    where the proxy's rank number exceeds the others' mean: where the proxy ranks a sample *worse*.

    auxiliary  labels of further rewards, of weight 0
    share      in (0, 1), of the samples with u >= 0; with the tracker `GateShare`, the tracker's
    """

    provides: ClassVar[tuple[Column[Any], ...]] = (GATE,)
    auxiliary: tuple[str, ...]
    share: float = 0.1

    def __post_init__(self) -> None:
        if not self.auxiliary:
            raise UserError("ProxyGate needs a reward to compare with: name one in auxiliary")
        if not 0 < self.share < 1:
            raise UserError(f"ProxyGate's share must be between 0 and 1, not {self.share}")

    @property
    def compares_by(self) -> tuple[str, ...]:
        return self.auxiliary

    def __call__(self, credit: Credit, context: Context) -> Credit:
        """The same credit: the gate acts on the KL, through `weights`."""
        return credit

    def weights(
        self, scores: Scores, context: Context, learned: Bool[Tensor, " n"]
    ) -> Float[Tensor, " n"]:
        """Weight of each sample's KL. `learned`: the samples in the loss."""
        u, scored = doubt(scores, context.weights, self.auxiliary)
        weights = torch.zeros(len(scored), dtype=torch.float64)
        if len(u) == 0:
            return weights
        high, share = u[u >= 0], self.share
        if GATE_HISTORY in context.table:
            share = adapted(context.table[GATE_HISTORY], float(high.mean())).share
        weights[scored] = (u > torch.quantile(high, 1 - share)).double()
        weights *= learned
        return weights * learned.sum() / weights.sum().clamp(min=1)

    def refuses(self, choices: Choices) -> str | None:
        """Refuses samples that are not the rows of a loss one by one."""
        if text_plans(choices):
            return "ProxyGate weights the KL of images and videos: leave it out for texts"
        if any(plan.group < 2 for plan in choices.plans):
            return "a group of one has no advantage: use a group of at least 2"
        if not independent(choices.plan, choices.plans):
            return "ProxyGate needs independent samples: use Chain, Window or Ode"
        return None


def gate_of(transforms: Sequence[Transform]) -> ProxyGate | None:
    """The gate of the KL among an algorithm's transforms."""
    return next((part for part in transforms if isinstance(part, ProxyGate)), None)


@dataclass
class GateShare:
    """The share of a `ProxyGate`, adapted in every iteration: see `adapted`.

    auxiliary  labels of further rewards, of weight 0
    share      share that the gate begins with, in (0, 1)
    """

    auxiliary: tuple[str, ...]
    share: float = 0.1
    history: GateHistory = field(init=False)

    def __post_init__(self) -> None:
        self.history = GateHistory(self.share, ())
        check_number("GateShare's share", self.share, BETWEEN_0_AND_1)

    def weights(self, prompts: int) -> Float[Tensor, " p"] | None:
        return None

    def before(self, context: Context) -> Context:
        return context.with_column(GATE_HISTORY, self.history)

    def after(self, scores: Scores, context: Context) -> None:
        u, _ = doubt(scores, context.weights, self.auxiliary)
        if len(u):
            self.history = adapted(self.history, float(u[u >= 0].mean()))

    def state(self) -> dict[str, Any]:
        return {"share": self.history.share, "means": list(self.history.means)}

    def restore(self, state: dict[str, Any]) -> None:
        self.history = GateHistory(state["share"], tuple(state["means"]))


@dataclass(frozen=True)
class Diverse:
    """Advantages without a std, larger for good samples unlike their group: GARDO
    (arXiv:2512.24138).

        A = (value - mean) d / mean(d) above the group's mean, value - mean below it

    d is the score of the reward `distance`, of weight 0: the least distance to another sample of
    the group. The factor is 1 for a sample without such a score, and if all d are 0. Where good
    samples are alike their advantages shrink, so that the group's mean falls below 0.

    distance  label of the reward, of weight 0, that scores the distance
    """

    distance: str

    @property
    def compares_by(self) -> tuple[str, ...]:
        return (self.distance,)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        assert context.scores is not None, "`Estimator` sets them"
        scores, group = context.scores, context.columns.group
        at = scores.names.index(self.distance)
        d, mask = (part[:, at].cpu().view(-1, group) for part in (scores.values, scores.scored))
        mean = masked_mean(d.double(), mask, 1)
        factor = torch.where(mask & (mean > 0), d.double() / mean, 1.0).view(-1, 1, 1)
        plain = Standardize(scale=None)(credit, context)
        return plain._replace(value=torch.where(plain.value > 0, factor * plain.value, plain.value))

    def refuses(self, choices: Choices) -> str | None:
        """Refuses texts, and trees, in which distances would be of leaves and advantages of
        nodes."""
        if text_plans(choices):
            return "Diverse compares images and videos: leave it out for texts"
        if not independent(choices.plan, choices.plans):
            return "Diverse needs independent samples: use Chain, Window or Ode"
        return None
