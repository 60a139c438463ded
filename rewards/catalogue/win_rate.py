"""Scores from comparisons within a group: Pref-GRPO, arXiv:2508.20751.

A win rate ranks the samples of a group but cannot show that groups improve: its mean is one half by
construction. Add a pointwise reward, held out or with weight 0, to see whether a run improves.
Judging both orders and taking several votes are settings of the judge.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from rewards.checks.self_test import Exemplary
from rewards.combine import ByScore, judged
from rewards.judging.pairs import Design, PairBudget, bradley_terry, win_rates
from rewards.types import Judge, Positive, Reward, RewardScores, Samples

PairScore = Literal["win_rate", "bradley_terry"]


@dataclass(frozen=True)
class Tournament:
    """One score per sample from the verdicts on its pairs; NaN without any verdict.

    A pair is judged once, the earlier sample first. A pair without a verdict is left out; the
    authors' code counts half a win for both: to do the same, return 0.5. With a reward as the
    judge it abstains where the reward does.
    """

    judge: Judge
    budget: PairBudget
    score: PairScore = "win_rate"
    prior: float = 0.5
    one_call: ClassVar[bool] = True  # judges cost money
    per: ClassVar[Literal["group"]] = "group"

    def __call__(self, samples: Samples) -> Float[Tensor, " n"] | RewardScores:
        a, b = self.budget.pairs(samples)
        n = len(samples.prompts)
        verdicts = self._verdicts(samples, a, b) if len(a) else RewardScores.nowhere(0)
        if self.score == "win_rate":
            scores = win_rates(n, a, b, verdicts.values)
        else:
            scores = bradley_terry(n, a, b, verdicts.values, self.prior)
        applies = torch.ones(n, dtype=torch.bool)
        for side in (a.cpu(), b.cpu()):  # a pair is left out if either side is
            applies[side[~verdicts.applies]] = False
        for side in (a.cpu(), b.cpu()):
            applies[side[verdicts.applies]] = True
        return RewardScores(scores, applies).plain

    def _verdicts(
        self, samples: Samples, a: Int[Tensor, " p"], b: Int[Tensor, " p"]
    ) -> RewardScores:
        if isinstance(self.judge, ByScore):  # which checks its reward itself
            return self.judge.verdicts(samples, a, b)
        p = judged("judge", self.judge, samples, a, b)
        if ((p < 0) | (p > 1)).any():
            raise ValueError(
                f"the judge returned {p[(p < 0) | (p > 1)][0]:g}, which is not a probability"
            )
        return RewardScores(p, torch.ones(len(p), dtype=torch.bool))

    def examples(self) -> Samples | None:
        """Examples of the judge, or of the reward behind it, as one group."""
        source = self.judge.reward if isinstance(self.judge, ByScore) else self.judge
        examples = source.examples() if isinstance(source, Exemplary) else None
        if examples is None:
            return None
        return Samples(
            examples.media, examples.prompts, torch.zeros_like(examples.group), examples.meta
        )


def load(
    judge: Judge,
    pairs: Design = "all",
    count: Annotated[int, Field(ge=0)] = 0,
    score: PairScore = "win_rate",
    prior: Positive = 0.5,
    seed: int = 0,
) -> Reward:
    """Load the reward.

    judge  judge of pairs, or a reward, of which the higher score wins
    pairs  pairs of a group that are judged: all; each: every sample is in `count` pairs; anchors:
           `count` samples are compared with all others and with each other
    count  at least 0: pairs per sample with `pairs: each` (2 or more), anchors per group with
           `pairs: anchors` (1 or more); leave it out with all
    score  win_rate: the mean of the verdicts, in 0..1; bradley_terry: a log-strength that accounts
           for the strength of opponents, fairer where not all pairs are judged
    prior  games that each sample also won and lost against a player of average strength, above 0;
           more draw strengths together; no effect with win_rate
    seed   any number; decides which pairs `each` and `anchors` draw
    """
    return Tournament(judge, PairBudget(pairs, count, seed), score, prior)
