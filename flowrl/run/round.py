"""One round of an iteration: prompts are opened, sampled, decoded and scored. No credit yet."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.budget.spending import RoundOutcome, RoundScores
from flowrl.models.evaluation_counter import Meter
from flowrl.models.policy import Batch, RolloutLike
from flowrl.prompts import Draws
from flowrl.run.reference_kl import reference_log_ratios
from flowrl.run.samples import decode_samples_of
from flowrl.run.score_ahead import ScoreAhead
from flowrl.run.session import Session
from rewards import Samples, Scores, score_all


@dataclass(frozen=True)
class PlanSamples:
    """One plan's samples."""

    rollout: Any  # this process's, as it is learned from
    samples: Samples  # this process's, as drawn
    scores: Scores  # of those
    everyone: Scores  # of all processes' samples, in the order of the draws
    taught: Scores  # the same, as they are learned from
    totals: Tensor  # weighted sums of those, NaN where unscored
    log_ratios: Tensor | None = None  # log old/ref of this process's tokens, where credit reads it


@dataclass(frozen=True)
class Round:
    draws: Draws  # of all processes
    mine: range  # this process's places in them
    counts: bool  # or does it only keep the others company?
    batch: Batch
    parts: tuple[PlanSamples, ...]
    looked: int  # samples that were scored on the way
    said: dict[str, float]  # what the first plan's samples look like, as drawn; nothing of company
    asked: int = 0  # evaluations that credit asked this process for

    @property
    def ids(self) -> tuple[int, ...]:
        return self.draws.ids[self.mine.start : self.mine.stop]

    @property
    def prompts(self) -> tuple[int, ...]:
        return self.draws.rows[self.mine.start : self.mine.stop]

    @property
    def found(self) -> RoundScores:
        return RoundScores(self.draws, tuple(part.totals for part in self.parts))


def sample_round(
    session: Session, iteration: int, draws: Draws, seconds: dict[str, float]
) -> Round:
    algorithm, looked = session.algorithm, 0
    mine, counts = session.parallel.share(len(draws.ids))
    ids, rows = (part[mine.start : mine.stop] for part in (draws.ids, draws.rows))

    def lookahead(rollout: RolloutLike) -> Tensor:
        nonlocal looked
        looked += len(rollout.prompt)
        seen = show(rollout)
        found = session.parallel.once(lambda: score_all(session.rewards, seen))
        return totals(session, found, iteration)

    def show(rollout: RolloutLike) -> Samples:
        return decode_samples_of(batch, rollout, session.prompts, rows)

    score = partial(session.score, session.rewards)
    with session.parallel.together(), ScoreAhead(show, score) as ahead:
        with timed(seconds, "encode"):
            batch = session.policy.open(*session.prompts.take(rows), algorithm.steps)
        with session.policies.using(algorithm.behaviour), timed(seconds, "sample"):
            rollouts = batch.rollouts(
                algorithm.plan,
                ids,
                seed=session.run.train.seed,
                iteration=iteration,
                keep_mean=algorithm.likelihood.keep_mean,
                score=lookahead,
                on_rollout=ahead.on_rollout,
            )
        with timed(seconds, "decode"):
            shown = ahead.media(rollouts)
        with timed(seconds, "score"):
            scored = ahead.scores()
    drawn = zip(rollouts, shown, scored, strict=True)
    parts = tuple(_part(session, draws, *each) for each in drawn)
    said = batch.statistics(rollouts[0], shown[0].media) if counts else {}
    made = Round(draws, mine, counts, batch, parts, looked, said)
    return _measured(session, made, seconds) if algorithm.reads_reference else made


def _measured(session: Session, made: Round, seconds: dict[str, float]) -> Round:
    """With how far samples are from the start: those that are learned from."""
    meter = Meter()
    policy = meter(made.batch.policy)
    with session.parallel.together(), timed(seconds, "ref"):
        parts = [
            replace(p, log_ratios=reference_log_ratios(session, policy, p.rollout))
            for p in made.parts
        ]
    return replace(made, parts=tuple(parts), asked=meter.frozen)


def _part(
    session: Session, draws: Draws, rollout: RolloutLike, samples: Samples, scores: Scores
) -> PlanSamples:
    gather = session.parallel.gatherer(len(draws.ids))
    everyone = Scores(gather(scores.values), gather(scores.scored), scores.names)
    iteration, share = rollout.iteration, session.parallel.share(len(draws.ids))
    outcome = RoundOutcome(draws, everyone, totals(session, everyone, iteration), *share, iteration)
    kept, taught = session.spending.scored(rollout, outcome)
    return PlanSamples(kept, samples, scores, everyone, taught, totals(session, taught, iteration))


def totals(session: Session, scores: Scores, iteration: int) -> Tensor:
    """The weighted sum of the rewards [n], NaN where one of them has no score."""
    weighted = scores.values @ session.weights(iteration).to(scores.values.dtype)
    return torch.where(scores.scored.all(1), weighted, torch.nan)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add up the wall seconds of a phase."""
    began = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began
