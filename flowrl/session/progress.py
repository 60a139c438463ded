"""Counters and results of a run, and earlier scores that a resumed run cannot compare with its own.

A gain over the base, the best weights and the alarms of held-out scores compare evaluations of the
same prompts, noise and rewards. Their settings may change before a resume; then the next evaluation
replaces the base's, for the affected rewards.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import rewards
from flowrl.errors import UserError
from flowrl.session.start_record import StartRecord, files_named, prompt_digests, source_digests
from flowrl.settings import RewardSpec, RunSettings
from flowrl.settings.read import dump, run_from
from rewards.rules import changed_rules

EVALUATE = ("temperature", "call", "samples", "per_prompt", "success", "seed")
MODEL = ("height", "width", "call", "sigmas", "system", "stop", "environment", "steps")


@dataclass(frozen=True)
class Incomparable:
    """Scores before a checkpoint with which later evaluations cannot be compared.

    every   all scores and statistics: prompts, noise or samples have changed
    labels  of held-out rewards that were removed or have changed
    best    whether the score that decides on the best weights is among them
    """

    every: bool = False
    labels: frozenset[str] = frozenset()
    best: bool = False

    @classmethod
    def of(cls, run: RunSettings, checkpoint: Path) -> "Incomparable":
        """Compare a run's settings and files with the record of a checkpoint, if there is one."""
        before = StartRecord.read(checkpoint)
        if before is None:
            return cls()
        try:
            old = run_from(before.settings, "checkpoint")
        except UserError:  # settings of parts that are gone
            return cls(every=True, best=True)
        held_out = dict(prompt_digests(run)).get("prompts.held_out")
        digest_before = before.prompts.get("prompts.held_out")
        if _trial(old) != _trial(run) or (
            None not in (held_out, digest_before) and held_out != digest_before
        ):
            return cls(every=True, best=True)
        changed = {n for n, d in source_digests(run).items() if before.sources.get(n, d) != d}
        now = {spec.label: spec for spec in (*run.judges, *run.trained_beside)}
        labels = frozenset(
            spec.label
            for spec in (*old.judges, *old.trained_beside)
            if _scoring(spec) != _scoring(now.get(spec.label))
            or changed & {*_sources(spec)}
            or any(changed_rules(spec.name, spec.settings, before.reward_rules))
        )
        best = _deciding(old)
        return cls(labels=labels, best=best != _deciding(run) or best in labels)

    def __str__(self) -> str:
        if self.every:
            return (
                "the evaluation has changed: later scores are compared with the next evaluation's"
            )
        if self.labels:
            names = ", ".join(sorted(self.labels))
            return f"the held-out rewards {names} have changed: their earlier scores are dropped"
        return (
            "another held-out reward decides on the best weights: the next evaluated weights "
            "count as the best"
        )

    def __bool__(self) -> bool:
        return self.every or bool(self.labels) or self.best

    def concerns(self, name: str) -> bool:
        """Whether a score, an attempt (`pass@4/NAME`) or a statistic cannot be compared."""
        return self.every or name in self.labels or name.partition("/")[2] in self.labels


@dataclass
class Progress:
    """Counters and results of a run, which every checkpoint stores."""

    iteration: int = 0  # iterations done
    optimizer_steps: int = 0
    skipped_in_a_row: int = 0  # optimizer steps without a finite gradient
    named_skipped: dict[str, int] = field(default_factory=dict)  # the same, of models with a name
    refreshed: dict[str, int] = field(default_factory=dict)  # iteration of each average's last time
    seconds: float = 0.0
    samples: float = 0.0  # given to rewards
    goal: tuple[str, float] | None = None  # held-out score that ends the run, and what is enough
    reached: int = 0  # evaluations in a row that reached it
    best: float | None = None
    best_iteration: int | None = None
    first: dict[str, float] | None = None  # the base's evaluation
    last: dict[str, float] | None = None
    base_scores: dict[str, list[float]] | None = None  # of each sample of the base's evaluation
    stopped: bool = False  # by a callback; a resume goes on

    @contextmanager
    def as_of(self, then: "Progress") -> Iterator[None]:
        """Have the counters of an earlier iteration inside; scores that are found there stay."""
        counters = ("iteration", "optimizer_steps", "skipped_in_a_row", "named_skipped")
        counters += ("refreshed", "seconds", "samples")
        now = {name: getattr(self, name) for name in counters}
        vars(self).update({name: getattr(then, name) for name in counters})
        try:
            yield
        finally:
            vars(self).update(now)

    def copy(self) -> "Progress":
        return replace(self, named_skipped=dict(self.named_skipped))

    def count_skipped(self, model: str, norm: float, scale: float) -> int:
        """Count an optimizer step of a model. Returns the number of consecutive steps that it has
        skipped, including this one. An overflow at a loss scale above 1 does not count, since the
        scale is lowered instead."""
        before = self.named_skipped.get(model, 0) if model else self.skipped_in_a_row
        skipped = 0 if math.isfinite(norm) else before + (scale <= 1)
        if model:
            self.named_skipped[model] = skipped
        else:
            self.skipped_in_a_row = skipped
        return skipped

    def forget(self, old: Incomparable) -> None:
        """Drop scores with which later evaluations cannot be compared."""
        for name in ("first", "last", "base_scores"):
            values = getattr(self, name) or {}
            comparable = {key: value for key, value in values.items() if not old.concerns(key)}
            setattr(self, name, comparable or None)
        if old.best:
            self.best = self.best_iteration = None


def _trial(run: RunSettings) -> tuple[Any, ...]:
    """All settings that an evaluation's samples depend on, besides the weights."""
    e, tree = run.evaluate, dump(run)
    settings = [getattr(e, name) for name in EVALUATE]
    model = [tree["model"].get(name) for name in MODEL]  # kinds of models lack some
    prompts = tree["prompts"]["held_out"], run.prompts.column
    return (
        run.evaluation_steps,
        run.evaluation_guidance,
        run.evaluation_size,
        settings,
        model,
        prompts,
    )


def _scoring(spec: RewardSpec | None) -> tuple[str, dict[str, Any], tuple[str, ...]] | None:
    return None if spec is None else (spec.name, spec.settings, spec.sets)


def _sources(spec: RewardSpec) -> Iterator[str]:
    """The user's files of a reward. Flowrl's own files are covered by its version."""
    our_folder = Path(rewards.__file__).parent
    named = files_named([spec.name, spec.settings])
    return (name for name, path in named if not path.is_relative_to(our_folder))


def _deciding(run: RunSettings) -> str:
    return run.checkpoint.best or run.judges[0].label


def deciding(run: RunSettings, first: Mapping[str, float]) -> str:
    """The held-out reward that decides which weights are the best: `checkpoint.best`, or the first
    one that applies to a sample of the first evaluation, whose means by reward are `first`."""
    labels = [spec.label for spec in run.judges]
    applying = (label for label in labels if label in first)
    return run.checkpoint.best or next(applying, labels[0])
