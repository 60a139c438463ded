"""How likely a language model finds its completions, token by token."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.credit.choices import Choices, text_plans
from flowrl.credit.turns import greedy_baselines
from flowrl.credit.values import NodeLevel as Nodes
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.rows import Evaluation, TokenRows, take
from flowrl.likelihoods.token_ratios import KLEstimator, RatioLevel, divergence, log_ratio
from samplers.completions import TextRollout

TokenPolicy = Callable[[TokenRows, bool], Evaluation]
"""(rows, whether entropies are wanted) -> log-probabilities [b t] and entropies [b t] in nats, of
the distribution that tokens are drawn from; 0 at padding."""


@dataclass(frozen=True)
class Token:
    """log p of each token under the sampler's own rule: its temperature, and the tokens that its
    top-p kept, so that the ratio of unchanged weights is 1 whatever they are.

    The tokens kept are the sampler's, not the ones that new weights would keep: a smooth ratio,
    and no token that was drawn ever has probability 0 (as in arXiv:2512.02556, section 3.1).

    ratio     at which level a ratio is taken: see `flowrl.likelihoods.token_ratios.log_ratio`
    kl_form   the estimate of a divergence
    entropy   also give entropies
    paired    keep each group's best and worst, next to each other; a tie gives a masked pair
    cut       completions that were cut off at the length: trained on, or masked (DAPO's overlong
              filter, arXiv:2503.14476)

    Each turn of a completion has its own credit, which is the same for all of them unless credit
    tells turns apart: a trajectory's outcome is then broadcast to its turns (AgentFlow's Flow-GRPO,
    arXiv:2510.05592). What an environment said between them is in the context, and in no loss.

    In a tree a token that leaves share is in the loss once, with the mean of their credit.
    """

    ratio: RatioLevel = "token"
    kl_form: KLEstimator = "k3"
    entropy: bool = False
    paired: bool = False
    cut: Literal["train", "mask"] = "train"

    @property
    def unit(self) -> int:
        return 2 if self.paired else 1

    @property
    def keep_mean(self) -> bool:
        return False

    @property
    def text(self) -> bool:
        return True

    def refuses(self, choices: Choices) -> str | None:
        """Refuses plans of images, and completions without a density."""
        plans = text_plans(choices)
        if len(plans) < len(choices.plans):
            return "the Token likelihood needs a plan of text: Completions or Segments"
        if any(plan.temperature == 0 for plan in plans):
            return "at temperature 0 nothing is random, so nothing can be learned"
        counts = greedy_baselines(choices.transforms)
        if any(counts != [plan.group] * plan.greedy for plan in plans):
            return (
                "GreedyBaseline and Completions(greedy=True) go together: one takes the other's "
                "last completion as the baseline, and counts the completions of a draw with it"
            )
        return None

    def rows(
        self, rollout: TextRollout, advantage: Float[Tensor, "n k"], mask: Bool[Tensor, "n k"]
    ) -> list[TokenRows]:
        """One `Rows` with all completions, or with all pairs of them. `advantage` has a column a
        decision point, or one a token."""
        value, some = by_token(rollout, advantage, mask)
        kept = some & rollout.own
        if self.cut == "mask":
            kept = kept & rollout.stopped[:, None]
        spread = value.to(rollout.logp.dtype).masked_fill(~kept, 0.0)
        every, drawn = self.whole(rollout)
        rows = replace(every, advantage=spread[drawn], mask=kept[drawn])
        if not self.paired:
            return [rows]
        last = rollout.last[:, None].to(advantage.device)  # a sample may lack the others' last turn
        value, some = (part.gather(1, last)[:, 0].cpu() for part in (advantage, mask))
        best = Matching.pairs(value, some, rollout.plan.group)
        keep, apart = (part.to(rollout.ids.device) for part in best)
        pairs = take(rows, keep)
        whole = pairs.written & apart[:, None]  # a pair is compared as whole completions
        return [replace(pairs, mask=whole)]

    def whole(self, rollout: TextRollout) -> tuple[TokenRows, Int[Tensor, " b"]]:
        """All tokens of the completions that were drawn by chance, and which samples those are:
        greedy ones are of no use to a loss."""
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
            told=rollout.told,
        )
        drawn = torch.arange(len(rollout.ids), device=rollout.ids.device)
        if not rollout.plan.greedy:
            return rows, drawn
        drawn = drawn[drawn % rollout.plan.group < rollout.plan.group - 1]
        return take(rows, drawn), drawn

    def evaluate(self, policy: TokenPolicy, rows: TokenRows) -> Evaluation:
        return policy(rows, self.entropy)

    def log_ratio(self, new: Evaluation, old: Evaluation, rows: TokenRows) -> Float[Tensor, "b t"]:
        return log_ratio(new.logp, old.logp, rows.mask, self.ratio)

    def kl(self, new: Evaluation, ref: Evaluation, rows: TokenRows) -> Float[Tensor, "b t"]:
        return divergence(new.logp, ref.logp, self.kl_form)


def by_token(
    rollout: TextRollout, advantage: Float[Tensor, "n k"], mask: Bool[Tensor, "n k"]
) -> tuple[Float[Tensor, "n t"], Bool[Tensor, "n t"]]:
    """Credit of decision points at each of their tokens; credit of tokens as it is."""
    nodes, device = rollout.passed, rollout.ids.device
    if advantage.shape[1] != nodes.shape[1]:
        assert advantage.shape[1] == rollout.ids.shape[1], "a column a decision point, or a token"
        return advantage.to(device), mask.to(device)
    found = shared_credit(advantage, mask, nodes, rollout.plan.group)
    value, some = (part.to(device).gather(1, rollout.point) for part in found)
    return value, some


def shared_credit(
    advantage: Float[Tensor, "n k"],
    mask: Bool[Tensor, "n k"],
    nodes: Int[Tensor, "n k"],
    group: int,
) -> tuple[Float[Tensor, "n k"], Bool[Tensor, "n k"]]:
    """Each leaf has the mean credit of its node's credited leaves, on the CPU. Most estimators give
    leaves of a node the same; those that add a leaf's own outcome (TEMPO) do not."""
    values, masks = [], []
    advantage, mask = advantage.cpu(), mask.cpu()
    for k, ids in enumerate(nodes.unbind(1)):
        level = Nodes.of(ids, group)
        kept = mask[:, k : k + 1].to(advantage)
        count = level.total(kept)
        mean = level.total(advantage[:, k : k + 1] * kept) / count.clamp(min=1)
        values.append(level.at_leaves(mean)[:, 0])
        masks.append(level.at_leaves(count > 0)[:, 0])
    return torch.stack(values, 1), torch.stack(masks, 1)
