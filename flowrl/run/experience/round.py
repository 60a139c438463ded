"""One round of an iteration: encode prompts, sample, decode and score. No credit yet."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flowrl.budget.spending import RoundOutcome, RoundScores
from flowrl.media.statistics import Statistics
from flowrl.models.call_sizes import bounded_call
from flowrl.models.evaluation_counter import Meter
from flowrl.models.policy import Batch, RolloutLike
from flowrl.prompts import Draws, PromptSet
from flowrl.run.experience.intermediate_scores import IntermediateScorer, looks_of
from flowrl.run.experience.reference_kl import reference_log_ratios
from flowrl.run.experience.reward_gradient import RewardPath
from flowrl.run.experience.score_ahead import ScoreParts
from flowrl.run.state.finite import check_samples
from flowrl.run.state.session import Session, score_once
from rewards import Samples, Scores, score_all
from samplers import Rollout, Sampling
from samplers.host import on_host


@dataclass(frozen=True)
class PlanSamples:
    """Samples of one plan in a round."""

    rollout: RolloutLike  # this process's, as it is learned from
    samples: Samples  # this process's, as sampled
    scores: Scores  # of those
    everyone: Scores  # of all processes' samples, in the order of the draws
    learned: Scores  # the same, as they are learned from: a replay may replace some
    totals: Tensor  # weighted sums of those, NaN where unscored
    log_ratios: Tensor | None = None  # log old/ref of this process's tokens, where credit reads it


@dataclass(frozen=True)
class Round:
    draws: Draws  # of all processes
    mine: range  # this process's places in them
    counts: bool  # False if this process only pads the collective calls
    batch: Batch
    parts: tuple[PlanSamples, ...]  # one for each plan
    looked: int  # intermediate samples that were scored: to steer, to guide, or for credit
    statistics: Statistics  # of the first plan's samples
    reference_evaluations: int = 0  # evaluations without gradients for the KL in the reward

    @property
    def ids(self) -> tuple[int, ...]:
        return self.draws.ids[self.mine.start : self.mine.stop]

    @property
    def prompts(self) -> tuple[int, ...]:
        return self.draws.rows[self.mine.start : self.mine.stop]

    @property
    def outcome(self) -> RoundScores:
        return RoundScores(self.draws, tuple(part.totals for part in self.parts))


@dataclass
class Lookahead:
    """Scores of predicted samples, which steered plans ask for on the way."""

    session: Session
    iteration: int
    decode: Callable[[RolloutLike], Samples]
    count: int = 0

    def __call__(self, rollout: RolloutLike) -> Tensor:
        """Return the weighted rewards [n]. One process scores for all that share its calls."""
        self.count += len(rollout.prompt)
        samples = self.decode(rollout)
        scores = self.session.parallel.once(
            lambda: score_all(self.session.intermediate_rewards, samples)
        )
        return totals(scores, self.session.intermediate_weights(self.iteration))


def sample_round(
    session: Session, iteration: int, draws: Draws, seconds: dict[str, float]
) -> Round:
    """Sample and score a round's draws. Adds the time of each phase to `seconds`."""
    algorithm = session.algorithm
    mine, counts = session.parallel.share(len(draws.ids))
    ids, rows = (part[mine.start : mine.stop] for part in (draws.ids, draws.rows))

    def decode(rollout: RolloutLike) -> Samples:
        place = f"iteration {iteration + 1}"
        return decode_samples_of(batch, rollout, session.prompts, rows, place)

    lookahead = Lookahead(session, iteration, decode)
    ahead = ScoreParts(decode, session.rewards, partial(score_once, session.parallel))
    with session.parallel.together(), closing(ahead):
        session.writer.check()
        with timed(seconds, "encode"), bounded_call("sampling"):
            batch = session.learner.policy.open(*session.prompts.take(rows), algorithm.steps)
        parts = ahead.on_part if session.parallel.members == 1 else None
        keep = algorithm.likelihood.keep_mean
        guiding = slope = None
        if algorithm.guided:
            guiding = RewardPath.guiding(session, batch, rows, iteration)
            slope = guiding.on_the_way
        sampling = Sampling(keep, lookahead, slope, ahead.whole.on_rollout, parts)
        seed = session.run.train.seed
        behaving = session.learner.policies.using(algorithm.behaviour)
        with behaving, timed(seconds, "sample"), bounded_call("sampling"):
            rollouts = batch.rollouts(
                algorithm.plan, ids, seed=seed, iteration=iteration, sampling=sampling
            )
        with timed(seconds, "decode"):
            decoded = ahead.media(rollouts)
        with timed(seconds, "score"):
            scores = ahead.scores(decoded)
        looked = lookahead.count + (0 if guiding is None else guiding.decoded[0])
        if any(isinstance(rollout, Rollout) and rollout.seen for rollout in rollouts):
            looked += sum(map(looks_of, rollouts))
            with timed(seconds, "way"):
                asked = IntermediateScorer(session, iteration, decode)
                scores = [asked(*pair) for pair in zip(rollouts, scores, strict=True)]
    statistics = batch.statistics(rollouts[0], decoded[0].media)
    decoded = [samples.on_cpu() for samples in decoded]  # the update needs a GPU's memory
    each = zip(rollouts, decoded, scores, strict=True)
    parts = tuple(_part(session, draws, *samples) for samples in each)
    made = Round(draws, mine, counts, batch, parts, looked, statistics)
    return _with_reference(session, made, seconds) if algorithm.reads_reference else made


def decode_samples_of(
    batch: Batch, rollout: RolloutLike, prompts: PromptSet, rows: Sequence[int], place: str
) -> Samples:
    """Decode a rollout into what rewards see; `rows` are those of the draws in the prompt file.

    NotFiniteError names `place` where latents or media hold NaN or infinity: a reward would answer
    with an error or a score of its own, and be blamed.
    """
    with bounded_call("decoding"):
        media = batch.media(rollout)
    check_samples(rollout, media, place)
    group = on_host(rollout.prompt)
    texts, meta = prompts.take([rows[i] for i in group.tolist()])
    return Samples(media, texts, group, meta)


def _with_reference(session: Session, made: Round, seconds: dict[str, float]) -> Round:
    """Add the log-ratios to the start of the samples that are learned from."""
    meter = Meter()
    policy = meter(made.batch.policy)
    with session.parallel.together(), timed(seconds, "ref"):
        parts = [
            replace(p, log_ratios=reference_log_ratios(session.learner, policy, p.rollout))
            for p in made.parts
        ]
    return replace(made, parts=tuple(parts), reference_evaluations=meter.frozen)


def _part(
    session: Session, draws: Draws, rollout: RolloutLike, samples: Samples, scores: Scores
) -> PlanSamples:
    gather = session.parallel.gatherer(len(draws.ids))
    everyone = scores.arranged(gather)
    iteration, weights = rollout.iteration, session.weights(rollout.iteration)
    weighted = totals(everyone, weights)
    if session.spending is None:
        return PlanSamples(rollout, samples, scores, everyone, everyone, weighted)
    share = session.parallel.share(len(draws.ids))
    outcome = RoundOutcome(draws, everyone, weighted, *share, iteration)
    kept, learned = session.spending.scored(rollout, outcome)
    return PlanSamples(kept, samples, scores, everyone, learned, totals(learned, weights))


def totals(scores: Scores, weights: Tensor) -> Tensor:
    """Return the weighted sum of the rewards [n], NaN where one of them has no score."""
    weighted = scores.values @ weights.to(scores.values.dtype)
    return torch.where(scores.scored.all(1), weighted, torch.nan)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add up the wall seconds of a phase."""
    began = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began
