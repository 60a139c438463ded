"""What the words after `sample`, `evaluate` and `plan` may be; tyro reads them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

Word = tyro.conf.Positional


@dataclass
class SampleArguments:
    """Paint prompts with a run's weights."""

    run: Word[Path]
    """The run's folder."""
    prompts: Word[tuple[str, ...]]
    weights: str = "last"
    """last, best, base, or a folder: an adapter's, or one of RUN/checkpoints."""
    count: int = 4
    """Pictures a prompt."""
    steps: int | None = None
    """Denoising steps; the run's evaluation steps if not given."""
    guidance: float | None = None
    seed: int = 0
    out: Path | None = None
    """Where to write; RUN/samples/sample-0001 if not given."""
    steer: Literal["no", "best", "importance", "particles"] = "no"
    """Of several samples keep the one that the rewards choose: see flowrl/cli/steer.py."""
    particles: int = 8
    """Samples that a kept one is chosen from."""
    strength: float = 10.0
    """Of the rewards, in exp(strength reward)."""
    rewards: tuple[str, ...] = ()
    """That score and steer; names or YAML. The run's if not given."""


@dataclass
class EvaluateArguments:
    """Score a run's weights on prompts, by deterministic sampling from keyed noise."""

    run: Word[Path]
    """The run's folder."""
    prompts: str | None = None
    """A prompt file; the run's held-out prompts if not given."""
    suite: str | None = None
    """A prompt set with its own rewards instead: see `flowrl suites`."""
    weights: str = "last"
    """last, best, base, or a folder: an adapter's, or one of RUN/checkpoints."""
    rewards: tuple[str, ...] = ()
    """Names, or YAML such as '{name: shapes, kind: strict, iou: 0.85}'; the run's if not given."""
    samples: int | None = None
    steps: int | None = None
    seed: int | None = None
    out: Path | None = None
    """Also write the scores of every sample as JSON lines."""


@dataclass
class PlanArguments:
    """Say what an iteration of a run does and what it costs, without loading weights."""

    config: Word[Path]
    svg: Path | None = None
    """Draw the plan's tree into this file."""
    iteration: int = 0
    memory: str | None = None
    """What it should fit into, as 24GiB; the visible GPU's if not given."""
