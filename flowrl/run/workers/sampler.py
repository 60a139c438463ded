"""The body of a sampling worker: a session without an optimizer, which takes weights by version."""

import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from flowrl.models.policy import RolloutLike
from flowrl.run.evaluate.start_checks import prove_pipeline
from flowrl.run.experience.units import cuttable, sample_unit
from flowrl.run.model_proof import StartProof
from flowrl.run.state.learner import Learner
from flowrl.run.state.record import Terminal
from flowrl.run.state.session import Session, load_rewards, on_cpu
from flowrl.run.state.units import SamplingUnit, UnitSamples
from flowrl.run.workers.transport import brought_to
from flowrl.settings.read import run_from
from rewards.types import reports

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
COMPARED = ("flowrl", "torch", "diffusers", "transformers", "peft")


@dataclass(frozen=True)
class Asked:
    """A unit, and everything besides the settings that its samples depend on.

    version  of the weights: the iteration that began with them
    sizes    rows per call, as the training process has them by now
    """

    unit: SamplingUnit
    version: int
    sizes: Mapping[str, int | None]


def facts() -> dict[str, str]:
    """Versions on which samples depend."""
    return {"python": platform.python_version(), **{name: version(name) for name in COMPARED}}


class SamplingWorker:
    """Opens the model and the rewards of a run as the training process does."""

    def __init__(self, settings: Mapping[str, Any], threads: int) -> None:
        for name in LAUNCHERS:  # of the training process: a worker is no member of its group
            os.environ.pop(name, None)
        torch.set_num_threads(threads)
        self.version: int | None = None
        run = run_from(settings, "the run's settings")
        self.folder = tempfile.TemporaryDirectory(prefix="flowrl-worker-")  # goes with this process
        folder = Path(self.folder.name)
        accelerator = Accelerator(cpu=on_cpu(run))
        learner = Learner.open(run, folder, accelerator)
        rewards = load_rewards(run.rewards)
        self.session = Session(
            learner=learner,
            folder=folder,
            accelerator=accelerator,
            prompts=run.prompts.read("train"),
            held_out=None,
            rewards=rewards,
            judges={},
            intermediate_rewards=load_rewards(run.intermediate_rewards) or rewards,
            terminal=Terminal(False),
            tracker=None,
            spending=None,
            start_record=None,
        )
        prove_pipeline(self.session, StartProof(self.session, True))

    def place(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of a version, unless they are already loaded."""
        if version == self.version:
            return
        learner = self.session.learner
        learner.policies.replace_weights(learner.algorithm.behaviour, weights)
        self.version = version

    def sample(
        self, asked: Asked, weights: Mapping[str, Tensor]
    ) -> tuple[UnitSamples, dict[str, float]]:
        """Samples of a unit, on the CPU, and the seconds of each phase."""
        self.place(asked.version, weights)
        self.session.learner.policy.sizes.take(asked.sizes)
        seconds: dict[str, float] = {}
        _, made = sample_unit(self.session, asked.unit, seconds)
        made = replace(made, reports=reports(self.session.rewards))
        return brought_to(made, torch.device("cpu")), seconds

    def trial(
        self, version: int, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, str], tuple[RolloutLike, ...]]:
        """Versions and one draw, to compare with the training process's own."""
        self.place(version, weights)
        return facts(), brought_to(trial(self.session), torch.device("cpu"))


def trial(session: Session) -> tuple[RolloutLike, ...]:
    """Sample the first draw of a run, unscored; nothing where sampling reads scores on the way."""
    if not cuttable(session, 0):
        return ()
    algorithm, seed = session.algorithm, session.run.train.seed
    with torch.no_grad(), session.learner.policies.using(algorithm.behaviour):
        batch = session.learner.policy.open(*session.prompts.take((0,)), algorithm.steps)
        return tuple(batch.rollouts(algorithm.plan, (0,), seed=seed, iteration=0))
