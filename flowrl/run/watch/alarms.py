"""Alarms: signs in a run's metrics of collapse, reward hacking or lost scores.

docs/alarms.md has the reasons and the remedies, docs/results/alarms.md the test runs.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pvariance
from typing import Any, NamedTuple

from flowrl.iteration.credit import failed_share
from flowrl.run.watch.ranges import Range
from flowrl.settings.words.scores import is_trained

Metrics = Mapping[str, float]
DIVERSITY = ("image/diversity", "sound/diversity", "text/distinct")
LOOKS = ("image/brightness", "image/saturation", "image/edges", "image/entropy", "image/diversity")
STATISTICS = (*LOOKS, "sound/diversity", "text/distinct", "text/length", "text/stopped")
_KEPT = ("reward", "reward_std", "unscored_share", *STATISTICS)
_ERROR = "held_out_gain_error/"
_ITERATION = "iteration"
_FIRST, _SECOND = "/unread_first", "/unread_second"


class Unclear(str):
    """A clause about samples that change without a judge that could tell whether they improve."""


class Sign(NamedTuple):
    name: str  # each is raised once
    text: str  # a clause


@dataclass(frozen=True)
class Thresholds:
    window: int = 5  # iterations over which training metrics are averaged
    fall: float = 0.15  # of a held-out score, in standard deviations of the samples
    errors: float = 3.0  # the same fall, in standard errors of the paired difference
    slip: float = 0.1  # the first, where the training reward rises
    slip_errors: float = 3.0  # the second, likewise
    rise: float = 0.3  # of the training reward, in its spreads at the start
    gain: float = 2.0  # standard errors of a held-out gain that excuses changed statistics
    shift: float = 0.75  # of a statistic, in standard deviations of the base's samples
    shifted: int = 2  # statistics that have to shift
    speed: float = 0.09  # of an image's statistics on average, in such spreads per iteration
    speed_errors: float = 2.0  # the same change, in standard errors of a held-out score
    change: float = 0.5  # relative, of a training statistic in a run without held-out prompts
    alike: float = 0.6  # of the diversity at the start
    stopped: float = 0.5  # of the share of texts that ended by themselves at the start
    reward_fall: float = 0.33  # below its best, in spreads of the start
    unscored: float = 0.1  # share of samples
    unread: int = 8  # verdicts of a judge in an iteration
    one_winner: float = 0.9  # share of them
    silent: int = 10  # iterations in a row whose data teaches nothing


class Gain(NamedTuple):
    """A held-out score compared with the base model's."""

    name: str
    base: float
    now: float
    size: float  # in standard deviations of the samples, the larger of the base's and today's
    errors: float  # in standard errors of the paired difference
    error: float  # that standard error, in the same standard deviations


@dataclass
class Alarms:
    """Compares evaluations with the base model's, and training with its beginning and its best
    state.

    The state is plain numbers, for checkpoints.
    """

    at: Thresholds = Thresholds()
    base: dict[str, float] = field(default_factory=dict)  # the first evaluation
    last: dict[str, float] = field(default_factory=dict)  # the last one, and its iteration
    start: list[dict[str, float]] = field(default_factory=list)  # the first iterations
    recent: list[dict[str, float]] = field(default_factory=list)  # the last ones
    best: list[float] = field(default_factory=list)  # rewards of the window with the highest mean
    raised: list[str] = field(default_factory=list)
    flat: dict[str, int] = field(default_factory=dict)  # iterations in a row without any spread
    outside: dict[str, int] = field(default_factory=dict)  # of a metric outside of its range

    def silent(self, metrics: Metrics, models: Collection[str]) -> list[str]:
        """Names of models whose data has taught nothing for `silent` iterations in a row. Each is
        returned again after as many."""
        silent_models: list[str] = []
        for model in models:
            prefix = f"{model}/" if model else ""
            signal = metrics.get(f"{prefix}signal", metrics.get(f"{prefix}grad_norm", 1.0))
            key = f"{prefix}silent"
            self.outside[key] = self.outside.get(key, 0) + 1 if signal == 0 else 0
            if self.outside[key] and self.outside[key] % self.at.silent == 0:
                silent_models.append(model)
        return silent_models

    def ranges(
        self, metrics: Metrics, ranges: Mapping[str, Range], models: Collection[str]
    ) -> list[str]:
        """A clause for each metric of a model that is outside of its healthy range for too many
        iterations in a row."""
        signs: list[Sign] = []
        for name in (f"{model}/{name}" if model else name for model in models for name in ranges):
            value = metrics.get(name, math.nan)
            if math.isnan(value):
                continue
            healthy = ranges[name if name in ranges else name.partition("/")[2]]
            out = not healthy.low <= value <= healthy.high
            self.outside[name] = self.outside.get(name, 0) + 1 if out else 0
            if self.outside[name] >= healthy.patience:
                text = f"{name} is {value:.3g}, healthy is {healthy.words}: {healthy.remedy}"
                signs.append(Sign(f"range/{name}", text))
        return self._new(signs)

    def unread(self, metrics: Metrics) -> list[str]:
        """A clause for each judge whose unread verdicts are of one winner."""
        signs: list[Sign] = []
        for key in metrics:
            judge = key.removesuffix(_FIRST)
            if judge == key and not key.endswith(_SECOND):
                continue
            judge = judge.removesuffix(_SECOND)
            counts = [metrics.get(f"{judge}{end}", 0.0) for end in (_FIRST, _SECOND)]
            if sum(counts) >= self.at.unread and max(counts) >= self.at.one_winner * sum(counts):
                place = ("first", "second")[counts[1] > counts[0]]
                text = (
                    f"{max(counts):.0f} of {sum(counts):.0f} unread verdicts of "
                    f"{judge.removeprefix('calls/')} are for the sample that is shown {place}"
                )
                signs.append(Sign(f"{judge}/unread", text))
        return self._new(signs)

    def constant(self, metrics: Metrics) -> list[str]:
        """Names of rewards with a constant score for `window` iterations; each is returned once.

        Reads `reward_std/NAME` and `reward/NAME`.
        """
        names = []
        for key, spread in metrics.items():
            name = key.removeprefix("reward_std/")
            if name == key:
                continue
            none = spread <= 1e-9 * max(1.0, abs(metrics[f"reward/{name}"]))
            self.flat[name] = self.flat.get(name, 0) + 1 if none else 0
            if self.flat[name] >= self.at.window and key not in self.raised:
                self.raised.append(key)
                names.append(name)
        return names

    def unscored(self, metrics: Metrics) -> list[str]:
        """A clause for the alarm if rewards that apply left too many samples of the window's
        iterations unscored. The current iteration counts too: `watch` adds it to `recent` later."""
        shares = [row["unscored_share"] for row in self.recent[1 - self.at.window :]]
        share = fmean([*shares, failed_share(metrics)])
        if share <= self.at.unscored:
            return []
        return self._new([Sign("unscored", f"{100 * share:.0f} % of the samples have no score")])

    def unapplied(self, metrics: Metrics) -> list[str]:
        """A clause about samples to which no reward applies, once in a run."""
        share = metrics.get("abstained_share", 0.0)
        if share == 0:
            return []
        text = f"no reward applies to {100 * share:.0f} % of the samples"
        return self._new([Sign("abstained", text)])

    def watch(self, metrics: Metrics, iteration: int) -> list[str]:
        """Add an iteration of training; returns new signs, each as a clause.

        Returns nothing if all samples are given, since there is no reward to compare.
        """
        if "reward" not in metrics:
            return []
        row = {name: metrics[name] for name in _KEPT if name in metrics}
        row["unscored_share"] = failed_share(metrics)
        self.start = [*self.start, row][: self.at.window]
        self.recent = [*self.recent, row][-self.at.window :]
        if len(self.recent) < self.at.window:
            return []
        rewards = [row["reward"] for row in self.recent]
        if not self.best or fmean(rewards) > fmean(self.best):
            self.best = rewards
        fall = [] if self._just_gained(iteration) else self._reward_fall(rewards)
        return self._new([*fall, *self._training_shifts()])

    def compare(
        self, metrics: Metrics, iteration: int, judges: Collection[str] | None = None
    ) -> list[str]:
        """Add an evaluation and compare it with the first and the previous one; returns new signs
        as clauses.

        `judges` are the held-out rewards that are not trained on; None: all held-out rewards. If a
        judge's score rises, changed samples raise no sign. A rising training reward proves nothing,
        since a hacked reward rises too: without another judge, such changes are `Unclear`.
        """
        current = {name: value for name, value in metrics.items() if name.startswith("held_out")}
        if not current:  # a run without held-out prompts
            return []
        before, self.last = self.last, current | {_ITERATION: float(iteration)}
        if not self.base:
            self.base = current
            return []
        gains = [self._gain(name, current) for name in self._judges(current)]
        signs = [sign for gain in gains for sign in self._fall(gain)]
        risen = {gain.name for gain in gains if gain.errors > self.at.gain}
        judged = {gain.name for gain in gains if judges is None or gain.name in judges}
        if not risen & judged:
            changes = [*self._shifts(current), *self._speed(before, gains)]
            signs += [_changed(sign, bool(risen), bool(judged)) for sign in changes]
        return self._new(signs + self._alike(_unprefixed(self.base), _unprefixed(current)))

    def _new(self, signs: Sequence[Sign]) -> list[str]:
        fresh = [sign for sign in signs if sign.name not in self.raised]
        self.raised += [sign.name for sign in fresh]
        return [sign.text for sign in fresh]

    def _judges(self, current: Metrics) -> list[str]:
        """Held-out rewards that also scored the base; a resumed run may have others. A training
        reward that is measured beside them is none of them."""
        names = [name.removeprefix(_ERROR) for name in current if name.startswith(_ERROR)]
        in_base = [name for name in names if f"held_out_std/{name}" in self.base]
        return [name for name in in_base if not is_trained(name)]

    def _gain(self, name: str, current: Metrics) -> Gain:
        key, std = f"held_out/{name}", f"held_out_std/{name}"
        gain, spread = current[key] - self.base[key], max(self.base[std], current[std])
        error = current[_ERROR + name]
        size, errors = _ratio(gain, spread), _ratio(gain, error)
        return Gain(name, self.base[key], current[key], size, errors, _ratio(error, spread))

    def _just_gained(self, iteration: int) -> bool:
        """Whether a held-out score was above the base's within the last `window` iterations. A plan
        that changes during the run, like a moving window, changes the scores of training
        samples."""
        if not self.last or iteration - self.last[_ITERATION] > self.at.window:
            return False
        return any(self._gain(name, self.last).size > 0 for name in self._judges(self.last))

    def _fall(self, gain: Gain) -> list[Sign]:
        at = self.at
        text = f"the held-out score {gain.name} fell from {gain.base:.3f} to {gain.now:.3f}"
        if gain.size < -at.fall and gain.errors < -at.errors:
            return [Sign(f"held_out/{gain.name}", text)]
        if gain.size < -at.slip and gain.errors < -at.slip_errors and self._rises():
            return [Sign(f"held_out/{gain.name}", f"the reward rises, but {text}")]
        return []

    def _rises(self) -> bool:
        if not self.start:
            return False
        first, last = _means(self.start), _means(self.recent)
        return last["reward"] - first["reward"] > self.at.rise * first["reward_std"]

    def _shifts(self, current: Metrics) -> list[Sign]:
        """Statistics of held-out samples that differ from the base's."""
        shifted = []
        for name in STATISTICS:
            key, spread = f"held_out/{name}", self.base.get(f"held_out_std/{name}")
            if spread and abs(current[key] - self.base[key]) > self.at.shift * spread:
                shifted.append(f"{name} went from {self.base[key]:.3f} to {current[key]:.3f}")
        if len(shifted) < self.at.shifted:
            return []
        return [Sign("shifts", ", ".join(shifted))]

    def _speed(self, before: Metrics, gains: Sequence[Gain]) -> list[Sign]:
        """Statistics of held-out images that have changed quickly since the evaluation `before`."""
        changes = [
            abs(self.last[f"held_out/{name}"] - before[f"held_out/{name}"]) / spread
            for name in LOOKS
            if (spread := self.base.get(f"held_out_std/{name}"))
        ]
        iterations = self.last[_ITERATION] - before[_ITERATION]
        # the first step of Adam is as long as its learning rate, whatever the gradient
        pace = self.at.speed * max(2, iterations)
        # few samples move by chance; the scores' paired differences say by how much
        noise = self.at.speed_errors * max((gain.error for gain in gains), default=0.0)
        if not changes or fmean(changes) <= max(pace, noise):
            return []
        share = 100 * fmean(changes) / iterations
        return [Sign("speed", f"images change by {share:.0f} % of their spread per iteration")]

    def _training_shifts(self) -> list[Sign]:
        if self.base:  # evaluations are compared instead: a plan may move over the run
            return []
        first, last = _means(self.start), _means(self.recent)
        signs = self._alike(first, last)
        shifted = [
            f"{name} went from {first[name]:.3f} to {last[name]:.3f}"
            for name in STATISTICS
            if name in first and abs(last[name] - first[name]) > self.at.change * abs(first[name])
        ]
        if len(shifted) < self.at.shifted:
            return signs
        return [*signs, Sign("shifts", f"the samples have changed: {', '.join(shifted)}")]

    def _alike(self, first: Metrics, last: Metrics) -> list[Sign]:
        """Signs that the samples of a group become alike, or that texts no longer end by
        themselves."""
        least = dict.fromkeys(DIVERSITY, self.at.alike) | {"text/stopped": self.at.stopped}
        return [
            Sign(name, f"{name} fell from {first[name]:.3f} to {last[name]:.3f}")
            for name, share in least.items()
            if name in first and last[name] < share * first[name]
        ]

    def _reward_fall(self, rewards: Sequence[float]) -> list[Sign]:
        best, mean, spread = fmean(self.best), fmean(rewards), _means(self.start)["reward_std"]
        error = math.sqrt((pvariance(rewards) + pvariance(self.best)) / len(rewards))
        if best - mean <= max(self.at.reward_fall * spread, self.at.errors * error):
            return []
        return [Sign("reward", f"the reward fell from {best:.3f} to {mean:.3f}")]

    def smallest_fall(self, name: str, samples: int) -> tuple[float, float]:
        """The smallest fall of a held-out score that can raise an alarm, and the one that does
        whatever its noise: if the samples' changes are independent of the base's scores, the paired
        difference has sqrt(2 / samples) of their spread as its standard error."""
        spread = self.base[f"held_out_std/{name}"]
        least = self.at.fall * spread
        return least, max(least, self.at.errors * spread * math.sqrt(2 / samples))

    def forget(self, concerns: Callable[[str], bool]) -> None:
        """Drop held-out scores and statistics, by name, with which later evaluations cannot be
        compared."""
        for place in (self.base, self.last):
            for key in [key for key in place if concerns(key.partition("/")[2])]:
                del place[key]
        names = (name.removeprefix("held_out/") for name in self.raised)
        self.raised = [
            sign for sign, name in zip(self.raised, names, strict=True) if not concerns(name)
        ]
        if not self.base:
            self.last = {}

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "at"}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore a checkpoint's state; False, without effect, for the state of an older
        version."""
        if state.keys() != self.state().keys():
            return False
        for name, value in state.items():
            setattr(self, name, value)
        return True

    def check(self, iteration: int) -> None:
        """ValueError for a state after `iteration` with inconsistent parts."""
        if len({frozenset(row) for row in (*self.start, *self.recent)}) > 1:
            raise ValueError("state.json: alarms has iterations with different statistics")
        for name in self.base:
            if name.startswith("held_out_std/") and _held_out(name) not in self.base:
                raise ValueError(f"state.json: alarms.base has {name} without a score")
            if name.removeprefix("held_out_std/") in LOOKS and _held_out(name) not in self.last:
                raise ValueError(f"state.json: alarms.last has no {_held_out(name)}")
        if self.base and not 0 <= self.last.get(_ITERATION, -1) <= iteration:
            raise ValueError(
                "state.json: alarms.last needs an iteration from 0 to the checkpoint's"
            )


def _changed(sign: Sign, risen: bool, judged: bool) -> Sign:
    """A sign of changed samples. `risen`: a training reward rises; `judged`: another reward judges
    the samples and does not rise."""
    if risen and not judged:
        return Sign(f"unclear/{sign.name}", Unclear(sign.text))
    subject = "held-out scores that are not trained on" if risen else "held-out scores"
    return Sign(sign.name, f"{subject} do not rise, and {sign.text}")


def _held_out(std: str) -> str:
    return std.replace("held_out_std/", "held_out/", 1)


def _unprefixed(held_out: Metrics) -> dict[str, float]:
    return {name.removeprefix("held_out/"): value for name, value in held_out.items()}


def _ratio(number: float, base: float) -> float:
    if base > 0:
        return number / base
    return math.copysign(math.inf, number) if number else 0.0


def _means(rows: Sequence[Metrics]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in rows[0]}
