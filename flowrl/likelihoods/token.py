"""Likelihood of completions under a language model, token by token."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.credit.choices import Choices, text_plans
from flowrl.credit.turns import greedy_baselines
from flowrl.credit.values import NodeLevel
from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.rows import (
    Evaluation,
    PointMask,
    PointValues,
    TokenRows,
    take,
    unlike_texts,
)
from flowrl.likelihoods.token_ratios import KLEstimator, RatioLevel, divergence, log_ratio
from samplers.completions import TextPlan, TextRollout

TokenPolicy = Callable[[TokenRows, bool], Evaluation]
"""(rows, whether to compute entropies) -> log-probabilities [b t] and entropies [b t] in nats,
of the distribution that tokens are sampled from; 0 at padding."""


# Beyond these bounds another token is sampled only if it is as likely as the best one to a percent:
# at LEAST_TEMPERATURE a difference of 0.01 in logits is a factor of e^10.
LEAST_TEMPERATURE = 1e-3
LEAST_TOP_P = 1e-5  # below the probability of the best of 100,000 tokens
MOST_MIN_P = 0.99


def without_choice(plan: TextPlan) -> str | None:
    """The setting of a plan that leaves one token to choose from, and its fix."""
    if plan.temperature < LEAST_TEMPERATURE:
        setting, fix = f"temperature {plan.temperature:g}", "raise the temperature"
    elif plan.top_k == 1:
        setting, fix = "top_k 1", "raise top_k, or leave it out"
    elif plan.top_p < LEAST_TOP_P:
        setting, fix = f"top_p {plan.top_p:g}", "raise top_p, or leave it out"
    elif plan.min_p > MOST_MIN_P:
        setting, fix = f"min_p {plan.min_p:g}", "lower min_p, or leave it out"
    else:
        return None
    return f"at {setting} nothing is random, so nothing can be learned: {fix}"


@dataclass(frozen=True)
class Token:
    """Log-probability of each token under the sampler's temperature, top-p, top-k and min-p.

        log p_t = logits_t / temperature - log sum_{kept tokens} exp(logits / temperature)

    So the ratio of unchanged weights is 1 at any temperature and top-p. The kept tokens are the
    sampler's rather than the tokens that new weights would keep: the ratio is smooth, and no
    sampled token ever has probability 0 (arXiv:2512.02556, section 3.1).

    ratio     the level of the ratio: see `flowrl.likelihoods.token_ratios.log_ratio`
    kl_form   the estimate of a divergence: see `flowrl.likelihoods.token_ratios.divergence`
    entropy   also computes entropies
    paired    keeps each group's best and worst as consecutive rows; a tie, and a pair of equal
              completions, is masked
    cut       whether completions that were cut off at the length limit are trained on or masked
              (DAPO's overlong filter, arXiv:2503.14476)

    Each turn of a completion has its own credit. Unless credit compares turns, all turns share the
    trajectory's (AgentFlow's Flow-GRPO, arXiv:2510.05592). The replies of an environment are
    context and never enter the loss. In a tree a token that several leaves share is in the loss
    once, with their mean credit.
    """

    keep_mean = False
    text = True
    ratio: RatioLevel = "token"
    kl_form: KLEstimator = "k3"
    entropy: bool = False
    paired: bool = False
    cut: Literal["train", "mask"] = "train"

    @property
    def unit(self) -> int:
        return 2 if self.paired else 1

    def refuses(self, choices: Choices) -> str | None:
        """Refuses image plans, and completions without a density."""
        plans = text_plans(choices)
        if len(plans) < len(choices.plans):
            return "the Token likelihood needs a text plan: Completions or Segments"
        certain = next(filter(None, map(without_choice, plans)), None)
        if certain is not None:
            return certain
        counts = greedy_baselines(choices.transforms)
        if any(counts != [plan.group] * plan.greedy for plan in plans):
            return (
                "GreedyBaseline and Completions(greedy=True) require each other: the plan's last "
                "completion is the baseline, and it counts as one of the draw's completions"
            )
        return None

    def rows(
        self, rollout: TextRollout, advantage: PointValues, mask: PointMask
    ) -> list[TokenRows]:
        """One `Rows` with all completions, or all pairs of them. `advantage` has one column per
        decision point, or per token."""
        value, credited = by_token(rollout, advantage, mask)
        trained = credited & rollout.own
        if self.cut == "mask":
            trained = trained & rollout.stopped[:, None]
        spread = value.masked_fill(~trained, 0.0)
        completions, sampled = self.whole(rollout)
        rows = replace(completions, advantage=spread[sampled], mask=trained[sampled])
        if not self.paired:
            return [rows]
        last = rollout.last[:, None]  # samples may differ in their last turn
        value, credited = (part.gather(1, last)[:, 0] for part in (advantage, mask))
        keep, differ = Matching.pairs(value, credited, rollout.plan.group)
        pairs = take(rows, keep)
        differ = differ & unlike_texts(pairs)
        pair_mask = pairs.written & differ[:, None]  # a pair is compared as whole completions
        return [replace(pairs, mask=pair_mask)]

    def whole(self, rollout: TextRollout) -> tuple[TokenRows, Int[Tensor, " b"]]:
        """All tokens of the randomly sampled completions, and their indices: losses never read
        greedy ones."""
        # another engine's log-probabilities are `sampled`, of whatever age
        replays = not rollout.elsewhere and bool(rollout.replayed.any())
        rows = TokenRows(
            prompt=rollout.prompt,
            advantage=torch.zeros_like(rollout.logp),
            mask=rollout.written,
            old=None if rollout.elsewhere else Evaluation(rollout.logp, None),
            ids=rollout.ids,
            lengths=rollout.lengths,
            temperature=rollout.plan.temperature,
            kept=rollout.kept,
            sampled=rollout.logp if rollout.elsewhere else None,
            from_environment=rollout.from_environment,
            replayed=rollout.replayed if replays else None,
        )
        sampled = torch.arange(len(rollout.ids))
        if not rollout.plan.greedy:
            return rows, sampled
        sampled = sampled[sampled % rollout.plan.group < rollout.plan.group - 1]
        return take(rows, sampled), sampled

    def evaluate(self, policy: TokenPolicy, rows: TokenRows) -> Evaluation:
        return policy(rows, self.entropy)

    def log_ratio(self, new: Evaluation, old: Evaluation, rows: TokenRows) -> Float[Tensor, "b t"]:
        return log_ratio(new.logp, old.logp, rows.mask, self.ratio)

    def kl(self, new: Evaluation, ref: Evaluation, rows: TokenRows) -> Float[Tensor, "b t"]:
        return divergence(new.logp, ref.logp, self.kl_form)


def by_token(
    rollout: TextRollout, advantage: PointValues, mask: PointMask
) -> tuple[Float[Tensor, "n t"], Bool[Tensor, "n t"]]:
    """Expand credit of decision points to their tokens; credit per token is returned unchanged."""
    nodes = rollout.passed
    if advantage.shape[1] != nodes.shape[1]:
        if advantage.shape[1] != rollout.ids.shape[1]:
            raise UserError(
                f"advantages have {advantage.shape[1]} columns, but need one for each of "
                f"{nodes.shape[1]} decision points or {rollout.ids.shape[1]} tokens"
            )
        return advantage.to(rollout.logp.dtype), mask
    value, credited = shared_credit(advantage, mask, nodes, rollout.plan.group)
    point = rollout.point
    return value.to(rollout.logp.dtype).gather(1, point), credited.gather(1, point)


def shared_credit(
    advantage: PointValues, mask: PointMask, nodes: Int[Tensor, "n k"], group: int
) -> tuple[PointValues, PointMask]:
    """Average credit over each node's credited leaves. The leaves of a node agree, except with
    estimators that add a leaf's own outcome (TEMPO)."""
    values: list[Tensor] = []
    masks: list[Tensor] = []
    for k, ids in enumerate(nodes.unbind(1)):
        level = NodeLevel.of(ids, group)
        credited = mask[:, k : k + 1].to(advantage)
        count = level.total(credited)
        mean = level.total(advantage[:, k : k + 1] * credited) / count.clamp(min=1)
        values.append(level.at_leaves(mean)[:, 0])
        masks.append(level.at_leaves(count > 0)[:, 0])
    return torch.stack(values, 1), torch.stack(masks, 1)
