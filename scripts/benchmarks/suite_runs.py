"""Measurements of the benchmark suites: iterations of opened runs, and the floor below them."""

import inspect
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from torch import nn
from torch.utils._pytree import tree_map

from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.paths import PROJECT
from flowrl.run import session as sessions
from flowrl.run.alarms import Alarms
from flowrl.run.checkpoint import Progress
from flowrl.run.session import Session, open_accelerator, open_session
from flowrl.run.train import iterate
from flowrl.settings.inherit import merged
from flowrl.settings.read import run_from
from rewards import Samples, score_all

QUIET = {"train": {"iterations": 1000, "alarms": "off", "self_test": "off"}}


def settings_of(config: str, *changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a file of the project with changes."""
    tree: dict[str, Any] = yaml.safe_load((PROJECT / config).read_text())
    for change in (*changes, QUIET):
        tree = merged(tree, change)
    return tree


@dataclass
class Opened:
    """An opened run whose iterations are timed, in CPU seconds of this process."""

    session: Session
    progress: Progress = field(default_factory=Progress)
    alarms: Alarms = field(default_factory=Alarms)
    metrics: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, tree: dict[str, Any], folder: Path) -> "Opened":
        """Open a run and do an iteration that is not counted."""
        run = run_from(tree, "suites")
        folder.mkdir(parents=True, exist_ok=True)
        kept = cls(open_session(run, folder, open_accelerator(run, folder)))
        kept.turn()
        return kept

    def turn(self) -> float:
        self.metrics.append(iterate(self.session, self.progress, self.alarms))
        return self.metrics[-1]["seconds/cpu"]


@dataclass
class Call:
    """A call of a network with its inputs, to be made again."""

    module: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    graded: bool

    @property
    def rows(self) -> int:
        args, named = self.given
        values = (*args, *named.values())
        return next(len(v) for v in values if isinstance(v, torch.Tensor) and v.ndim > 0)

    def again(self) -> None:
        with torch.set_grad_enabled(self.graded):
            args, named = self.given
            out = self.module(*args, **named)
            if self.graded:
                first = out[0] if isinstance(out, tuple) else next(iter(out.values()))
                first.float().square().mean().backward()


@dataclass
class Floor:
    """A plain loop of the evaluations of one iteration: the same inputs, rows and batch sizes."""

    calls: list[Call] = field(default_factory=list)
    scored: list[tuple[Any, Samples]] = field(default_factory=list)

    @classmethod
    def of(cls, kept: Opened) -> "Floor":
        """Record an iteration: calls of its networks' `forward`, and of its rewards."""
        found = cls()
        policy = kept.session.learner.policy
        networks = list(policy.roots().values())
        if isinstance(policy, PipelinePolicy):
            encoders = [m for n, m in policy.pipe.components.items() if n.startswith("text_enc")]
            networks += [*filter(None, encoders), policy.pipe.vae.decoder]
        with ExitStack() as patches:
            patches.enter_context(patch.object(sessions, "score_all", found._score))
            for module in networks:
                patches.enter_context(patch.object(module, "forward", found._kept(module)))
            kept.turn()
        return found

    def _kept(self, module: nn.Module) -> Callable[..., Any]:
        """The module's `forward`, which also keeps its inputs."""
        forward = module.forward

        def plain(value: Any) -> Any:
            return value.detach().clone() if isinstance(value, torch.Tensor) else value

        def keeping(*args: Any, **named: Any) -> Any:
            given = tree_map(plain, args), tree_map(plain, named)
            self.calls.append(Call(module, given, torch.is_grad_enabled()))
            return forward(*args, **named)

        keeping.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        return keeping

    def _score(self, rewards: Any, samples: Samples) -> Any:
        self.scored.append((rewards, samples))
        return score_all(rewards, samples)

    @property
    def rows(self) -> dict[str, int]:
        """Rows of all calls, without gradients and with."""
        total = {"frozen": 0, "graded": 0}
        for call in self.calls:
            total["graded" if call.graded else "frozen"] += call.rows
        return total

    def turn(self) -> float:
        began = time.process_time()
        for call in self.calls:
            call.again()
        for rewards, samples in self.scored:
            score_all(rewards, samples)
        seconds = time.process_time() - began
        for call in self.calls:
            call.module.zero_grad(set_to_none=True)
        return seconds


def by_turns(arms: Mapping[str, Any], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each arm's turns; the arms take turns."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            found[name].append(arm.turn())
    return found


def beside(
    tree: dict[str, Any], changes: Mapping[str, Mapping[str, Any]], repeats: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Seconds of a run's iterations with each of the changes, by turns, and their last metrics."""
    with tempfile.TemporaryDirectory() as name:
        arms = {
            arm: Opened.of(merged(tree, change), Path(name) / str(place))
            for place, (arm, change) in enumerate(changes.items())
        }
        found = by_turns(arms, repeats)
    return found, {arm: kept.metrics[-1] for arm, kept in arms.items()}


def power_law(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, list[float]]:
    """The exponent of a least-squares fit seconds = a size^p, and the exponent of each step."""
    x, y = [math.log(n) for n in sizes], [math.log(s) for s in seconds]
    slope = statistics.linear_regression(x, y).slope
    steps = [(y[i + 1] - y[i]) / (x[i + 1] - x[i]) for i in range(len(x) - 1)]
    return slope, steps
