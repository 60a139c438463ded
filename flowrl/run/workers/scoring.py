"""Scoring workers: replicas of a reward, each in its own process."""

import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray  # type: ignore[reportMissingImports]
import torch
from jaxtyping import Float
from ray.exceptions import (  # type: ignore[reportMissingImports]
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)
from torch import Tensor

from flowrl.blame import blamed_in_words
from flowrl.errors import UserError
from flowrl.run.workers.causes import sendable
from flowrl.run.workers.opening import Birth, birth, cause_of, first_line
from flowrl.run.workers.transport import send_tensors_whole
from flowrl.session.session import load_rewards
from flowrl.settings import RunSettings
from flowrl.settings.read import run_from
from rewards import Samples
from rewards.checks.winnable import KnowsSlowly, KnowsWinnable, Winnable
from rewards.combine import reward_scores
from rewards.types import FindsAnswers, Reward, RewardScores, parts_of, reports

WORKERS_ASKED = 3  # workers that are asked for a result before the run ends
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OF_LAUNCHERS = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_")

RowColumns = Sequence[Mapping[str, Any]]
ReplicaScores = tuple[list[RewardScores], dict[str, float], float]  # by plan; reports; seconds


def begin_worker(settings: Mapping[str, Any], threads: int) -> RunSettings:
    """Make this process a worker of a run, outside its launcher's process group, which it would
    inherit. Returns the run's settings."""
    for name in [*os.environ]:
        if name in LAUNCHERS or name.startswith(OF_LAUNCHERS):
            del os.environ[name]
    torch.set_num_threads(threads)
    send_tensors_whole()
    return run_from(settings, "the run's settings")


class ScoringWorker:
    """The process of one replica."""

    def __init__(self, settings: Mapping[str, Any], label: str, threads: int) -> None:
        self.settings, self.label, self.threads = settings, label, threads

    @cached_property
    def rewards(self) -> Mapping[str, Reward]:
        """The reward, opened by the first task rather than by the constructor, whose errors Ray
        sends as text alone."""
        run = begin_worker(self.settings, self.threads)
        specs = (*run.rewards, *run.held_out_rewards, *run.intermediate_rewards)
        spec = next(candidate for candidate in specs if candidate.label == self.label)
        rewards = load_rewards([spec])
        if next(parts_of(rewards, FindsAnswers), None) is not None:
            raise UserError(
                f"{self.label} finds answers in texts, which sampling processes "
                "need locally; leave it out there"
            )
        return rewards

    def birth(self) -> Birth:
        return birth()

    @sendable()
    def open(self) -> None:
        """Open the reward."""
        self.rewards  # noqa: B018 it is opened when it is first read

    @sendable()
    def score(self, samples: Sequence[Samples]) -> ReplicaScores:
        """Scores of each plan's samples, the reward's reports, and the seconds taken."""
        began = time.perf_counter()
        with blamed_in_words():
            reward = self.rewards[self.label]
            columns = [reward_scores(self.label, reward, part) for part in samples]
        return columns, reports(self.rewards), time.perf_counter() - began

    @sendable()
    def winnable(self, prompts: Sequence[str], meta: RowColumns) -> list[Winnable]:
        """Whether rows can be won; unknown if the reward does not say."""
        reward = self.rewards[self.label]
        if not isinstance(reward, KnowsWinnable):
            return [Winnable("unknown")] * len(prompts)
        return reward.winnable(prompts, meta)

    @sendable()
    def answer_keys(self, prompts: Sequence[str], meta: RowColumns) -> list[str | None]:
        """Keys of the answers that take work."""
        reward = self.rewards[self.label]
        if not isinstance(reward, KnowsSlowly):
            return [None] * len(prompts)
        return reward.answer_keys(prompts, meta)


@dataclass(frozen=True)
class Waiting:
    """A result requested from a replica."""

    reference: Any
    replica: Any


class ReplicatedReward:
    """A reward whose replicas are other processes, which get samples in turn. When called as a
    reward, it waits for the scores.

    Samples can also be given by a reference, so that their media go to a replica without passing
    through this process.
    """

    concurrent = True

    def __init__(self, label: str, replicas: Sequence[Any], limit: float) -> None:
        self.label, self.replicas, self.limit = label, tuple(replicas), limit
        self.turns = itertools.cycle(self.replicas)
        self.reported: dict[str, float] = {}
        self.lock = threading.Lock()  # it is called from several threads

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return ReplicatedReward, (self.label, self.replicas, self.limit)

    def __call__(self, samples: Samples) -> Float[Tensor, " n"] | RewardScores:
        media = ray.put((samples.on_cpu(),))
        (column,), report, _ = self.result(self.ask(media), media)
        with self.lock:
            for name, value in report.items():
                name = name.removeprefix(f"calls/{self.label}/")
                self.reported[name] = self.reported.get(name, 0.0) + value
        return column.plain

    def winnable(self, prompts: Sequence[str], meta: RowColumns) -> list[Winnable]:
        """Whether rows can be won, by the first replica."""
        return self._answer(self.replicas[0].winnable.remote(list(prompts), list(meta)))

    def answer_keys(self, prompts: Sequence[str], meta: RowColumns) -> list[str | None]:
        return self._answer(self.replicas[0].answer_keys.remote(list(prompts), list(meta)))

    def _answer(self, reference: Any) -> Any:
        """Wait for a replica's answer about rows."""
        try:
            return ray.get(reference, timeout=self.limit)
        except RayTaskError as error:
            raise cause_of(error) from None
        except RayError as error:
            raise UserError(
                f"workers.rewards: {self.label} has not said in {self.limit:g} s what it knows of "
                f"the rows ({first_line(error)}): raise workers.limit if that is slow"
            ) from error

    def report(self) -> dict[str, float]:
        with self.lock:
            reported, self.reported = self.reported, {}
        return reported

    def ask(self, samples: Any) -> Waiting:
        """Ask the next replica to score the samples of a reference."""
        with self.lock:
            replica = next(self.turns)
        return Waiting(replica.score.remote(samples), replica)

    def result(self, request: Waiting, samples: Any) -> ReplicaScores:
        """Wait for scores. Ray repeats the request of a replica that died; a replica that does not
        answer in time is ended. Then, and if Ray has given up a replica, the next one is asked.
        RayError if the samples are lost."""
        reason = ""
        for _ in range(WORKERS_ASKED):
            try:
                return ray.get(request.reference, timeout=self.limit)
            except GetTimeoutError:
                reason = f"no answer in {self.limit:g} s: raise workers.limit if they are slow"
                ray.kill(request.replica, no_restart=False)
            except RayActorError as error:
                reason = first_line(error)
            except RayTaskError as error:
                raise cause_of(error) from None
            request = self.ask(samples)
        raise UserError(
            f"workers.rewards: {WORKERS_ASKED} replicas of {self.label} have not scored samples "
            f"({reason}); see `ray status`"
        )
