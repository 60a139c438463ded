"""Shared parts of the scripts that train the demos' models from nothing.

It must be imported first: it bounds the wait of idle threads before torch is imported.
"""

import copy
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # see flowrl.cli.app; read when torch is imported

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

SAVED_EVERY = 50  # steps of a flow
Optimizers = Sequence[torch.optim.Optimizer]
Rates = Sequence[torch.optim.lr_scheduler.LambdaLR]


@dataclass(frozen=True)
class Saved:
    """The file of a training between two of its steps, and the settings that it belongs to."""

    path: Path
    settings: str


@dataclass(frozen=True)
class PretrainArguments:
    out: Path
    """Folder of the pipeline; the sheet of samples is saved beside it as OUT.png."""
    seed: int = 0
    """Seed of everything random."""
    quick: bool = False
    """Take a few small steps, as a smoke test."""
    threads: int = 2
    """Processor threads; more than there are idle cores is much slower."""
    autoencoder: Path | None = None
    """Folder of a pipeline made before; its autoencoder is reused."""

    def beside(self, ending: str) -> Path:
        """OUT with an ending of its own; a dot in OUT's name is no ending."""
        return self.out.with_name(self.out.name + ending)

    def saved(self, work: Any) -> Saved:
        settings = f"seed {self.seed}, autoencoder {self.autoencoder}, {work}"
        return Saved(self.beside(".unfinished"), settings)


class Clock:
    """Wall and processor seconds since its creation."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def __str__(self) -> str:
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        return f"wall {wall:.0f} s cpu {cpu:.0f} s"


def begin(seed: int, threads: int) -> tuple[random.Random, Clock]:
    """Seed everything random; returns the world's own generator."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    random.seed(seed)
    return random.Random(seed), Clock()


def megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def report(out: Path, accuracy: float, judged: str, clock: Clock) -> None:
    """Print the folder's size, the accuracy over the `judged` samples, and the time."""
    right = f"{accuracy:.1%} of {judged} of held-out prompts are right"
    print(f"{out}: {megabytes(out):.1f} MB, {right}; {clock}")


def timed(name: str, steps: int, done: int = 0) -> Iterator[tuple[int, Callable[[float], None]]]:
    """Step numbers, each with a function that takes the loss; a line about every tenth part."""
    clock, losses = Clock(), []
    for step in range(done, steps):
        yield step, losses.append
        if (step + 1) % max(1, steps // 10) == 0:
            recent = losses[-max(1, steps // 10) :]
            mean = sum(recent) / len(recent)
            print(f"{name} step {step + 1}/{steps} loss {mean:.4f} {clock}", flush=True)


def muon_and_adam(
    matrices: Iterable[nn.Parameter], parameters: Iterable[nn.Parameter], second: float = 0.95
) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for the rest of the parameters; `second` is its beta."""
    matrices = list(matrices)
    taken = {id(p) for p in matrices}
    rest = [p for p in parameters if id(p) not in taken]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, second), weight_decay=0.0),
    ]


def falling(
    optimizers: Optimizers,
    shape: Callable[[float], float],
    steps: int,
    *,
    rise: int = 50,
    least: float = 0.01,
) -> Rates:
    """Learning rates: `rise` steps up, then `shape` of the share of the steps done, not below
    `least`."""

    def factor(step: int) -> float:
        return min((step + 1) / rise, 1, max(least, shape(step / steps)))

    return [torch.optim.lr_scheduler.LambdaLR(o, factor) for o in optimizers]


def descend(
    loss: Tensor, weights: Iterable[nn.Parameter], optimizers: Optimizers, rates: Rates
) -> None:
    """One step of all optimizers, with the gradient cut to a norm of 1."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(weights, 1.0)
    for stepped in (*optimizers, *rates):
        stepped.step()


class Unfinished:
    """Training between two of its steps, in a file."""

    def __init__(self, saved: Saved, weights: Sequence[Tensor], parts: Sequence[Any]) -> None:
        self.path, self.settings = saved.path, saved.settings
        self.weights, self.parts = weights, parts

    def load(self) -> int:
        """Load the state; returns the next step. SystemExit for a state of other settings."""
        if not self.path.is_file():
            return 0
        state = torch.load(self.path, weights_only=True)
        if state.get("settings") != self.settings:  # an older file names none
            sys.exit(
                f"{self.path} is unfinished with other settings ({state.get('settings')}; now "
                f"{self.settings}): finish it with those, delete it, or choose another --out"
            )
        for weight, value in zip(self.weights, state["weights"], strict=True):
            weight.copy_(value)
        for part, value in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(value)
        torch.set_rng_state(state["torch"])
        random.setstate(state["random"])
        return state["done"]

    def save(self, done: int) -> None:
        state = {"settings": self.settings, "done": done}
        state |= {"weights": list(self.weights), "torch": torch.get_rng_state()}
        state |= {"parts": [p.state_dict() for p in self.parts], "random": random.getstate()}
        beside = self.path.with_suffix(".tmp")
        beside.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, beside)
        beside.rename(self.path)


@dataclass(frozen=True)
class Flow:
    """Training of a flow and of its text encoders, whose weights end as their average.

    saved          the state to continue from after an interruption
    mixed          whether the forward is under autocast to bfloat16; convolutions, and processors
                   without bfloat16 units, are faster without
    mixed_backward whether the backward too is under autocast, as it was for the shipped images
    """

    parts: Sequence[nn.Module]
    optimizers: Optimizers
    steps: int
    saved: Saved
    mixed: bool = True
    mixed_backward: bool = False

    def train(self, loss: Callable[[], Tensor]) -> None:
        weights = [p for part in self.parts for p in part.parameters()]
        averages = copy.deepcopy([p.data for p in weights])
        rates = falling(self.optimizers, lambda share: (1 - share) / 0.4, self.steps)
        kept = [*(p.data for p in weights), *averages]
        state = Unfinished(self.saved, kept, [*self.optimizers, *rates])
        done = state.load()
        for step, note in timed("flow", self.steps, done):
            if step % SAVED_EVERY == 0 and step > done:
                state.save(step)
            # the backward of the fused attention in bfloat16 takes half of the step, plain 5 %
            with sdpa_kernel(SDPBackend.MATH) if self.mixed else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
                    value = loss()
                with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed_backward):
                    descend(value, weights, self.optimizers, rates)
            decay = min(0.998, (1 + step) / (10 + step))
            torch._foreach_lerp_(averages, [p.data for p in weights], 1 - decay)
            note(value.item())
        for weight, average in zip(weights, averages, strict=True):
            weight.data.copy_(average)
        self.saved.path.unlink(missing_ok=True)
