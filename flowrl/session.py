"""Everything that a run holds in memory, put together once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from flowrl.algorithm import Algorithm, Average, Decay
from flowrl.models.pipeline import PipelinePolicy
from flowrl.paths import find
from flowrl.policies import Policies
from flowrl.prompts import PromptSet
from flowrl.record import JsonlTracker, Terminal
from flowrl.settings import RewardSpec, Run
from rewards import Reward, load

EVALUATION = "evaluation"  # the average that evaluations use, if the run keeps one
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Session:
    run: Run
    folder: Path
    accelerator: Accelerator
    algorithm: Algorithm
    policy: PipelinePolicy
    policies: Policies
    optimizer: torch.optim.Optimizer
    prompts: PromptSet
    held_out: PromptSet | None
    rewards: Mapping[str, Reward]
    weights: torch.Tensor  # [r], of the rewards
    judges: Mapping[str, Reward]  # the rewards of evaluations
    terminal: Terminal

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def mine(self, count: int) -> range:
        """This process's contiguous share of `count` draws; shares differ by one at most."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        return range(count * rank // world, count * (rank + 1) // world)


def load_rewards(specs: Sequence[RewardSpec]) -> dict[str, Reward]:
    return {spec.label: load(spec.name, **spec.settings) for spec in specs}


def load_policy(run: Run, device: torch.device) -> PipelinePolicy:
    """The pipeline with fresh adapters, or with all weights to be trained."""
    m = run.model
    call = {"height": m.height, "width": m.width, **m.call}
    policy = PipelinePolicy.load(
        str(find(m.pipeline)) if find(m.pipeline).is_dir() else m.pipeline,
        dtype=DTYPES[m.dtype],
        device=device,
        call={key: value for key, value in call.items() if value is not None},
    )
    rows = run.train.rows_per_call
    policy.rows_per_call = automatic(policy) if rows == "auto" else rows
    if m.lora is None:
        policy.train_all()
    else:
        policy.add_lora(
            rank=m.lora.rank, alpha=m.lora.alpha, targets=m.lora.targets, seed=run.train.seed
        )
    return policy


def automatic(policy: PipelinePolicy) -> int:
    """Rows a call: small latents want large batches, large ones fit few. Measured on small ones."""
    numbers = math.prod(policy.shape(2))
    return max(1, min(128, 2**18 // numbers))


def averages(run: Run, algorithm: Algorithm) -> tuple[Average, ...]:
    """The algorithm's own, and the one that evaluations want."""
    if run.evaluate.average is None:
        return algorithm.averages
    return (*algorithm.averages, Average(EVALUATION, Decay(start=run.evaluate.average)))


def open_session(run: Run, folder: Path, accelerator: Accelerator) -> Session:
    algorithm = run.algorithm()
    policy = load_policy(run, accelerator.device)
    policies = Policies(
        policy.trainable(), averages(run, algorithm), keep_start="ref" in algorithm.loss.roles
    )
    t, p = run.train, run.prompts
    optimizer = torch.optim.AdamW(
        policies.parameters.values(), lr=t.lr, betas=t.betas, weight_decay=t.weight_decay
    )
    return Session(
        run=run,
        folder=folder,
        accelerator=accelerator,
        algorithm=algorithm,
        policy=policy,
        policies=policies,
        optimizer=optimizer,
        prompts=PromptSet.read(p.train, p.column, "prompts.train"),
        held_out=(p.held_out and PromptSet.read(p.held_out, p.column, "prompts.held_out")) or None,
        rewards=load_rewards(run.rewards),
        weights=torch.tensor([spec.weight for spec in run.rewards]),
        judges=load_rewards(run.judges),
        terminal=Terminal(accelerator.is_main_process, t.iterations),
    )


def on_cpu(run: Run) -> bool:
    return run.model.device == "cpu" or (
        run.model.device == "auto" and not torch.cuda.is_available()
    )


def open_accelerator(run: Run, folder: Path) -> Accelerator:
    trackers = [JsonlTracker(folder), *run.track.trackers]
    return Accelerator(cpu=on_cpu(run), log_with=trackers, project_dir=str(folder))
