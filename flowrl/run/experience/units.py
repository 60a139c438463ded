"""Sample a process's draws, in units or all together: encode prompts, sample, decode and score."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flowrl.media.statistics import Statistics, merged_means
from flowrl.models.call_sizes import bounded_call
from flowrl.models.diffusers.call.results.decoder import Decoded
from flowrl.models.policy import Batch, RolloutLike
from flowrl.models.rewritten import open_texts
from flowrl.prompts import PromptSet
from flowrl.run.experience.intermediate_scores import IntermediateScorer, looks_of
from flowrl.run.experience.reward_gradient import RewardPath
from flowrl.run.experience.score_ahead import ScoreParts, joined_samples
from flowrl.run.experience.turn_scores import TurnScorer
from flowrl.run.state.finite import check_samples
from flowrl.run.state.session import Session, score_once
from flowrl.run.state.units import SamplingUnit, StoredSamples, UnitSamples
from rewards import Samples, Scores, score_all
from samplers import Rollout, Sampling
from samplers.completions import TextRollout
from samplers.host import on_host
from samplers.mixed import joined_mixed
from samplers.parts import DrawsPart, draws_per_part, joined_rollout, joined_texts, placed_rollout


@dataclass
class Lookahead:
    """Scores of predicted samples, which steered plans request during sampling."""

    session: Session
    iteration: int
    decode: Callable[[RolloutLike], Samples]
    count: int = 0

    def __call__(self, rollout: RolloutLike) -> Tensor:
        """Return the weighted rewards [n]. One process scores for all processes that share its
        calls."""
        self.count += len(rollout.prompt)
        samples = self.decode(rollout)
        scores = self.session.parallel.once(
            lambda: score_all(self.session.intermediate_rewards, samples)
        )
        return totals(scores, self.session.intermediate_weights(self.iteration))


def sample_units(
    session: Session, whole: SamplingUnit, seconds: dict[str, float]
) -> tuple[Batch, UnitSamples]:
    """Sample this process's draws: in units if the run asks for them, otherwise in calls that all
    draws share. Adds the time of each phase to `seconds`. The batch holds all prompts."""
    if session.source is None and session.run.workers.unit is None:
        return sample_unit(session, whole, seconds)
    units = units_of(session, whole)
    if session.source is not None:
        made = session.source.samples(units, seconds)
    elif len(units) == 1:
        return sample_unit(session, whole, seconds)
    else:
        made = [sample_unit(session, unit, seconds)[1] for unit in units]
    joined = joined_units(units, made, session.several_sizes)
    return encoded_prompts(session, whole, seconds), joined


def units_of(session: Session, whole: SamplingUnit) -> list[SamplingUnit]:
    """Cut a share of draws into units of `workers.unit`."""
    size = session.run.workers.unit
    if size is None or size >= len(whole.ids) or not cuttable(session, whole.iteration):
        return [whole]
    return whole.cut(size)


def encoded_prompts(session: Session, unit: SamplingUnit, seconds: dict[str, float]) -> Batch:
    policy, steps = session.learner.policy, session.algorithm.steps
    with timed(seconds, "encode"), bounded_call("sampling"):
        prompts, meta = session.prompts.take(unit.rows)
        if unit.texts:
            return open_texts(policy, unit.texts, meta, steps)
        return policy.open(prompts, meta, steps)


def cuttable(session: Session, iteration: int) -> bool:
    """Whether an iteration's draws can be split into units. Draws of a plan that steers, is guided,
    scores intermediate samples, or has trees of texts or turns form a single unit."""
    run, algorithm = session.run, session.algorithm
    plans = algorithm.plan(run.levels(algorithm.steps), iteration, run.train.seed)
    return all(draws_per_part(plan, 1) is not None for plan in plans)


def sample_unit(
    session: Session, unit: SamplingUnit, seconds: dict[str, float]
) -> tuple[Batch, UnitSamples]:
    """Encode, sample, decode and score a unit's draws. Its indices count from its first draw."""
    algorithm, iteration, rows = session.algorithm, unit.iteration, unit.rows

    def decode(rollout: RolloutLike) -> Samples:
        place = f"iteration {iteration + 1}"
        return decode_samples_of(batch, rollout, session.prompts, rows, place)

    lookahead = Lookahead(session, iteration, decode)
    score, ahead = partial(score_once, session.parallel), None
    if session.rewards and not session.scores_in_turn:  # without rewards replicas score, later
        ahead = ScoreParts(decode, session.rewards, score, session.parallel.device)
    with nullcontext() if ahead is None else closing(ahead):
        batch = encoded_prompts(session, unit, seconds)
        hooks = (None, None) if ahead is None else ahead.hooks(session.parallel.members == 1)
        guiding = slope = None
        if algorithm.guided:
            guiding = RewardPath.guiding(session, batch, rows, iteration)
            slope = guiding.intermediate_slope
        learner, seed = session.learner, session.run.train.seed
        merges = learner.merging.when in ("untrained", "sampling")
        merging = learner.merging.sampling() if merges else nullcontext()
        behaving = learner.policies.using(unit.by or algorithm.behaviour)
        with behaving, merging as aside, timed(seconds, "sample"), bounded_call("sampling"):
            sampling = Sampling(algorithm.likelihood.keep_mean, lookahead, slope, *hooks, aside)
            rollouts = batch.rollouts(
                algorithm.plan, unit.ids, seed=seed, iteration=iteration, sampling=sampling
            )
        with timed(seconds, "decode"):
            decoded = [*map(decode, rollouts)] if ahead is None else ahead.media(rollouts)
        with timed(seconds, "score"):
            if ahead is None:
                scores = [score(session.rewards, samples) for samples in decoded]
                decoded = [samples.on_cpu() for samples in decoded]
            else:
                scores, decoded = ahead.scores(decoded), ahead.on_cpu(decoded)
        looked = lookahead.count + (0 if guiding is None else guiding.decoded[0])
        if any(isinstance(rollout, Rollout) and rollout.seen for rollout in rollouts):
            looked += sum(map(looks_of, rollouts))
            with timed(seconds, "way"):
                asked = IntermediateScorer(session, iteration, decode)
                scores = [asked(*pair) for pair in zip(rollouts, scores, strict=True)]
    if isinstance(rollouts[0], TextRollout):
        scores, looked = _with_turns(
            TurnScorer(session, iteration, batch, unit.by or algorithm.behaviour),
            (rollouts, decoded, scores), looked, seconds,
        )  # fmt: skip
    statistics, meter = batch.statistics(rollouts[0], decoded[0].media), batch.meter
    made = tuple(rollouts), tuple(decoded), tuple(scores), statistics, looked
    return batch, UnitSamples(*made, meter.graded + meter.frozen)


def _with_turns(
    turned: TurnScorer,
    made: tuple[Sequence[RolloutLike], Sequence[Samples], Sequence[Scores]],
    looked: int,
    seconds: dict[str, float],
) -> tuple[Sequence[Scores], int]:
    """Scores with rewards of turns or steps, and the number of scored samples with theirs."""
    rollouts, decoded, scores = made
    if not turned.scores(rollouts):
        return scores, looked
    with timed(seconds, "way"):
        scores = [*map(turned, rollouts, decoded, scores)]
    return scores, looked + turned.looked


def joined_units(
    units: Sequence[SamplingUnit], made: Sequence[UnitSamples], mixed: bool = False
) -> UnitSamples:
    """Join the samples of all units of a share, by plan. `mixed`: they may have several sizes."""
    if len(made) == 1:
        return made[0]
    pairs = list(zip(units, made, strict=True))
    draws = tuple(draw for unit in units for draw in unit.ids)
    join: Callable[..., RolloutLike] = partial(_joined_rollout, draws=draws)
    if mixed:
        join = partial(joined_mixed, firsts=[unit.first for unit in units], draws=draws)
    placed = [_placed(samples, unit.first, mixed) for unit, samples in pairs]
    rollouts = zip(*(each.rollouts for each in placed), strict=True)
    samples = zip(*(each.samples for each in placed), strict=True)
    scores = zip(*(each.scores for each in placed), strict=True)
    return UnitSamples(
        tuple(map(join, rollouts)),
        tuple(map(all_samples, samples)),
        tuple(map(Scores.joined, scores)),
        all_statistics([each.statistics for each in placed]),
        sum(each.looked for each in placed),
        sum(each.evaluations for each in placed),
        merged_reports([each.reports for each in placed]),
    )


def all_samples(parts: Sequence[Samples | StoredSamples]) -> Samples | StoredSamples:
    """Join the samples of all units."""
    stored = [each for each in parts if isinstance(each, StoredSamples)]
    if stored:
        return StoredSamples.joined(stored)
    return joined_samples([each for each in parts if isinstance(each, Samples)])


def all_statistics(parts: Sequence[Statistics]) -> Statistics:
    """Join the statistics of all units' media."""
    columns = {name: torch.cat([each.columns[name] for each in parts]) for name in parts[0].columns}
    return Statistics(merged_means([(each.means, each.size) for each in parts]), columns)


def merged_reports(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up the reports of rewards over several units."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def _placed(made: UnitSamples, first: int, mixed: bool) -> UnitSamples:
    """A unit's samples, with indices counted from the first draw of the share. `mixed`: indices of
    rollouts stay, as `joined_mixed` takes them."""
    samples = tuple(replace(each, group=each.group + first) for each in made.samples)
    if mixed:
        return replace(made, samples=samples)
    rollouts = tuple(
        placed_rollout(each, DrawsPart(first, each.draws))
        if isinstance(each, Rollout)
        else replace(each, prompt=each.prompt + first)  # type: ignore[type-var]
        for each in made.rollouts
    )
    return replace(made, rollouts=rollouts, samples=samples)


def _joined_rollout(parts: Sequence[RolloutLike], draws: tuple[int, ...]) -> RolloutLike:
    media = [part for part in parts if isinstance(part, Rollout)]
    if media:
        return joined_rollout(media, draws)
    return joined_texts([part for part in parts if isinstance(part, TextRollout)], draws)


def decode_samples_of(
    batch: Batch, rollout: RolloutLike, prompts: PromptSet, rows: Sequence[int], place: str
) -> Samples:
    """Decode a rollout into the samples that rewards see; `rows` are the draws' rows in the prompt
    file.

    NotFiniteError names `place` if latents or media have NaN or infinity, since an error in the
    reward would otherwise be blamed on the reward.
    """
    with bounded_call("decoding"):
        made = batch.media(rollout)
    media, audio = made if isinstance(made, Decoded) else (made, None)
    check_samples(rollout, media if audio is None else [media, audio.waveform], place)
    group = on_host(rollout.prompt)
    texts, meta = prompts.take([rows[i] for i in group.tolist()])
    return Samples(media, texts, group, meta, audio)


def totals(scores: Scores, weights: Tensor) -> Tensor:
    """Return the weighted sum of the rewards [n], NaN where a reward has no score."""
    weighted = scores.values @ weights.to(scores.values.dtype)
    return torch.where(scores.scored.all(1), weighted, torch.nan)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add up the wall-clock seconds of a phase."""
    began = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began
