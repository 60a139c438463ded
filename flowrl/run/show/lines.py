"""Show a run on the terminal: as a live panel, or a line per iteration."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console

from flowrl.algorithm import Algorithm
from flowrl.iteration.records import Iteration
from flowrl.run.evaluate.evaluate import Evaluated
from flowrl.run.show.footer import Footer, suits
from flowrl.run.show.observer import Observer
from flowrl.run.show.panel import (
    HEIGHT,
    MOST_REWARDS,
    HeldOutScore,
    PanelFacts,
    panel_lines,
    without_reward,
)
from flowrl.session.progress import Progress, deciding
from flowrl.session.record import Terminal, clock
from flowrl.session.session import Session
from flowrl.settings import RunSettings
from flowrl.settings.words.scores import shown_score

TREND = (
    "+ - = after a reward: it rose, fell or stayed (by less than 5 % of the spread) over the last "
    "ten iterations"
)


class Lines:
    """Shows a run of `iterations` as one line per iteration, or as a live panel."""

    def __init__(self, terminal: Terminal, iterations: int) -> None:
        self.terminal, self.iterations = terminal, iterations
        self.rewards: list[float] = []
        self.explained = False
        self.facts: PanelFacts | None = None  # while the panel is drawn

    @contextmanager
    def panel(self, facts: PanelFacts, device: str) -> Iterator[None]:
        """Draw a live panel instead of a line per iteration, if standard output is a terminal.

        All other output scrolls above it. The last iteration's line remains on the terminal.
        """
        if not self.terminal.loud or not suits(sys.stdout, HEIGHT):
            yield
            return
        self.facts, self.line = facts, ""
        console = Console(file=sys.stdout, force_terminal=True)

        def lines(width: int) -> list[str]:
            return panel_lines(self.facts or facts, device, width, console)

        footer = Footer(sys.stdout.fileno(), HEIGHT, lines)
        footer.open()
        try:
            yield
        finally:
            footer.close()
            self.facts = None
            if self.line:
                self.terminal.say(self.line)

    def held_out(self, scores: tuple[HeldOutScore, ...]) -> None:
        """Show an evaluation on the panel."""
        if self.facts is not None:
            self.facts = replace(self.facts, held_out=scores)

    def iteration(self, number: int, m: Mapping[str, float], elapsed: float) -> None:
        """Show the reward with its trend, the update's metrics, elapsed and remaining time.

        `elapsed`: seconds of all iterations so far.
        """
        trend = " "
        if "reward" in m:  # without one all samples are given
            self.rewards = [*self.rewards, m["reward"]][-MOST_REWARDS:]
            trend = self._trend(m["reward_std"])
        line = self._line(number, m, elapsed, trend)
        if self.facts is None:
            self.terminal.say(line)
            return
        self.line = line
        rewards = tuple(self.rewards)
        facts = {"done": number, "metrics": dict(m), "rewards": rewards, "trend": trend}
        self.facts = replace(self.facts, **facts, elapsed=elapsed, at=time.monotonic())

    def _trend(self, spread: float) -> str:
        recent = self.rewards[-10:]
        half = len(recent) // 2
        if half < 2:
            return " "
        if not self.explained:
            self.terminal.say(TREND)
            self.explained = True
        older, newer = recent[:half], recent[half:]
        change = sum(newer) / len(newer) - sum(older) / len(older)
        return "=" if abs(change) < 0.05 * spread else ("+" if change > 0 else "-")

    def _line(self, number: int, m: Mapping[str, float], elapsed: float, trend: str) -> str:
        remaining = elapsed / number * (self.iterations - number)
        parts = [
            f"{number:>4}/{self.iterations}",
            f"reward {m['reward']:.3f} {trend} (spread {m['reward_std']:.2f})"
            if "reward" in m
            else without_reward(m),
        ]
        if "ratio" in m:
            clipped = m.get("clipped_low", 0.0) + m.get("clipped_high", 0.0)
            parts.append(f"ratio {m['ratio']:.4f} clipped {100 * clipped:.0f}%")
        if "kl" in m:
            parts.append(f"kl {m['kl']:.2g}")
        parts.append(f"grad {m['grad_norm']:.2g}")
        parts.append(f"{m['seconds']:.1f} s, {clock(elapsed)} so far, {clock(remaining)} left")
        return "  ".join(parts)


class TerminalObserver(Observer):
    """Shows a run on the main process's terminal. `track.panel` allows the panel."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self.session, self.progress = session, progress
        self.lines = Lines(session.terminal, session.run.train.iterations)

    @contextmanager
    def during(self) -> Iterator[None]:
        if not self.session.run.track.panel:
            yield
            return
        facts = panel_facts(self.session, self.progress)
        with self.lines.panel(facts, self.session.parallel.device):
            yield

    def on_iteration(self, iteration: Iteration) -> None:
        self.lines.iteration(iteration.number, iteration.metrics, self.progress.seconds)

    def on_evaluation(self, evaluation: Evaluated) -> None:
        result, progress = evaluation.result, self.progress
        base = {} if progress.last is progress.first else progress.first or {}
        scores = ", ".join(
            f"{shown_score(n)} {result.metrics[n]:.3f}"
            + (f" ({result.metrics[n] - base[n]:+.3f})" if n in base else "")
            for n in result.scores.names
            if n in result.metrics
        )
        than = " (against the base)" if base else ""
        self.session.terminal.say(f"held-out after {progress.iteration}{than}: {scores}")
        self.lines.held_out(held_out_scores(self.session, progress))


def panel_facts(session: Session, progress: Progress) -> PanelFacts:
    """The panel of a run that starts or resumes."""
    return PanelFacts(
        name=session.folder.name,
        recipe=session.run.recipe.name,  # type: ignore[attr-defined]
        iterations=session.run.train.iterations,
        done=progress.iteration,
        held_out=held_out_scores(session, progress),
        on_policy=on_policy(session.run, session.algorithm),
        elapsed=progress.seconds,
    )


def on_policy(run: RunSettings, algorithm: Algorithm) -> bool:
    """Whether each row is trained on once, by the policy that sampled it."""
    elsewhere = run.server is not None or run.engine is not None
    samples_itself = algorithm.behaviour == "current" and not elsewhere and run.workers.lag == 0
    return samples_itself and run.train.optimizer_steps == 1 and not run.budget.replay


def held_out_scores(session: Session, progress: Progress) -> tuple[HeldOutScore, ...]:
    """Scores of the last evaluation for the panel; the deciding reward also has its best score."""
    if progress.first is None or progress.last is None:
        return ()
    specs = (*session.run.judges, *session.run.trained_beside)
    key = deciding(session.run, progress.first)
    base = progress.first if progress.last is not progress.first else {}
    scores = {
        name: HeldOutScore(shown_score(name), progress.last[name], base.get(name))
        for name in [spec.label for spec in specs]
        if name in progress.last
    }
    if key in scores:
        best = {"best": progress.best, "best_iteration": progress.best_iteration}
        scores[key] = replace(scores[key], **best)
    return tuple(scores.values())
