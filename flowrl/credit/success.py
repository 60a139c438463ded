"""Advantage transforms for success rates: MaxRL, pass@k, BNPO.

Like the transforms of `flowrl.credit.advantages`, they map credit [n, k, r] to credit and honour
its mask. p is the mean of a group, c its number of successes, n its size.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.credit.choices import Choices
from flowrl.credit.fitting import refuse_branches
from flowrl.credit.values import (
    NONE,
    Context,
    Credit,
    by_column,
    masked_mean,
    masked_std,
)
from flowrl.errors import UserError
from flowrl.number_checks import check_number
from samplers.number_ranges import AT_LEAST_0, POSITIVE


@dataclass(frozen=True)
class MaxRL:
    """Gradient of log p, the log-likelihood of success: MaxRL (arXiv:2602.02710).

        A = (value - p) / (max(p, floor) + eps)

    baseline  "mean" is the formula above; "none" is value / p; "one" is value / p - 1, which
              differs from "mean" only in groups without success, where it is -1
    floor     at least 0, 0.125 in the authors' clipped form, which also divides by the group's size
              (`Rescale`)
    spread    also divides by the group's std, another variant of the authors

    eps  added to the divisor, at least 0
    """

    baseline: Literal["mean", "none", "one"] = "mean"
    floor: float = 0.0
    spread: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_number("MaxRL's floor", self.floor, AT_LEAST_0)
        check_number("MaxRL's eps", self.eps, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return by_column(credit, context, self.rule)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)

    def rule(self, value: Tensor, mask: Tensor) -> Tensor:
        p = masked_mean(value, mask, 1)
        size = p.clamp(min=self.floor) + self.eps
        if self.baseline == "none":
            return value / size
        if self.baseline == "one":
            return value / size - 1
        std = masked_std(value, mask, 1, 0)
        centred = torch.where(std > 0, (value - p) / size, 0.0)
        return centred / (std + self.eps) if self.spread else centred


def _successes(value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Count n and c of each group, [g 1 r]. UserError for rewards other than 0 and 1."""
    if not ((value == 0) | (value == 1) | ~mask).all():
        raise UserError(
            "pass@k counts successes: it needs a reward of 0 or 1, such as exact_answer"
        )
    return mask.sum(1, keepdim=True).double(), (value * mask).sum(1, keepdim=True)


def _choose(n: Tensor, k: int) -> Tensor:
    """The binomial coefficient n over k; 0 where n < k."""
    n = n.double()
    logs = (
        torch.lgamma(n + 1)
        - torch.lgamma((n - k + 1).clamp(min=1))
        - torch.lgamma(torch.tensor(k + 1.0, dtype=torch.float64))
    )
    return torch.where(n >= k, logs.exp().round(), 0.0)


def _fail_chance(n: Tensor, c: Tensor, k: int) -> Tensor:
    """1 - rho(n, c, k) = C(n - c, k) / C(n, k): the chance that k of n samples, drawn without
    replacement, hold none of the c successes. 0 where n < k."""
    return _choose(n - c, k) / _choose(n, k).clamp(min=1)


@dataclass(frozen=True)
class PassAtK:
    """Credit for the chance that at least one of k samples succeeds. Rewards are 0 or 1.

    With rho(n, c, k) = 1 - C(n - c, k) / C(n, k), and the standard deviation
    std = sqrt(rho (1 - rho)) + eps of the maximum over subsets of size k:

        leave_one_out  A_i = k/n (1 if r_i else rho(n - 1, c, k - 1)) - k/n rho(n - 1, c - r_i, k)
        analytic       A_i = (1 - rho(n, c, k) - (0 if r_i else C(n-c-1, k-1) / C(n-1, k-1))) / std

    leave_one_out  PKPO (arXiv:2505.15201): sum_i A_i grad log p_i is an unbiased estimate of the
                   gradient of pass@k. The baseline needs k other samples: groups with at most k
                   scores get 0. At k = 1 it is `LeaveOneOut` over n
    analytic       the mean of the standardised maxima of the subsets that hold sample i: pass@k
                   training (arXiv:2508.10751)

    UserError for rewards other than 0 and 1, and for groups that are too small for k.

    k     samples of which one has to succeed, at least 1
    form  the formula: `leave_one_out` or `analytic`, as above
    eps   added to the standard deviation, at least 0
    """

    k: int
    form: Literal["leave_one_out", "analytic"] = "leave_one_out"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UserError(f"the k of pass@k must be at least 1, not {self.k}")
        check_number("PassAtK's eps", self.eps, AT_LEAST_0)

    def refuses(self, choices: Choices) -> str | None:
        """Refuses groups of fewer than k samples, and trees."""
        few = self._too_few(min(plan.group for plan in choices.plans))
        return few or refuse_branches(self, choices)

    def _too_few(self, group: int) -> str | None:
        least = self.k + (self.form == "leave_one_out")
        if group >= least:
            return None
        return (
            f"pass@{self.k} with form {self.form} needs a group of at least {least}, not {group}: "
            "raise group or lower k"
        )

    def __call__(self, credit: Credit, context: Context) -> Credit:
        if sentence := self._too_few(context.columns.group):
            raise UserError(sentence)
        return by_column(credit, context, self.rule)

    def rule(self, value: Tensor, mask: Tensor) -> Tensor:
        n, c = _successes(value, mask)
        if self.form == "leave_one_out":
            missed = torch.where(value > 0, 0.0, _fail_chance(n - 1, c, self.k - 1))
            gain = _fail_chance(n - 1, c - value, self.k) - missed
            return torch.where(n > self.k, self.k / n.clamp(min=1) * gain, 0.0)
        fail = _fail_chance(n, c, self.k)
        std = (fail * (1 - fail)).sqrt() + self.eps
        subsets = _choose(n - 1, self.k - 1).clamp(min=1)
        alone = fail - _choose(n - c - 1, self.k - 1) / subsets
        return torch.where((fail > 0) & (fail < 1), torch.where(value > 0, fail, alone) / std, 0.0)


@dataclass(frozen=True)
class BestGap:
    """Margin of a group's best sample over the second best, to train for the maximum of k samples
    (arXiv:2503.19595).

        A = (best - second) / (std + eps) for the best, 0 for the others

    Without `scaled` there is no division. A tie at the top gives 0.

    scaled  whether the margin is divided by the group's std
    """

    scaled: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_number("BestGap's eps", self.eps, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return by_column(credit, context, self.rule)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)

    def rule(self, value: Tensor, mask: Tensor) -> Tensor:
        ranked = value.masked_fill(~mask, -torch.inf).sort(1, descending=True).values
        best, second = ranked[:, :1], ranked[:, 1:2]
        lead = torch.where(second > -torch.inf, best - second, 0.0)
        lead = torch.where(lead > NONE * best.abs(), lead, 0.0)
        if self.scaled:
            lead = lead / (masked_std(value, mask, 1, 1) + self.eps)
        return torch.where(value == best, lead, 0.0)


@dataclass(frozen=True)
class BetaNormalize:
    """Advantages divided by a Beta density of the batch's success rates: BNPO (arXiv:2506.02864).

        A = (value - p) min(most, 1 / Beta(p; a, b))

    Matching the moments of p over draws gives (a', b'), and a = 1 + a' / 3, b = 1 + b' / 3, at
    least 1. Near 0 and 1 a weight can be huge. The authors' `most` is 1e6, but their comment asks
    for a tighter one. `correction`: the variance of p divides by n - correction, 0 in the paper and
    1 in the authors' code. UserError for rewards outside 0..1.

    most        largest weight, above 0
    correction  number that is subtracted from n in the variance of p, at least 0: 0 in the paper, 1
                in the code
    """

    most: float = 10.0
    correction: int = 0

    def __post_init__(self) -> None:
        check_number("BetaNormalize's most", self.most, POSITIVE)
        check_number("BetaNormalize's correction", self.correction, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return by_column(credit, context, self.rule)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)

    def rule(self, value: Tensor, mask: Tensor) -> Tensor:
        if not ((value >= 0) & (value <= 1) | ~mask).all():
            raise UserError("BetaNormalize needs rewards in 0..1: rescale them")
        p, scored = masked_mean(value, mask, 1), mask.any(1, keepdim=True)
        mean = masked_mean(p, scored, 0)
        var = masked_std(p, scored, 0, self.correction).square()
        size = torch.where(var > 0, mean * (1 - mean) / var.clamp(min=1e-300) - 1, 0.0)
        a, b = (1 + (size * m / 3).clamp(min=0) for m in (mean, 1 - mean))
        # a rate of 0 or 1 has no density, but then no sample differs from it either
        inside = p.clamp(1e-12, 1 - 1e-12)
        log_density = (a - 1) * inside.log() + (b - 1) * (1 - inside).log()
        log_density = log_density + torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
        weight = (-log_density).exp().clamp(max=self.most)
        return torch.where(masked_std(value, mask, 1, 0) > 0, (value - p) * weight, 0.0)
