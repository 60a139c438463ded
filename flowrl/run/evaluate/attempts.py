"""Scores of several attempts at one prompt: pass@k and the majority vote.

n samples, contiguous per prompt. Each function returns a column [n] with a prompt's value in all of
its rows, so that means, spreads and paired differences are computed like those of any other column.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.settings import EvaluateSettings
from rewards import Reward, Samples, Scores
from rewards.types import FindsAnswers


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Unbiased estimate of P(one of k samples is a success): 1 - C(n - c, k) / C(n, k).

    arXiv:2107.03374, equation 1. NaN for fewer than k samples.
    """
    if samples < k:
        return math.nan
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def majority_success(answers: Sequence[Hashable | None], success: Sequence[bool]) -> float:
    """Success of the most frequent answer, with ties sharing equally; 0 without any answer.

    Samples without an answer do not vote. An answer counts as a success if its first sample is one.
    """
    first: dict[Hashable, bool] = {}
    votes: Counter[Hashable] = Counter()
    for answer, good in zip(answers, success, strict=True):
        if answer is not None:
            votes[answer] += 1
            first.setdefault(answer, good)
    most = max(votes.values(), default=0)
    tied = [first[answer] for answer, count in votes.items() if count == most]
    return sum(tied) / len(tied) if tied else 0.0


@dataclass(frozen=True)
class Attempts:
    """Settings from `evaluate.pass_at`, `evaluate.majority` and `evaluate.success`."""

    pass_at: tuple[int, ...] = ()
    majority: bool = False
    success: float = 1.0

    @classmethod
    def of(cls, e: EvaluateSettings) -> "Attempts":
        return cls(e.pass_at, e.majority, e.success)

    def columns(
        self, rewards: Mapping[str, Reward], samples: Samples, scores: Scores
    ) -> dict[str, Float[Tensor, " n"]]:
        """Columns `pass@4/REWARD` for each k, and `majority/REWARD` for rewards that find
        answers."""
        columns: dict[str, Tensor] = {}
        prompts = rows_by_prompt(samples.group)
        for i, name in enumerate(scores.names):
            scored = scores.scored[:, i].tolist()
            wins = (scores.values[:, i] >= self.success).tolist()
            scored_rows = [[row for row in rows if scored[row]] for rows in prompts]
            good = [[wins[row] for row in rows] for rows in scored_rows]
            for k in self.pass_at:
                values = [pass_at_k(len(successes), sum(successes), k) for successes in good]
                columns[f"pass@{k}/{name}"] = spread_out(prompts, values)
            reward = rewards[name]
            if self.majority and isinstance(reward, FindsAnswers) and samples.kind == "text":
                answers = reward.answers(samples)
                voted = [
                    majority_success([answers[row] for row in rows], successes)
                    if rows
                    else math.nan
                    for rows, successes in zip(scored_rows, good, strict=True)
                ]
                columns[f"majority/{name}"] = spread_out(prompts, voted)
        return columns


def rows_by_prompt(group: Int[Tensor, " n"]) -> list[list[int]]:
    """Rows of each prompt, in the order of their first row."""
    places: dict[int, list[int]] = {}
    for row, key in enumerate(group.tolist()):
        places.setdefault(key, []).append(row)
    return list(places.values())


def spread_out(prompts: Sequence[Sequence[int]], values: Sequence[float]) -> Float[Tensor, " n"]:
    """Each prompt's value repeated for all of its rows, as float64."""
    column = torch.empty(sum(map(len, prompts)), dtype=torch.float64)
    for rows, value in zip(prompts, values, strict=True):
        column[list(rows)] = value
    return column
