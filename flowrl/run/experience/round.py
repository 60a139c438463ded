"""One round of an iteration: encode prompts, sample, decode and score. No credit yet."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from flowrl.budget.spending import RoundOutcome, RoundScores
from flowrl.models.evaluation_counter import Meter
from flowrl.models.policy import Batch, RolloutLike
from flowrl.prompts import Draws
from flowrl.run.experience.reference_kl import reference_log_ratios
from flowrl.run.experience.units import sample_units, timed, totals
from flowrl.run.state.session import Session
from flowrl.run.state.units import SamplingUnit, StoredSamples, UnitSamples
from rewards import Samples, Scores


@dataclass(frozen=True)
class PlanSamples:
    """Samples of one plan in a round."""

    rollout: RolloutLike  # this process's, as it is learned from
    samples: Samples | StoredSamples  # this process's, as sampled
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
    found: UnitSamples  # by this process
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


def sample_round(
    session: Session,
    iteration: int,
    draws: Draws,
    seconds: dict[str, float],
    by: str | None = None,
) -> Round:
    """Sample and score a round's draws. Adds the time of each phase to `seconds`. `by`: see
    `SamplingUnit`; such samples are scored but not trained on."""
    mine, counts = session.parallel.share(len(draws.ids))
    share = slice(mine.start, mine.stop)
    whole = whole_weights(session, by) if session.parallel.units else nullcontext()
    with session.parallel.together(), whole:
        session.writer.check()
        texts = draws.texts[share]
        unit = SamplingUnit(iteration, draws.ids[share], draws.rows[share], texts=texts, by=by)
        batch, found = sample_units(session, unit, seconds)
    each = zip(found.rollouts, found.samples, found.scores, strict=True)
    learned = by is None
    parts = tuple(_part(session, draws, *samples, learned) for samples in each)
    made = Round(draws, mine, counts, batch, parts, found)
    if learned and session.algorithm.reads_reference:
        return with_reference(session, made, seconds)
    return made


@contextmanager
def whole_weights(session: Session, by: str | None) -> Iterator[None]:
    """Gather sharded weights once if they generate texts, token by token, or are sent whole to a
    server that does."""
    server, learner = session.run.model.server, session.learner
    served = server is not None and server.sync != "weights"
    if not session.algorithm.text or served:
        yield
        return
    with learner.policies.using(by or learner.sampler), session.parallel.whole():
        yield


def with_reference(session: Session, made: Round, seconds: dict[str, float]) -> Round:
    """Add the log-ratios to the initial policy for samples that are trained on."""
    meter = Meter()
    policy = meter(made.batch.policy)
    with session.parallel.together(), timed(seconds, "ref"):
        parts = [
            replace(p, log_ratios=reference_log_ratios(session.learner, policy, p.rollout))
            for p in made.parts
        ]
    return replace(made, parts=tuple(parts), reference_evaluations=meter.frozen)


def _part(
    session: Session,
    draws: Draws,
    rollout: RolloutLike,
    samples: Samples | StoredSamples,
    scores: Scores,
    learned_from: bool = True,
) -> PlanSamples:
    gather = session.parallel.gatherer(len(draws.ids))
    everyone = scores.arranged(gather)
    iteration, weights = rollout.iteration, session.weights(rollout.iteration)
    weighted = totals(everyone, weights)
    if session.spending is None or not learned_from:
        return PlanSamples(rollout, samples, scores, everyone, everyone, weighted)
    share = session.parallel.share(len(draws.ids))
    outcome = RoundOutcome(draws, everyone, weighted, *share, iteration)
    kept, learned = session.spending.scored(rollout, outcome)
    return PlanSamples(kept, samples, scores, everyone, learned, totals(learned, weights))
