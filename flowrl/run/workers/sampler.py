"""The process of a sampling worker: a session without an optimizer, which loads weights by
version."""

import platform
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import ray  # type: ignore[reportMissingImports]  # an extra
import torch
from accelerate import Accelerator
from torch import Tensor

from flowrl.blame import blamed_in_words
from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.features.units import cuttable
from flowrl.iteration.open import open_unit
from flowrl.iteration.units import SamplingUnit, UnitSamples, UnitScores
from flowrl.media.statistics import Statistics
from flowrl.models.policy import RolloutLike
from flowrl.run.evaluate.evaluate import scored_slice, trial_of
from flowrl.run.evaluate.start_checks import prove_pipeline
from flowrl.run.evaluate.trial import TrialSamples
from flowrl.run.model_proof import StartProof
from flowrl.run.workers.causes import sendable
from flowrl.run.workers.opening import Birth, birth
from flowrl.run.workers.scoring import ReplicatedReward, begin_worker
from flowrl.run.workers.transport import brought_to, bytes_of, distinct_states
from flowrl.session.learner import Learner, evaluated
from flowrl.session.record import Terminal
from flowrl.session.session import (
    Session,
    keep_freed_memory,
    load_rewards,
    measured_beside,
    on_cpu,
)
from flowrl.table import EMPTY
from rewards import Samples, Scores
from rewards.types import reports

COMPARED = ("flowrl", "torch", "diffusers", "transformers", "peft")


@dataclass(frozen=True)
class Asked:
    """A unit, and everything besides the settings that its samples depend on.

    version  of the weights: the iteration that started with them
    sizes    rows per call, as currently used by the training process
    later    rewards whose replicas score the samples once they are done
    """

    unit: SamplingUnit
    version: int
    sizes: Mapping[str, int | None]
    later: tuple[str, ...] = ()


@dataclass(frozen=True)
class AskedPrompts:
    """A slice of an evaluation: rows of the held-out prompts; `version` and `sizes` as in
    `Asked`."""

    rows: tuple[int, ...]
    version: int
    sizes: Mapping[str, int | None]


class MadePrompts(NamedTuple):
    """As `ScoredTrial`, without the samples."""

    statistics: Statistics
    scores: Scores
    more: Mapping[str, Tensor]


@dataclass(frozen=True)
class MadePiece:
    """A piece of work without its samples, which are a separate object.

    result   its rollouts, and its scores by rewards that the worker has called itself; of an
             evaluation its scores, statistics and further columns
    kind     of the samples
    seconds  by phase
    sizes    bytes of `result`, and of the samples
    """

    result: tuple[UnitSamples, UnitScores] | MadePrompts
    kind: str
    seconds: Mapping[str, float]
    sizes: tuple[int, int]


def facts() -> dict[str, str]:
    """Versions of packages on which samples depend."""
    return {"python": platform.python_version(), **{name: version(name) for name in COMPARED}}


class SamplingWorker:
    """Opens the model and the rewards of a run as the training process does."""

    def __init__(
        self, settings: Mapping[str, Any], threads: int, remote: Mapping[str, ReplicatedReward]
    ) -> None:
        self.settings, self.threads, self.remote = settings, threads, remote
        self.versions: dict[str, int] = {}  # of the weights that are loaded, by policy

    @cached_property
    def opened(self) -> tuple[Session, tuple[RolloutLike, ...]]:
        """The session, and the first draw, sampled before other weights are loaded. It is opened by
        the first task rather than by the constructor, whose errors Ray sends as text alone."""
        run = begin_worker(self.settings, self.threads)
        self.folder = tempfile.TemporaryDirectory(prefix="flowrl-worker-")  # goes with this process
        folder = Path(self.folder.name)
        if on_cpu(run):
            keep_freed_memory()
        accelerator = Accelerator(cpu=on_cpu(run))
        learner = Learner.open(run, folder, accelerator)
        rewards = load_rewards(run.rewards, elsewhere=self.remote)
        intermediate = load_rewards(run.intermediate_rewards, elsewhere=self.remote)
        judges = load_rewards(run.judges, elsewhere=self.remote) if run.workers.evaluate else {}
        session = Session(
            learner=learner,
            folder=folder,
            accelerator=accelerator,
            prompts=run.prompts.read("train"),
            held_out=run.prompts.read("held_out") if run.workers.evaluate else None,
            rewards=rewards,
            judges=judges,
            beside=measured_beside(run, rewards) if run.workers.evaluate else {},
            intermediate_rewards=intermediate or rewards,
            terminal=Terminal(False),
            start_record=None,
        )
        prove_pipeline(session, StartProof(session, True))
        return session, brought_to(trial(session), torch.device("cpu"))

    @property
    def session(self) -> Session:
        return self.opened[0]

    def birth(self) -> Birth:
        return birth()

    def place(self, policy: str, version: int, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of a version, unless they are already loaded."""
        if version != self.versions.get(policy):
            self.session.learner.policies.replace_weights(policy, weights)
            self.versions[policy] = version

    @sendable()
    def sample(
        self, request: Asked, weights: Mapping[str, Tensor]
    ) -> tuple[MadePiece, tuple[Samples, ...]]:
        """Sample a unit; everything is returned on the CPU."""
        self.place(self.session.algorithm.behaviour, request.version, weights)
        self.session.learner.policy.sizes.take(request.sizes)
        seconds: dict[str, float] = {}
        local_rewards = {
            n: reward for n, reward in self.session.rewards.items() if n not in request.later
        }
        with blamed_in_words():
            local_session = replace(self.session, rewards=local_rewards)
            (_, unit), scores = open_unit(local_session, PhaseClock(seconds)).run(request.unit)
        unit_scores = brought_to(scores, torch.device("cpu"))
        samples = tuple(part for part in unit_scores.samples if isinstance(part, Samples))
        reported = replace(unit_scores, samples=(), reports=reports(self.session.rewards))
        rollouts = tuple(distinct_states(rollout) for rollout in unit.rollouts)
        bare = replace(unit, samples=(), rollouts=rollouts, table=EMPTY)
        result = brought_to(bare, torch.device("cpu")), reported
        sizes = bytes_of(result), bytes_of(samples)
        return MadePiece(result, samples[0].kind, seconds, sizes), samples

    @sendable()
    def evaluate(
        self, request: AskedPrompts, weights: Mapping[str, Tensor]
    ) -> tuple[MadePiece, tuple[Samples, ...]]:
        """Sample and score a slice of an evaluation; everything is returned on the CPU."""
        session, began = self.session, time.perf_counter()
        assert session.held_out is not None, "the learner has the same prompts"
        self.place(evaluated(session.run), request.version, weights)
        session.learner.evaluator.sizes.take(request.sizes)
        part = replace(trial_of(session.run, session.held_out), rows=request.rows)
        with torch.no_grad(), blamed_in_words():
            trial, scores, more = scored_slice(session.learner, part, session.measured)
        assert isinstance(trial, TrialSamples), "they were sampled here"
        samples = (brought_to(trial.samples.on_cpu(), torch.device("cpu")),)
        result = brought_to(MadePrompts(trial.statistics, scores, more), torch.device("cpu"))
        seconds = {"evaluate": time.perf_counter() - began}
        return MadePiece(
            result, samples[0].kind, seconds, (bytes_of(result), bytes_of(samples))
        ), samples

    @sendable()
    def open(self) -> tuple[dict[str, str], str, tuple[RolloutLike, ...]]:
        """Open the parts. Returns package versions, the node, and the draw that the opened model
        sampled before it loaded other weights."""
        return facts(), ray.get_runtime_context().get_node_id(), self.opened[1]


def later_rewards(session: Session, iteration: int) -> tuple[str, ...]:
    """Rewards whose replicas score during sampling: all rewards with replicas, unless sampling
    itself reads intermediate scores."""
    if not cuttable(session, iteration):
        return ()
    return tuple(n for n, reward in session.rewards.items() if isinstance(reward, ReplicatedReward))


def trial(session: Session) -> tuple[RolloutLike, ...]:
    """Sample the first draw of a run, unscored; None if sampling reads intermediate scores."""
    if not cuttable(session, 0):
        return ()
    algorithm, seed = session.algorithm, session.run.train.seed
    with torch.no_grad(), session.learner.policies.using(algorithm.behaviour):
        batch = session.learner.policy.open(*session.prompts.take((0,)), algorithm.steps)
        return tuple(batch.rollouts(algorithm.plan, (0,), seed=seed, iteration=0))
