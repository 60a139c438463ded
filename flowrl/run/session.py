"""The objects of a run, built once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from flowrl.algorithm import Algorithm, Average, Decay
from flowrl.budget import spending
from flowrl.budget.spending import Spending
from flowrl.credit.trackers import Tracker
from flowrl.errors import UserError
from flowrl.models.open import DTYPES, open_model
from flowrl.models.policy import Policy
from flowrl.models.precision import scaler
from flowrl.processes import context_parallel
from flowrl.processes.launch import sharding
from flowrl.processes.parallel import Parallel
from flowrl.prompts import PromptSet
from flowrl.run import optimizers
from flowrl.run.origin import Origin
from flowrl.run.policies import Policies
from flowrl.run.record import JsonlTracker, Terminal
from flowrl.settings import RewardSpec, Run
from rewards import Reward, Samples, Scores, load, score_all
from rewards.load import check_sources
from rewards.self_test import Prompts, self_test

EVALUATION = "evaluation"  # the average that evaluations use, if the run keeps one
_DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True)
class Session:
    run: Run
    folder: Path
    accelerator: Accelerator
    parallel: Parallel
    algorithm: Algorithm
    policy: Policy
    policies: Policies
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # of losses; does nothing unless the network is float16
    prompts: PromptSet
    held_out: PromptSet | None
    rewards: Mapping[str, Reward]
    judges: Mapping[str, Reward]  # the rewards of evaluations
    terminal: Terminal
    tracker: Tracker
    spending: Spending
    origin: Origin | None  # on the main process, which writes it into checkpoints

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def score(self, rewards: Mapping[str, Reward], samples: Samples) -> Scores:
        """Score samples. Only the leader of a context-parallel group calls the rewards: its members
        have the same samples. The others get unscored ones, which `Parallel.every` leaves out."""
        if self.parallel.leads:
            return score_all(rewards, samples)
        nothing = torch.zeros(len(samples.prompts), len(rewards), dtype=torch.float64)
        return Scores(nothing, nothing.bool(), tuple(rewards))

    def weights(self, iteration: int) -> torch.Tensor:
        """Return the weights [r] of the rewards."""
        return torch.tensor([spec.weight_at(iteration) for spec in self.run.rewards])


def check_reward_sources(specs: Sequence[RewardSpec]) -> None:
    """UserError if a reward's model is in no folder and no cache and the hub does not answer."""
    for spec in specs:
        try:
            check_sources(spec.name, spec.settings)
        except ValueError as error:
            raise UserError(f"reward {spec.label}: {error}") from error


def load_rewards(specs: Sequence[RewardSpec]) -> dict[str, Reward]:
    """Load rewards by label. UserError if one cannot be loaded or reached."""
    rewards = {}
    for spec in specs:
        try:
            rewards[spec.label] = load(spec.name, **spec.settings)
        except (ValueError, ImportError) as error:
            raise UserError(f"reward {spec.label}: {error}") from error
    return rewards


def prove_rewards(rewards: Mapping[str, Reward], run: Run, prompts: PromptSet) -> Iterator[str]:
    """Test rewards: a sentence for each that passes; UserError, or a warning, for others."""
    if run.train.self_test == "off":
        return
    kind = "image" if run.model.language is None else "text"
    shown = Prompts(prompts.texts, prompts.meta, kind)
    for name, reward in rewards.items():
        try:
            yield f"reward {self_test(name, reward, shown)}"
        except ValueError as error:
            if run.train.self_test == "raise":
                raise UserError(f"{error}; train.self_test: warn makes this a warning") from error
            yield f"warning: {error}"


def load_policy(run: Run, device: torch.device, folder: Path | None = None) -> Policy:
    """Load the model, with new adapters or with all weights trained."""
    m = run.model
    policy = open_model(run, device, folder)
    rows = run.train.rows_per_call
    policy.rows_per_call = policy.automatic(run.algorithm().steps) if rows == "auto" else rows
    if m.lora is None:
        policy.train_all()
    else:
        policy.add_lora(
            rank=m.lora.rank, alpha=m.lora.alpha, targets=m.lora.targets, seed=run.train.seed
        )
    if run.train.gradient_checkpointing:
        policy.checkpoint_gradients()
    return policy


def averages(run: Run, algorithm: Algorithm) -> tuple[Average, ...]:
    """Return the algorithm's averages, and the one of `evaluate.average`."""
    if run.evaluate.average is None:
        return algorithm.averages
    return (*algorithm.averages, Average(EVALUATION, Decay(start=run.evaluate.average)))


def open_session(run: Run, folder: Path, accelerator: Accelerator) -> Session:
    """Load the model, prompts and rewards of a run. UserError for what cannot run."""
    how = sharding(accelerator)  # before weights are loaded, since it may refuse
    context_parallel.refuse_model(run.model, accelerator.num_processes)
    algorithm = run.algorithm()
    policy = load_policy(run, accelerator.device, folder)
    parallel = Parallel.open(accelerator, policy.roots(), how, run.model.context_parallel)
    policies = Policies(
        policy.trainable(),
        averages(run, algorithm),
        keep_start="ref" in algorithm.roles,
        changed=parallel.reshard,
    )
    parallel.follow(policies)
    t, p = run.train, run.prompts
    optimizer = optimizers.build(t, policies.parameters.values())
    return Session(
        run=run,
        folder=folder,
        accelerator=accelerator,
        parallel=parallel,
        algorithm=algorithm,
        policy=policy,
        policies=policies,
        optimizer=optimizer,
        scaler=scaler(accelerator.device, DTYPES[run.model.dtype]),
        prompts=p.read("train"),
        held_out=None if p.held_out is None else p.read("held_out"),
        rewards=load_rewards(run.rewards),
        judges=load_rewards(run.judges),
        terminal=Terminal(accelerator.is_main_process, t.iterations),
        tracker=algorithm.tracker(),
        spending=spending.open_spending(run.budget, algorithm.group),
        origin=Origin.of(run, parallel.processes) if parallel.main else None,
    )


def hardware(session: Session) -> str:
    """Describe device, precision and trained parameters in one line."""
    m = session.run.model
    name = f" ({torch.cuda.get_device_name()})" if session.device.type == "cuda" else ""
    trained = sum(p.numel() for p in session.policies.network.values())
    whole = sum(p.numel() for root in session.policy.roots().values() for p in root.parameters())
    how = "all weights" if m.lora is None else f"LoRA of rank {m.lora.rank}"
    return (
        f"device {session.device.type}{name}, {m.dtype}; trained: {how}, {trained / 1e6:.4g} of "
        f"{whole / 1e6:.4g} million parameters"
    )


def on_cpu(run: Run) -> bool:
    """Whether a run uses the CPU. UserError if `model.device` is unknown or not there."""
    device, cuda = run.model.device, torch.cuda.is_available()
    if device not in _DEVICES:
        raise UserError(
            f"model.device: {device!r} is not known; one of {', '.join(_DEVICES)} "
            "(CUDA_VISIBLE_DEVICES chooses among several GPUs)"
        )
    there = {"auto": True, "cpu": True, "cuda": cuda, "mps": torch.backends.mps.is_available()}
    if not there[device]:
        raise UserError(
            f"model.device: {device} is not available to PyTorch on this machine; set "
            "model.device: auto, or install PyTorch for it"
        )
    return device == "cpu" or (device == "auto" and not cuda)


def open_accelerator(run: Run, folder: Path) -> Accelerator:
    trackers = [JsonlTracker(folder), *run.track.trackers]
    return Accelerator(cpu=on_cpu(run), log_with=trackers, project_dir=str(folder))
