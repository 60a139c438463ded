"""Losses that compare the samples of a group with each other.

`Preference` compares pairs, under any likelihood. The others read the matching errors d = -log p of
clean samples at the same noise level, so any sampler can be used. The rows of a group stay together
(`Matching.together`), since sums over part of a group would be wrong.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flowrl.credit.choices import Choices, image_plans
from flowrl.credit.comparisons import BestWorst
from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.rows import Evaluation, Evaluations, MatchingRows, Rows
from flowrl.likelihoods.transition import Likelihood
from flowrl.losses.base import Entries
from flowrl.number_checks import check_number
from samplers.number_ranges import AT_LEAST_0, AT_LEAST_1, POSITIVE


@dataclass(frozen=True)
class Preference:
    """Preference for the better sample of each pair: DPO (arXiv:2305.18290).

        loss = -log sigmoid(beta (gain_better - gain_worse)),  gain = log p_new - log p_ref

    Rows come in pairs, the better first. With `Matching` this is Diffusion-DPO (arXiv:2311.12908),
    whose beta is twice this one.

    beta  inverse temperature of the preference, above 0; larger keeps the policy nearer to the
          initial one
    """

    unit = 2
    roles = frozenset({"ref"})
    beta: float

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise UserError(f"Preference's beta must be above 0, got {self.beta}")

    def refuses(self, choices: Choices) -> str | None:
        """Refuses rows that are not pairs of a group's best and worst samples."""
        if not any(isinstance(transform, BestWorst) for transform in choices.transforms[-1:]):
            return "Preference needs BestWorst as the last transform of the advantage"
        if isinstance(choices.likelihood, Matching) and choices.likelihood.together > 1:
            return "Preference learns from pairs, the better first: use Matching(paired=True)"
        return None

    def __call__(self, likelihood: Likelihood, evaluations: Evaluations, rows: Rows) -> Entries:
        gain = evaluations["new"].logp - evaluations["ref"].logp
        better, worse = (gain * rows.mask).sum(1).view(-1, 2).unbind(1)
        margin = (self.beta * (better - worse)).repeat_interleave(2)[:, None].expand_as(gain)
        metrics = {"margin": margin.detach(), "won": (margin > 0).to(margin)}
        return Entries(-F.logsigmoid(margin), "rows", metrics)  # both rows carry their pair's loss


def _refuses(name: str, group: int, choices: Choices) -> str | None:
    """Refuses likelihoods without matching errors, and groups that are split or joined."""
    likelihood = choices.likelihood
    if not isinstance(likelihood, Matching) or likelihood.paired:
        return f"{name} compares matching errors of a group: use Matching(together={group})"
    if any(plan.group != group for plan in image_plans(choices)):
        sizes = sorted({plan.group for plan in image_plans(choices)})
        return (
            f"{name} compares groups of {group}, but the plan has groups of {sizes}: make them "
            "equal"
        )
    return None


@dataclass(frozen=True)
class GroupPreference:
    """Preference of a group's good samples over its bad ones: DGPO (arXiv:2510.08425, eq. 17).

        loss = sg(W) A d + kl |v - v_ref|^2,  W = sigmoid(beta / G sum_group A (sg d - d_ref))

    d = -log p is a sample's matching error, d_ref the error under `reference`, G the group's size,
    and A is clipped to +-advantage_max. It has the gradient of softplus(beta / G sum A (d -
    d_ref)), summed over groups, with beta / G left out. The unknown normaliser cancels if A has
    mean 0 in a group.

    clip_at  above 0: stops the gradient of d where A > 0 and exp(d_slow - d) > 1 + clip_at, or A <=
             0 and exp(d_slow - d) < 1 - clip_at; d_slow is the error under the average `slow`.
             None: no clipping
    clip_error  whether the clip stops the gradient of d in the first term
    clip_kl     whether the clip stops the gradient of the divergence

    beta       inverse temperature of the preference, above 0
    kl         weight of the divergence, at least 0; 0 leaves it out
    reference  policy that errors are compared with: `ref`, the initial one, or an average
    """

    group: int
    beta: float = 100.0
    clip_at: float | None = 0.01
    kl: float = 0.0
    clip_kl: bool = False
    slow: str = "slow"
    reference: str = "ref"
    advantage_max: float = 5.0
    clip_error: bool = True

    def __post_init__(self) -> None:
        check_number("GroupPreference's beta", self.beta, POSITIVE)
        check_number("GroupPreference's advantage_max", self.advantage_max, POSITIVE)
        if self.clip_at is not None and not 0 < self.clip_at < math.inf:
            raise UserError(
                f"GroupPreference's clip_at must be above 0, or null, got {self.clip_at}"
            )
        if self.clip_kl and (self.clip_at is None or not self.kl):
            raise UserError(
                "clip_kl removes the gradient of a divergence where a clip acts: set both"
            )
        check_number("GroupPreference's group", self.group, AT_LEAST_1)
        check_number("GroupPreference's kl", self.kl, AT_LEAST_0)

    @property
    def unit(self) -> int:
        return self.group

    @property
    def roles(self) -> frozenset[str]:
        slow = {self.slow} if self.clip_at is not None else set[str]()
        return frozenset({self.reference, *slow, *({"ref"} if self.kl else ())})

    def refuses(self, choices: Choices) -> str | None:
        return _refuses("GroupPreference", self.group, choices)

    def outside(self, evaluations: Evaluations, rows: Rows) -> tuple[Tensor, Tensor]:
        """Rows [b 1] whose gradient the clip removes, and the ratios exp(d_slow - d).

        Unlike PPO's clip (`past_low`), it also removes rows whose advantage is 0: see `clip_at`.
        """
        if self.clip_at is None:
            return torch.zeros_like(rows.mask), torch.ones_like(rows.advantage)
        ratio = (evaluations["new"].logp.detach() - evaluations[self.slow].logp).exp()
        good = rows.advantage > 0
        return torch.where(good, ratio > 1 + self.clip_at, ratio < 1 - self.clip_at), ratio

    def errors(self, evaluations: Evaluations, rows: Rows) -> Float[Tensor, "b 1"]:
        """Matching errors d, without gradient where clipped."""
        error = -evaluations["new"].logp
        if not self.clip_error:
            return error
        return torch.where(self.outside(evaluations, rows)[0], error.detach(), error)

    def __call__(self, likelihood: Likelihood, evaluations: Evaluations, rows: Rows) -> Entries:
        a = rows.advantage.clamp(-self.advantage_max, self.advantage_max)
        error = self.errors(evaluations, rows)
        gain = a * (error.detach() + evaluations[self.reference].logp) * rows.mask
        gain = gain.view(-1, self.group)
        weight = (self.beta * gain.mean(1, keepdim=True)).sigmoid()
        weight = weight.expand_as(gain).reshape(a.shape)
        outside, ratio = self.outside(evaluations, rows)
        value = weight * a * error
        metrics = {"ratio_slow": ratio, "policy_loss": value.detach(), "weight": weight}
        metrics["clipped_low"] = (outside & (a <= 0)).to(a)
        metrics["clipped_high"] = (outside & (a > 0)).to(a)
        if self.kl:
            kl = likelihood.kl(evaluations["new"], evaluations["ref"], rows)
            metrics["kl"] = kl.detach()
            value = value + self.kl * (
                torch.where(outside, kl.detach(), kl) if self.clip_kl else kl
            )
        return Entries(value, "tokens", metrics)


@dataclass(frozen=True)
class CentredReward:
    """Regression of implicit rewards on advantages, both centred per group: CRD
    (arXiv:2603.14128).

        loss = advantage_max / beta (beta R^c - a^c)^2 + kl (m + a (1 - m)) |v - v_ref|^2

    R = |v_slow - u|^2 / w_slow - |v - u|^2 / w is how much better v matches u = noise - x0 than the
    average `slow` does, w the detached mean |. - u| (`adaptive`, otherwise 1). a = A / (2
    advantage_max) + 1/2, with A clipped to +-advantage_max. R^c and a^c are R and a minus their
    group means, so that the unknown normaliser cancels.

    kind         mse as above, or bce: cross-entropy of beta R^c and sigmoid(a^c)
    temperature  at least 0: the mean is weighted by softmax(a / temperature), and the loss averaged
                 with the loss for softmax(-a / temperature); None weights all samples equally, and
                 0 is the code's hard choice, equivalent to softmax(a) where a > 0 and to equal
                 weights
    reward_adaptive_kl  m = 1e-4 / kl: weaker for bad samples; otherwise m = 1

    beta      scale of the implicit reward, above 0; larger keeps the policy nearer to the average
    kl        weight of the divergence from the initial policy, at least 0; 0 leaves it out
    adaptive  whether errors are divided by their own mean size
    """

    group: int
    beta: float = 1.0
    kl: float = 0.1
    temperature: float | None = None
    kind: Literal["mse", "bce"] = "mse"
    adaptive: bool = True
    reward_adaptive_kl: bool = True
    slow: str = "slow"
    advantage_max: float = 5.0

    def __post_init__(self) -> None:
        check_number("CentredReward's beta", self.beta, POSITIVE)
        check_number("CentredReward's advantage_max", self.advantage_max, POSITIVE)
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise UserError(f"a temperature must be at least 0, or null, not {self.temperature}")
        if not 0 <= self.kl < math.inf:
            raise UserError(f"CentredReward's kl must be at least 0, got {self.kl}")
        check_number("CentredReward's group", self.group, AT_LEAST_1)

    @property
    def unit(self) -> int:
        return self.group

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({self.slow, *({"ref"} if self.kl else ())})

    def refuses(self, choices: Choices) -> str | None:
        return _refuses("CentredReward", self.group, choices)

    def implicit(self, evaluations: Evaluations, target: Tensor) -> Float[Tensor, "b 1"]:
        """Implicit rewards R, positive or negative; 0 if the policy equals the average."""
        return self._error(evaluations[self.slow], target) - self._error(evaluations["new"], target)

    def _error(self, says: Evaluation, target: Tensor) -> Float[Tensor, "b 1"]:
        assert says.out is not None, "Matching keeps velocities"
        difference = (says.out - target).flatten(1)
        error = difference.square().mean(1, keepdim=True)
        if not self.adaptive:
            return error
        return error / difference.detach().abs().mean(1, keepdim=True).clamp(min=1e-5)

    def __call__(self, likelihood: Likelihood, evaluations: Evaluations, rows: Rows) -> Entries:
        assert isinstance(rows, MatchingRows), "`refuses` excludes others"
        reward = self.implicit(evaluations, rows.noise - rows.x0)
        a = self.wanted(rows.advantage)
        r, want, mask = (part.view(-1, self.group) for part in (reward, a, rows.mask))
        logits = [logit.masked_fill(~mask, -torch.inf) for logit in self._logits(want)]
        losses = [self._centred(r, want, logit) for logit in logits]
        value = torch.stack(losses).mean(0).reshape(reward.shape) * self.advantage_max / self.beta
        metrics = {"policy_loss": value.detach(), "implicit_reward": reward.detach()}
        if self.kl:
            kl = likelihood.kl(evaluations["new"], evaluations["ref"], rows)
            metrics["kl"] = kl.detach()
            least = 1e-4 / self.kl if self.reward_adaptive_kl else 1.0
            value = value + self.kl * (least + a * (1 - least)) * kl
        return Entries(value, "tokens", metrics)

    def wanted(self, advantage: Tensor) -> Tensor:
        """Advantages mapped to 0..1."""
        cut = advantage.clamp(-self.advantage_max, self.advantage_max)
        return cut / (2 * self.advantage_max) + 0.5

    def _logits(self, want: Tensor) -> tuple[Tensor, ...]:
        """Logits of the weights of each mean."""
        if self.temperature is None:
            return (torch.zeros_like(want),)
        if self.temperature == 0:
            return want.masked_fill(want <= 0, -torch.inf), torch.zeros_like(want)
        return want / self.temperature, -want / self.temperature

    def _centred(self, r: Tensor, want: Tensor, logits: Tensor) -> Tensor:
        """The loss [g group] with the means weighted by softmax(logits)."""
        weight = logits.softmax(1).nan_to_num(0.0)  # a group without a scored sample
        r = r - (weight * r.detach()).sum(1, keepdim=True)
        want = want - (weight * want).sum(1, keepdim=True)
        if self.kind == "mse":
            return (self.beta * r - want).square()
        return F.binary_cross_entropy_with_logits(self.beta * r, want.sigmoid(), reduction="none")
