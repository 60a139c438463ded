"""The stage `sample`: encode prompts, roll the plans out, decode.

A unit of draws is sampled by a `UnitSampler`; the stage makes one unit of this process's share.
Features change how a unit is sampled (in several units, on workers, with a reward that steers).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.records import Drawn, Sampled
from flowrl.iteration.units import SamplingUnit, UnitSamples, UnitScores
from flowrl.models.call_sizes import bounded_call
from flowrl.models.diffusers.call.results.decoder import Decoded
from flowrl.models.policy import Batch, RolloutLike
from flowrl.prompts import PromptSet
from flowrl.session.finite import check_samples
from flowrl.session.learner import Learner
from flowrl.session.session import Session
from flowrl.session.smaller_calls import with_smaller_calls
from rewards import Samples
from samplers import Sampling
from samplers.host import on_host


class SampledUnit(NamedTuple):
    """A unit's samples, with the encoded prompts that they are of."""

    batch: Batch
    unit: UnitSamples


@runtime_checkable
class SamplesUnit(Protocol):
    """Samples a unit of draws. Its indices count from its first draw."""

    def __call__(self, unit: SamplingUnit) -> SampledUnit: ...


@runtime_checkable
class ScoresUnit(Protocol):
    """Scores a unit's samples."""

    def __call__(self, unit: SamplingUnit, sampled: SampledUnit) -> UnitScores: ...


class UnitStages(NamedTuple):
    """The sampling and scoring of a unit of draws, here or on a worker."""

    sample: SamplesUnit
    score: ScoresUnit

    def run(self, unit: SamplingUnit) -> tuple[SampledUnit, UnitScores]:
        """Sample a unit, and score its samples."""
        sampled = self.sample(unit)
        return sampled, self.score(unit, sampled)


@dataclass(frozen=True)
class OpenedUnit:
    """A unit whose prompts are encoded."""

    unit: SamplingUnit
    batch: Batch
    decode: Callable[[RolloutLike], Samples]


class Rolled(NamedTuple):
    """Rollouts of a unit, one per plan, and the number of predicted samples that were scored while
    they were rolled."""

    rollouts: Sequence[RolloutLike]
    scored: int = 0


@runtime_checkable
class Roll(Protocol):
    def __call__(self, opened: OpenedUnit, sampling: Sampling) -> Rolled:
        """Roll the plans of a unit out with the weights that sample."""
        ...


@runtime_checkable
class EncodeUnit(Protocol):
    def __call__(self, unit: SamplingUnit) -> Batch:
        """Encode a unit's prompts, once for all plans."""
        ...


@dataclass(frozen=True)
class PlainEncode:
    session: Session
    clock: PhaseClock

    def __call__(self, unit: SamplingUnit) -> Batch:
        session = self.session
        with self.clock("encode"), bounded_call("sampling"):
            prompts, meta = session.prompts.take(unit.rows)
            return session.learner.policy.open(prompts, meta, session.algorithm.steps)


@dataclass(frozen=True)
class PlainRoll:
    """`aside` is entered around evaluations whose density is not stored."""

    session: Session
    clock: PhaseClock

    def __call__(self, opened: OpenedUnit, sampling: Sampling) -> Rolled:
        session, unit = self.session, opened.unit
        algorithm, merging = session.algorithm, session.learner.merging
        merges = merging.when in ("untrained", "sampling")
        behaving = session.learner.policies.using(unit.by)
        with (
            behaving,
            merging.sampling() if merges else nullcontext() as aside,
            self.clock("sample"),
            bounded_call("sampling"),
        ):
            rollouts = opened.batch.rollouts(
                algorithm.planned,
                unit.ids,
                seed=session.run.train.seed,
                iteration=unit.iteration,
                sampling=replace(sampling, aside=aside),
            )
        return Rolled(rollouts)


@dataclass(frozen=True)
class UnitSampler:
    """Encodes, rolls out and decodes a unit in calls of its own."""

    session: Session
    clock: PhaseClock
    encode: EncodeUnit
    roll: Roll

    @classmethod
    def plain(cls, session: Session, clock: PhaseClock) -> "UnitSampler":
        return cls(session, clock, PlainEncode(session, clock), PlainRoll(session, clock))

    def __call__(self, unit: SamplingUnit) -> SampledUnit:
        opened = self.open(unit)
        rolled = self.roll(opened, self.sampling)
        with self.clock("decode"):
            decoded = [opened.decode(rollout) for rollout in rolled.rollouts]
        return made_unit(opened, rolled, decoded)

    def open(self, unit: SamplingUnit) -> OpenedUnit:
        batch = self.encode(unit)
        return OpenedUnit(unit, batch, unit_decoder(self.session, batch, unit))

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.session.algorithm.likelihood.keep_mean)


def made_unit(opened: OpenedUnit, rolled: Rolled, decoded: Sequence[Samples]) -> SampledUnit:
    """The record of a unit that is sampled and decoded."""
    rollouts, meter = tuple(rolled.rollouts), opened.batch.meter
    statistics = opened.batch.statistics(rollouts[0], decoded[0].media)
    evaluations = meter.graded + meter.frozen
    unit_samples = UnitSamples(rollouts, tuple(decoded), statistics, evaluations, rolled.scored)
    return SampledUnit(opened.batch, unit_samples)


@dataclass(frozen=True)
class SampleStage:
    """Samples this process's draws as one unit. After an out-of-memory error all processes repeat
    it with smaller calls."""

    session: Session
    sample_unit: SamplesUnit

    def __call__(self, drawn: Drawn) -> Sampled:
        session = self.session

        def sampled() -> SampledUnit:
            with sampling_together(session, drawn.by):
                return self.sample_unit(drawn.unit)

        batch, samples = with_smaller_calls(session.learner, session.terminal, sampled)
        return Sampled(drawn, batch, samples)


@contextmanager
def sampling_together(session: Session, by: str) -> Iterator[None]:
    """All processes sample, or score with the model, and raise each other's errors."""
    gathered_weights = whole_weights(session, by) if session.parallel.blocks else nullcontext()
    with session.parallel.together(), gathered_weights:
        session.writer.check()
        yield


@contextmanager
def whole_weights(session: Session, by: str) -> Iterator[None]:
    """Gather sharded weights once if they generate texts, token by token, or are sent whole to a
    server that does."""
    server, learner = session.run.server, session.learner
    served = server is not None and server.sync != "weights"
    if not session.algorithm.text or served:
        yield
        return
    with learner.policies.using(sampling_weights(learner, by)), session.parallel.whole():
        yield


def sampling_weights(learner: Learner, by: str) -> str:
    """The name of the weights that sample as the policy `by`: those at sampling, if they are
    older."""
    return learner.sampler if by == learner.algorithm.behaviour else by


def unit_decoder(
    session: Session, batch: Batch, unit: SamplingUnit
) -> Callable[[RolloutLike], Samples]:
    """Decodes rollouts of a unit into the samples that rewards see."""
    place = f"iteration {unit.iteration + 1}"

    def decode(rollout: RolloutLike) -> Samples:
        return decode_samples_of(batch, rollout, session.prompts, unit.rows, place)

    return decode


def decode_samples_of(
    batch: Batch, rollout: RolloutLike, prompts: PromptSet, rows: Sequence[int], place: str
) -> Samples:
    """Decode a rollout into the samples that rewards see; `rows` are the draws' rows in the prompt
    file.

    NotFiniteError names `place` if latents or media have NaN or infinity, since an error in the
    reward would otherwise be blamed on the reward.
    """
    with bounded_call("decoding"):
        decoded = batch.media(rollout)
    media, audio = decoded if isinstance(decoded, Decoded) else (decoded, None)
    check_samples(rollout, media if audio is None else [media, audio.waveform], place)
    group = on_host(rollout.prompt)
    texts, meta = prompts.take([rows[i] for i in group.tolist()])
    return Samples(media, texts, group, meta, audio)
