"""Rewards of single turns or steps of texts, as scores of decision points: one column in all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.credit.process import Information
from flowrl.errors import UserError
from flowrl.models.policy import Batch, RolloutLike
from flowrl.run.state.session import Session, score_once
from flowrl.settings.model.environment import ONE_CREDIT
from rewards import Samples, Scores
from rewards.types import IntermediateScores
from samplers.completions import TextRollout


@runtime_checkable
class TurnBatch(Protocol):
    """A batch whose completions have turns or steps."""

    def beginnings(self, rollout: TextRollout, media: Sequence[str]) -> list[list[str]]: ...

    def information(
        self, rollout: TextRollout, asked: Information, meta: Sequence[Mapping[str, Any]], rows: int
    ) -> Float[Tensor, "n k"]: ...


@dataclass
class TurnScorer:
    """Adds rewards of turns or steps to scores: the sum of the environment's own, of
    `intermediate_rewards` of the text so far, and of IGPO's gains. A turn has a reward where one
    of them has."""

    session: Session
    iteration: int
    batch: Batch
    by: str  # the policy that sampled
    looked: int = field(default=0, init=False)  # texts that were scored

    @staticmethod
    def scores(rollouts: Sequence[RolloutLike]) -> bool:
        """Whether any samples have turns or steps."""
        return any(isinstance(each, TextRollout) and each.divided for each in rollouts)

    def __call__(self, rollout: RolloutLike, samples: Samples, scores: Scores) -> Scores:
        if not isinstance(rollout, TextRollout) or not rollout.divided:
            return scores
        shape = len(rollout.ids), rollout.plan.turns
        found = torch.zeros(shape, dtype=torch.float64)
        known = torch.zeros(shape, dtype=torch.bool)
        for each in (rollout.rewards, self._named(rollout, samples), self._gains(rollout, samples)):
            if each is not None:
                found, known = found + each.nan_to_num(0.0), known | ~each.isnan()
        turns = IntermediateScores(found[..., None], known[..., None], torch.ones(1))
        return replace(scores, intermediate=turns)

    def _named(self, rollout: TextRollout, samples: Samples) -> Float[Tensor, "n k"] | None:
        """The weighted sum of `intermediate_rewards`, NaN where one has no score."""
        session = self.session
        if not session.run.intermediate_rewards:
            return None
        assert isinstance(self.batch, TurnBatch)
        texts = self.batch.beginnings(rollout, samples.media)
        rows = [(k, i) for k in range(rollout.plan.turns) for i in range(len(texts))]
        rows = [(k, i) for k, i in rows if k < len(texts[i])]
        step, sample = (torch.tensor(each) for each in zip(*rows, strict=True))
        some = samples.take(sample)  # a turn's texts are a group of their own
        groups = int(some.group.max()) + 1
        some = replace(some, media=[texts[i][k] for k, i in rows], group=some.group + step * groups)
        scores = score_once(session.parallel, session.intermediate_rewards, some)
        self.looked += len(rows)
        if not scores.scored.all(1).any():
            raise UserError(
                f"intermediate_rewards: {', '.join(scores.names)} scored none of {len(rows)} turns "
                "or steps: fix the reward"
            )
        weights = session.intermediate_weights(self.iteration).to(scores.values.dtype)
        total = torch.where(scores.scored.all(1), scores.values @ weights, torch.nan).double()
        found = torch.full((len(texts), rollout.plan.turns), torch.nan, dtype=torch.float64)
        return found.index_put((sample, step), total.cpu())

    def _gains(self, rollout: TextRollout, samples: Samples) -> Float[Tensor, "n k"] | None:
        asked, learner = self.session.algorithm.information, self.session.learner
        if asked is None:
            return None
        assert isinstance(self.batch, TurnBatch)
        most = learner.policy.sizes.training
        assert most is not None  # `load_policy` chose it
        with learner.policies.using(self.by):
            meta = samples.meta or [{} for _ in samples.prompts]
            return self.batch.information(rollout, asked, meta, most)


def refuse_turn_rewards(rollout: RolloutLike, by_turn: bool) -> None:
    """UserError for an environment's rewards of single turns if all turns share one credit."""
    turns = rollout.rewards if isinstance(rollout, TextRollout) else None
    if turns is not None and not by_turn and not turns.isnan().all():
        raise UserError(ONE_CREDIT)


def turn_metrics(scores: Scores, by_turn: bool) -> dict[str, float]:
    """`reward_turns`: mean over samples of the sum of their turns' own rewards. UserError for such
    rewards if all turns share one credit (`by_turn` is False)."""
    assert scores.intermediate is not None
    if not scores.intermediate.scored.any():
        return {}
    if not by_turn:
        raise UserError(ONE_CREDIT)
    return {"reward_turns": float(scores.intermediate.values.double().sum((1, 2)).mean())}
