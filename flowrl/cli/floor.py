"""The floor of an iteration's time: a plain loop of exactly its network and reward evaluations."""

import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from flowrl.iteration.open import open_stages
from flowrl.iteration.stages import Stages
from flowrl.models.adapters import adapter_switch
from flowrl.run.train import iterate
from flowrl.session.progress import Progress
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings import RunSettings
from rewards import Samples, score_all

CallCounts = Counter[tuple[str, int, bool]]  # calls by network, rows and gradients


def seconds_now(device: str) -> float:
    """CPU seconds of this process; on other devices wall-clock seconds, once the device has
    finished."""
    if device == "cpu":
        return time.process_time()
    (torch.mps if device == "mps" else torch.cuda).synchronize()
    return time.perf_counter()


@dataclass
class Opened:
    """An opened run whose iterations are timed. `samples` are the last iteration's; its other
    results are freed, since they would fill a GPU."""

    session: Session
    progress: Progress = field(default_factory=Progress)
    metrics: list[dict[str, float]] = field(default_factory=list)
    samples: Samples | None = None

    @classmethod
    def of(cls, run: RunSettings, folder: Path) -> "Opened":
        """Open a run and do one iteration that is not timed."""
        folder.mkdir(parents=True, exist_ok=True)
        opened = cls(open_session(run, folder, open_accelerator(run, folder)))
        opened.turn()
        return opened

    @cached_property
    def stages(self) -> Stages:
        """The stages of all iterations, as a run opens them: once."""
        return open_stages(self.session, self.progress)

    @property
    def device(self) -> str:
        return self.session.parallel.device

    def turn(self) -> float:
        """Run an iteration; return its seconds."""
        began = seconds_now(self.device)
        outcome = iterate(self.stages, self.progress)
        self.metrics.append(outcome.metrics)
        samples = outcome.scores.samples[0]
        self.samples = samples if isinstance(samples, Samples) else None
        return seconds_now(self.device) - began


@dataclass
class RecordedCall:
    """A network call with its inputs, which can be repeated."""

    name: str
    module: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    graded: bool
    start: bool  # by the start policy: adapters are off

    def again(self) -> float:
        """Repeat the call, with the backward pass if it has gradients; return the CPU seconds."""
        began = time.process_time()
        with torch.set_grad_enabled(self.graded):
            args, named = self.given
            out = self.module(*args, **named)
            if self.graded:
                first = out[0] if isinstance(out, tuple) else next(iter(out.values()))
                first.float().square().mean().backward()
        return time.process_time() - began


@dataclass
class Floor:
    """Two arms on the same networks, with calls counted by hooks: `iteration` always runs the same
    iteration, and `plain` repeats its calls in a loop. `scoring` is the time of the rewards in the
    last plain loop, in seconds. For runs with a single plan."""

    kept: Opened
    calls: list[RecordedCall] = field(default_factory=list)
    samples: Samples | None = None
    scoring: float = 0.0
    counts: CallCounts = field(default_factory=Counter)
    recording: bool = False
    a_call: list[float] = field(default_factory=list)  # seconds without gradients, of a denoiser

    @classmethod
    def of(cls, opened: Opened) -> "Floor":
        """Hook the networks of an opened run, and record one iteration."""
        floor = cls(opened)
        for name, module in floor.networks().items():
            module.register_forward_hook(floor.hook(name), with_kwargs=True)
        floor.recording = True
        floor.iteration()
        floor.recording = False
        floor.samples = opened.samples
        return floor

    def networks(self) -> dict[str, nn.Module]:
        """The denoisers, encoders and decoder of the run's pipeline."""
        policy: Any = self.kept.session.learner.policy
        parts = policy.pipe.components
        encoders = {n: m for n, m in parts.items() if n.startswith("text_enc") and m is not None}
        denoisers = {f"denoiser {name}": root for name, root in policy.roots().items()}
        return {**denoisers, **encoders, "decoder": policy.pipe.vae.decoder}

    def hook(self, name: str) -> Any:
        def called(module: nn.Module, args: Any, named: Any, _: Any) -> None:
            if "forward" in vars(module):
                return  # a stub stands for the network
            graded = torch.is_grad_enabled()
            values = (*args, *named.values())
            rows = next(len(v) for v in values if isinstance(v, torch.Tensor) and v.ndim > 0)
            self.counts[name, rows, graded] += 1
            if self.recording:
                start = self.kept.session.learner.policies.inside == "ref"
                passed = tree_map(_plain, (tuple(args), dict(named)))
                self.calls.append(RecordedCall(name, module, passed, graded, start))

        return called

    def iteration(self) -> float:
        """Run the same iteration again; return its seconds."""
        self.kept.progress.iteration = 1
        return self.kept.turn()

    def plain(self) -> float:
        """Repeat the recorded calls and score again; return the seconds."""
        began = seconds_now(self.kept.device)
        switch = adapter_switch(self.kept.session.learner.policy.roots().values())
        for call in self.calls:
            if call.start and switch is not None:
                switch(False)
            seconds = call.again()
            if call.start and switch is not None:
                switch(True)
            if call.name.startswith("denoiser") and not call.graded:
                self.a_call.append(seconds)
        for call in self.calls:
            call.module.zero_grad(set_to_none=True)
        called = seconds_now(self.kept.device)
        if self.samples is not None:
            score_all(self.kept.session.rewards, self.samples)
        ended = seconds_now(self.kept.device)
        self.scoring = ended - called
        return ended - began

    def by_turns(self, repeats: int) -> tuple[list[float], list[float]]:
        """Seconds of iterations and of the plain loop, measured in turns. AssertionError unless
        both make the same number of calls, with the same rows, with and without gradients."""
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats):
            seen: list[CallCounts] = []
            for seconds, arm in zip(times, (self.iteration, self.plain), strict=True):
                self.counts = Counter()
                seconds.append(arm())
                seen.append(self.counts)
            assert seen[0] == seen[1] and seen[0], (seen[0] - seen[1], seen[1] - seen[0])
        return times

    def rows(self, graded: bool) -> int:
        """Number of rows of the denoiser's calls in an iteration."""
        named = [call for call in self.counts if call[0].startswith("denoiser")]
        return sum(call[1] * self.counts[call] for call in named if call[2] is graded)

    @property
    def milliseconds(self) -> float:
        """Median time of a denoiser's call without gradients, in milliseconds."""
        return 1000 * statistics.median(self.a_call)


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
