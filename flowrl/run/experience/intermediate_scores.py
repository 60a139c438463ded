"""Score the predicted clean samples of intermediate states."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flowrl.models.policy import RolloutLike
from flowrl.run.state.session import Session, score_once
from rewards import Samples, Scores
from rewards.types import IntermediateScores
from samplers import Rollout


def looks_of(rollout: RolloutLike) -> int:
    """Number of a rollout's predicted clean samples to score."""
    return sum(len(seen.x0) for seen in rollout.seen) if isinstance(rollout, Rollout) else 0


@dataclass(frozen=True)
class IntermediateScorer:
    """Adds the scores of a rollout's intermediate samples to its scores."""

    session: Session
    iteration: int
    decode: Callable[[RolloutLike], Samples]

    def __call__(self, rollout: RolloutLike, scores: Scores) -> Scores:
        session = self.session
        own = (
            session.intermediate_weights(self.iteration)
            if session.run.intermediate_rewards
            else None
        )

        def score(samples: Samples) -> Scores:
            return score_once(session.parallel, session.intermediate_rewards, samples)

        way = intermediate_scores(rollout, lambda seen: score(self.decode(seen)))
        return replace(scores, intermediate=None if way is None else way._replace(weights=own))


def intermediate_scores(
    rollout: RolloutLike, score: Callable[[Rollout], Scores]
) -> IntermediateScores | None:
    """Score a rollout's predicted clean samples; None if its plan has none.

    Each distinct state is scored once. States of one step are scored together, so that groupwise
    rewards and judges compare states of one noise level, and one step after the other.
    """
    if not isinstance(rollout, Rollout) or not rollout.seen:
        return None
    each = [
        (seen, score(replace(rollout, x0=seen.x0, prompt=seen.prompt, seen=(), edges=())))
        for seen in rollout.seen
    ]
    n, steps, first = len(rollout.prompt), len(rollout.plan.steps), each[0][1]
    values = first.values.new_zeros(n, steps, len(first.names))
    known = torch.zeros(n, steps, len(first.names), dtype=torch.bool)
    for seen, own in each:
        leaves = n // len(seen.x0)
        values[:, seen.step] = own.values.repeat_interleave(leaves, 0)
        known[:, seen.step] = own.scored.repeat_interleave(leaves, 0)
    return IntermediateScores(values, known)


def intermediate_metrics(scores: IntermediateScores) -> dict[str, float]:
    """`unscored_way`: share of the leaves' intermediate states without a score."""
    looked = scores.scored.any(0).any(-1)  # steps: those without any score count as not asked
    known = scores.scored[:, looked].all(-1).double()
    return {"unscored_way": float(1 - known.mean()) if known.numel() else 1.0}
