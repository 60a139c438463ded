"""The objects of a run, built once: the learner, its prompts, its rewards, its outputs."""

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator, PartialState
from jaxtyping import Float
from torch import Tensor

from flowrl.algorithm import Algorithm
from flowrl.budget.spending import Rationed, open_budget
from flowrl.credit.trackers import TRACKER, NoTracker
from flowrl.errors import UserError
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.own.policy import shown_by
from flowrl.processes.parallel import Parallel
from flowrl.prompts import DATA_SET, Draws, PromptSet
from flowrl.session.given_samples import GIVEN, GivenSamples
from flowrl.session.learner import Learner
from flowrl.session.live import NOTHING_LIVE, Live
from flowrl.session.notices import Notices
from flowrl.session.record import JsonlTracker, Terminal
from flowrl.session.start_record import StartRecord
from flowrl.session.waiting import scores_in_turn
from flowrl.session.writer import FileWriter
from flowrl.settings import RewardSpec, RunSettings
from flowrl.settings.words.scores import TRAINED, shown_score
from flowrl.table import EMPTY, Column, Table
from rewards import Reward, Samples, Scores, load, score_all
from rewards.checks.self_test import Prompts, Untested, check_sum, self_test
from rewards.combine import blamed, reward_scores
from rewards.load import check_sources
from rewards.types import MediaForm, Reports, RewardScores, parts_of

_DEVICES = ("auto", "cpu", "cuda", "mps")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt in glibc's malloc.h
LARGEST_BLOCK = 32 * 2**20  # the most that glibc takes, and where its own rule ends: others go back


@runtime_checkable
class SampleSource(Protocol):
    """Samples iterations before they are learned from, or elsewhere: what a checkpoint keeps of
    it. Features of an iteration know more (`flowrl.iteration.units.UnitSource`)."""

    def state(self, iteration: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the numbers and weights that a checkpoint stores after this many iterations."""
        ...

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None: ...


@runtime_checkable
class AsksPeople(Protocol):
    """The votes of a run that asks people: what a checkpoint and the loop know of it. Features of
    an iteration know more (`flowrl.votes.asking`)."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores: tensors, numbers and texts."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def alarm(self) -> str:
        """A sentence if people no longer agree with the reward; otherwise empty."""
        ...

    def close(self) -> None: ...


class ReplacesLost(Protocol):
    """Draws other rows in place of those that nothing can win (`flowrl.session.row_checks`)."""

    def winnable(self, iteration: int, draws: Draws) -> Draws: ...


SPENDING: Column[Rationed] = Column("spending of a budget", "budget", "whole")
SOURCE: Column[SampleSource] = Column("source of samples", "units", "whole")
ASKING: Column[AsksPeople] = Column("votes of a run", "ask", "whole")
WINNABLE: Column[ReplacesLost] = Column("rows that can be won", "draw", "whole")


@dataclass(frozen=True)
class Session:
    """All objects of a run, for the loop and checkpoints. Functions that only need the policy take
    the `Learner`.

    What a feature holds for the whole run, such as a tracker, the votes of people or the workers
    that sample, is a column of `table`.
    """

    learner: Learner
    folder: Path
    accelerator: Accelerator
    prompts: PromptSet
    held_out: PromptSet | None
    rewards: Mapping[str, Reward]
    judges: Mapping[str, Reward]  # the rewards of evaluations
    beside: Mapping[str, Reward]  # training rewards that evaluations measure too
    intermediate_rewards: Mapping[str, Reward]  # of predicted clean images
    terminal: Terminal
    start_record: StartRecord | None  # on the main process, which writes it into checkpoints
    live: Live = NOTHING_LIVE
    writer: FileWriter = field(default_factory=FileWriter)
    table: Table = EMPTY
    notices: Notices | None = None  # on the main process, of a user who wants some

    @property
    def run(self) -> RunSettings:
        return self.learner.run

    @property
    def algorithm(self) -> Algorithm:
        return self.learner.algorithm

    @cached_property
    def measured(self) -> Mapping[str, Reward]:
        """All rewards of evaluations: the judges first."""
        return {**self.judges, **self.beside}

    @cached_property
    def prompt_writer(self) -> "Session | None":
        """The session of the model that writes the prompts; None if prompts are used as given."""
        writer = self.learner.prompt_writer
        return (
            None
            if writer is None
            else replace(self, learner=writer, table=self.table.without(TRACKER))
        )

    @property
    def template(self) -> str:
        """The text around a prompt that a rewriter gets."""
        return self.learner.template

    @property
    def parallel(self) -> Parallel:
        return self.learner.parallel

    @cached_property
    def scores_in_turn(self) -> bool:
        """Whether samples are scored after all are drawn, one reward at a time. False on a GPU,
        beside which rewards run."""
        in_turn = scores_in_turn(self.rewards, len(self.algorithm.plans))
        return in_turn and self.parallel.device != "cuda"

    @cached_property
    def several_sizes(self) -> bool:
        """Whether prompts have samples of several sizes, each with its own noise levels."""
        policy = self.learner.policy
        return isinstance(policy, PipelinePolicy) and len(policy.used) > 1

    @cached_property
    def draw_count(self) -> int:
        """Number of an iteration's prompts that get generated samples."""
        return self.run.drawn

    @cached_property
    def reporting(self) -> Mapping[str, Reward]:
        """The rewards that report numbers for the log, or have a member that does."""
        rewards = self.rewards.items()
        return {label: reward for label, reward in rewards if [*parts_of(reward, Reports)]}

    def winnable(self, iteration: int, draws: Draws) -> Draws:
        """The draws of an iteration without rows that nothing can win. Collective."""
        return self.table[WINNABLE].winnable(iteration, draws) if WINNABLE in self.table else draws

    def shown(self, samples: Samples) -> Samples:
        """The samples as pages show them: tensors of a user's own model become images."""
        return shown_by(self.learner.policy, samples)

    def weights(self, iteration: int) -> torch.Tensor:
        """Weights [r] of the rewards."""
        return torch.tensor([spec.weight_at(iteration) for spec in self.run.rewards])

    def intermediate_weights(self, iteration: int) -> torch.Tensor:
        """Weights [r] of the intermediate rewards."""
        return torch.tensor([spec.weight_at(iteration) for spec in self.run.asked_intermediate])


def score_once(parallel: Parallel, rewards: Mapping[str, Reward], samples: Samples) -> Scores:
    """Score samples. Only the leader of a context-parallel group calls the rewards, since its
    members have the same samples; the others get unscored samples, which `Parallel.every` leaves
    out. Without rewards the result has no columns: other processes score the samples."""
    if parallel.leads and rewards:
        return score_all(rewards, samples)
    nothing = torch.zeros(len(samples.prompts), len(rewards), dtype=torch.float64)
    return Scores(nothing, nothing.bool(), tuple(rewards))


def check_reward_sources(specs: Sequence[RewardSpec], live: Live = NOTHING_LIVE) -> None:
    """UserError if a reward's model is neither local nor cached and the hub does not answer."""
    for spec in specs:
        if spec.label in live.rewards:
            continue
        try:
            check_sources(spec.name, spec.settings)
        except ValueError as error:
            raise UserError(f"reward {spec.label}: {error}") from error


def load_rewards(
    specs: Sequence[RewardSpec], live: Live = NOTHING_LIVE, elsewhere: Mapping[str, Reward] = {}
) -> dict[str, Reward]:
    """Load rewards by label; Python objects are already loaded, and rewards in `elsewhere` belong
    to other processes. UserError if a reward cannot be loaded or reached."""
    rewards = {}
    for spec in specs:
        if spec.label in elsewhere:
            rewards[spec.label] = _of_sets(elsewhere[spec.label], spec)
            continue
        try:
            live_reward = live.rewards.get(spec.label)
            spec.refuse_python(live_reward is not None)
            reward = load(spec.name, **spec.settings) if live_reward is None else live_reward
            rewards[spec.label] = _of_sets(reward, spec)
        except (ValueError, ImportError) as error:
            raise UserError(f"reward {spec.label}: {error}") from error
    return rewards


@dataclass(frozen=True)
class OfSets:
    """A reward of the rows of some data sets; it does not apply to others."""

    reward: Reward
    label: str
    sets: tuple[str, ...]

    def rows(self, meta: Sequence[Mapping[str, Any]]) -> list[int]:
        return [row for row, columns in enumerate(meta) if columns.get(DATA_SET) in self.sets]

    def __call__(self, samples: Samples) -> Float[Tensor, " n"] | RewardScores:
        scores = RewardScores.nowhere(len(samples.prompts))
        if rows := self.rows(samples.meta):
            scores.put(rows, reward_scores(self.label, self.reward, samples.take(rows)))
        return scores.plain


@dataclass
class MeasuredBeside:
    """A training reward as evaluations measure it beside the judges. Held-out prompts may lack what
    it reads, which must not end a run that does not need the number: it then applies to none.

    raised  whether it has raised, and is asked no more
    warned  whether that it lacks scores was said
    """

    reward: Reward
    label: str
    raised: bool = False
    warned: bool = False

    def __call__(self, samples: Samples) -> Float[Tensor, " n"] | RewardScores:
        if not self.raised:
            try:
                scores = reward_scores(self.label, self.reward, samples)
            except Exception as error:  # a reward's own code
                self.raised = True
                said = " ".join(str(error).split())[:300]
                self._warn(f"raised {type(error).__name__}: {said}")
            else:
                asked = scores.values[scores.applies]
                if not len(asked) or not bool(asked.isnan().all()):
                    return scores.plain
                self._warn(f"scored none of {len(asked)} samples")
        return RewardScores.nowhere(len(samples.prompts)).plain

    def _warn(self, failure: str) -> None:
        if self.warned:
            return
        self.warned = True
        print(
            f"warning: {shown_score(self.label)} is not measured on held-out prompts: it "
            f"{failure}; evaluate.trained: false leaves such rewards out",
            file=sys.stderr,
        )


def measured_beside(run: RunSettings, rewards: Mapping[str, Reward]) -> dict[str, Reward]:
    """The training rewards that evaluations measure beside the judges, by their names there.
    `rewards`: those of training, by label."""
    return {
        spec.label: MeasuredBeside(rewards[spec.label.removeprefix(TRAINED)], spec.label)
        for spec in run.trained_beside
    }


def _of_sets(reward: Reward, spec: RewardSpec) -> Reward:
    return OfSets(reward, spec.label, spec.sets) if spec.sets else reward


def _shown(reward: Reward, prompts: PromptSet, form: MediaForm) -> tuple[Reward, Prompts]:
    """A reward for its test, and the rows that it scores."""
    if not isinstance(reward, OfSets):
        return reward, Prompts(prompts.texts, prompts.meta, *form)
    rows = reward.rows(prompts.meta)
    return reward.reward, Prompts(*prompts.take(rows), *form)


def _tested(name: str, reward: Reward, shown: Prompts) -> str:
    return f"reward {self_test(name, reward, shown, one_kind=True)}"


def prove_rewards(
    rewards: Mapping[str, Reward], run: RunSettings, prompts: PromptSet, form: MediaForm
) -> Iterator[str]:
    """Test rewards on samples of the form that the model generates. Returns a sentence for each
    reward that passes; UserError, or a warning, for others."""
    if run.train.self_test == "off":
        return
    tests: list[Callable[[], str | None]] = [
        partial(_tested, name, *_shown(reward, prompts, form)) for name, reward in rewards.items()
    ]
    shown = Prompts(prompts.texts, prompts.meta, *form)
    weights = {spec.label: spec.weight_at(0) for spec in run.rewards}
    if len(rewards) > 1 and set(rewards) == set(weights):
        tests.append(lambda: check_sum(rewards, weights, shown))
    for test in tests:
        try:
            if (sentence := test()) is not None:
                yield sentence
        except Untested as error:
            yield f"warning: {error}"
        except ValueError as error:
            if run.train.self_test == "raise":
                message = blamed(error) or error
                raise UserError(f"{message}; train.self_test: warn makes this a warning") from error
            yield f"warning: {error}"
        except Exception as error:
            if (message := blamed(error)) is None:
                raise
            raise UserError(f"{message}, for the first test samples") from error


def open_session(
    run: RunSettings,
    folder: Path,
    accelerator: Accelerator,
    live: Live = NOTHING_LIVE,
    elsewhere: Mapping[str, Reward] = {},
) -> Session:
    """Load the model, prompts and rewards of a run; rewards in `elsewhere` belong to other
    processes. UserError if they cannot run."""
    learner, p = Learner.open(run, folder, accelerator), run.prompts
    rewards = load_rewards(run.rewards, live, elsewhere)
    return Session(
        learner=learner,
        folder=folder,
        accelerator=accelerator,
        prompts=p.read("train"),
        held_out=None if p.held_out is None else p.read("held_out"),
        rewards=rewards,
        judges=load_rewards(run.judges, live, elsewhere),
        beside=measured_beside(run, rewards),
        intermediate_rewards=load_rewards(run.intermediate_rewards, live, elsewhere) or rewards,
        terminal=Terminal(accelerator.is_main_process),
        start_record=StartRecord.of(run, learner.parallel.processes)
        if learner.parallel.main
        else None,
        live=live,
        table=_of_features(learner),
    )


def _of_features(learner: Learner) -> Table:
    """Open what features hold for the whole run."""
    table, tracker = EMPTY, learner.algorithm.tracker
    if tracker is not NoTracker:
        table = table.with_value(TRACKER, tracker())
    if (spending := open_budget(learner.run.budget, learner.algorithm.group)) is not None:
        table = table.with_value(SPENDING, spending)
    if (given_samples := GivenSamples.open(learner)) is not None:
        table = table.with_value(GIVEN, given_samples)
    return table


def on_cpu(run: RunSettings) -> bool:
    """Whether a run uses the CPU. UserError if `model.device` is unknown or unavailable."""
    device, cuda = run.model.device, torch.cuda.is_available()
    if device not in _DEVICES:
        raise UserError(
            f"model.device: {device!r} is not known; use one of {', '.join(_DEVICES)} "
            "(CUDA_VISIBLE_DEVICES selects among several GPUs)"
        )
    available = {"auto": True, "cpu": True, "cuda": cuda, "mps": torch.backends.mps.is_available()}
    if not available[device]:
        raise UserError(
            f"model.device: {device} is not available to PyTorch on this machine; set "
            "model.device: auto, or install PyTorch for it"
        )
    if device == "mps" and run.model.dtype == "float64":
        raise UserError("model.dtype: mps has no float64; set model.dtype: float32")
    return device == "cpu" or (device == "auto" and not cuda)


def open_accelerator(run: RunSettings, folder: Path) -> Accelerator:
    trackers = [JsonlTracker(folder), *run.track.trackers]
    cpu = on_cpu(run)
    first = PartialState().device if PartialState._shared_state else None
    if first is not None and (first.type == "cpu") != cpu:
        raise UserError(
            f"model.device: {run.model.device}, but accelerate has set this process up for "
            f"{first.type}, and keeps to it; start a process for each device"
        )
    if cpu:
        keep_freed_memory()
    return Accelerator(cpu=cpu, log_with=trackers, project_dir=str(folder))


def keep_freed_memory() -> None:
    """Make the process keep freed blocks of up to 32 MiB.

    Otherwise glibc returns them to the system, and every network call requests them again page by
    page: 150,000 page faults in an iteration with 600 MB of activations. Do nothing without glibc,
    or if the user has set glibc's environment variables."""
    glibc_settings = ("MALLOC_", "GLIBC_TUNABLES")
    if platform.libc_ver()[0] != "glibc" or any(
        name.startswith(glibc_settings) for name in os.environ
    ):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, LARGEST_BLOCK)  # alone, the next line would end glibc's own rule
    libc.mallopt(TRIM_THRESHOLD, -1)  # never
