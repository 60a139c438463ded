"""The curves of a run: which metrics share a chart, and which charts are shown first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flowrl.media.statistics import PREFIXES
from flowrl.pages.charts import Chart, Curve
from flowrl.pages.run_folder import RunFolder
from flowrl.settings.words.scores import TRAINED, is_trained, shown_score

NORMAL = 1.96  # standard errors of a 95 % interval
MOST_DECIDING = 8  # charts above the fold
TRAINING = 5  # the colour of training samples, beside held-out ones
PHASES = ("encode", "sample", "decode", "score", "ref", "update")
WAITS = ("waiting/sampling", "waiting/scoring", "sending")  # of training, with workers
OF_WORKERS, _AGE = "workers/seconds/", "workers/lag"
DIVERSITIES = ("image/diversity", "sound/diversity", "text/distinct")
STATISTIC_NAMES = {
    "image/brightness": ("Brightness", "0 to 1"),
    "image/saturation": ("Saturation", "0 to 1"),
    "image/edges": ("Share of pixels on edges", "0 to 1"),
    "image/entropy": ("Entropy of colours", "bits"),
    "image/diversity": ("Diversity within a prompt", "distance per pixel"),
    "sound/level": ("Level of the sound", "root mean square of full scale"),
    "sound/clipped": ("Share of numbers at full scale", "0 to 1"),
    "sound/crossings": ("Changes of sign", "per number"),
    "sound/diversity": ("Diversity within a prompt", "distance per number"),
    "image/surprise": ("Surprise of a token", "nats"),
    "text/length": ("Length", "tokens"),
    "text/stopped": ("Texts that end by themselves", "share"),
    "text/empty": ("Empty texts", "share"),
    "text/distinct": ("Texts of a prompt that differ", "share of pairs"),
    "text/surprise": ("Surprise of a token", "nats"),
    "text/turns": ("Turns", "turns"),
}
POLICY_NAMES = {
    "kl": ("KL divergence from the start", ""),
    "kl_sample": ("KL of a text, subtracted from its reward", "nats"),
    "entropy": ("Entropy of a token", "nats"),
    "grad_norm": ("Norm of the gradient", ""),
    "loss": ("Loss", ""),
    "policy_loss": ("Policy term of the loss", ""),
    "moved": ("Distance from the sampling policy", ""),
    "margin": ("Margin of the better sample", ""),
    "won": ("Pairs with a positive margin", "share"),
    "logp": ("Log-likelihood of samples", ""),
    "lr": ("Learning rate", ""),
}
_CLIPPED = {"clipped_low": "below", "clipped_high": "above", "clipped_dual": "dual"}
_RATIOS = {"ratio": "mean", "ratio_min": "lowest", "ratio_max": "highest"}
_TIMES = {"seconds": "Seconds per iteration", "seconds/cpu": "CPU seconds"}
_AFTER_REWARDS = (
    "reward", "kl", "kl_sample", *DIVERSITIES, "moved", "won", "clipped_low, clipped_high",
    "flat_groups", "text/length", "entropy", "seconds/PHASE", "grad_norm",
)  # fmt: skip


@dataclass(frozen=True)
class RunCharts:
    """Charts of a run: the most important charts, and the others by heading, for a collapsed
    section."""

    deciding: Sequence[Chart]
    others: Sequence[tuple[str, str, Sequence[Chart]]]  # heading, note, charts

    @classmethod
    def of(cls, run: RunFolder) -> "RunCharts":
        used: set[str] = set()
        sections = [
            ("Rewards", _REWARDS, list(_rewards(run, used))),
            ("Policy", _POLICY, list(_policy(run, used))),
            ("Diversity and statistics", _STATISTICS, list(_statistics(run, used))),
            ("Seconds", _SECONDS, list(_seconds(run, used))),
        ]
        rest = [_single(run, name, name, "") for name in run.names if name not in used]
        sections.append(("Other metrics", "", rest))
        groups = [
            (title, note, [c for c in charts if not c.empty]) for title, note, charts in sections
        ]
        deciding = _deciding(run, [chart for *_, charts in groups for chart in charts])
        folded = (
            (title, note, [c for c in charts if c not in deciding])
            for title, note, charts in groups
        )
        return cls(deciding, [section for section in folded if section[2]])

    @property
    def folded(self) -> int:
        return sum(len(charts) for *_, charts in self.others)


_REWARDS = "Means over the samples that the policy learns from, and their spread."
_POLICY = "The size of the updates, and the distance from the base."
_STATISTICS = "A diversity below 0.6 of its initial value is a collapse."
_SECONDS = "Wall-clock time of each iteration by phase, without evaluations and checkpoints."


def _deciding(run: RunFolder, all_charts: Sequence[Chart]) -> list[Chart]:
    """The charts of rewards, followed by the charts that show what their rise costs. Constant
    charts are only included for rewards."""
    names = dict.fromkeys([*run.held_out_scores, *_labels(run)])
    rewards = [chart for name in names for chart in all_charts if chart.code in _codes(name)]
    moving = {chart.code: chart for chart in reversed(all_charts) if not chart.constant}
    costs = [moving[code] for code in _AFTER_REWARDS if code in moving]
    return [*rewards, *costs][:MOST_DECIDING]


def _labels(run: RunFolder) -> list[str]:
    return [n.removeprefix("reward/") for n in run.names if n.startswith("reward/")]


def _codes(label: str) -> tuple[str, ...]:
    codes = f"held_out/{label}", f"reward/{label.removeprefix(TRAINED)}"
    return (*codes, ", ".join(codes))


def _single(run: RunFolder, name: str, title: str, unit: str) -> Chart:
    return Chart(title, [Curve(name, run.column(name))], name if title != name else "", unit)


def held_out_line(run: RunFolder, name: str, label: str) -> Curve:
    """A held-out score with an interval for its difference from the base."""
    points, errors = run.column(f"held_out/{name}"), dict(run.column(f"held_out_gain_error/{name}"))
    spans = [(y, NORMAL * errors.get(x, 0.0)) for x, y in points]
    return Curve(label, points, [(y - half, y + half) for y, half in spans], marks=True)


def _pair(run: RunFolder, held_out: Curve, name: str) -> list[Curve]:
    training = Curve("training samples", run.column(name), colour=TRAINING)
    return [line for line in (held_out, training) if line.points]


def _rewards(run: RunFolder, used: set[str]) -> Iterator[Chart]:
    """One chart per reward, with its held-out and its training scores."""
    labels = _labels(run)
    measured = run.held_out_scores
    beside = {name.removeprefix(TRAINED) for name in measured if is_trained(name)}
    for name in dict.fromkeys([*measured, *(label for label in labels if label not in beside)]):
        label = name.removeprefix(TRAINED)
        held_out = held_out_line(run, name, "held-out samples")
        judges_alone = name in beside  # a training reward of this name has other settings
        lines = [held_out] if judges_alone else _pair(run, held_out, f"reward/{label}")
        used.update(f"held_out{kind}/{name}" for kind in ("", "_std", "_gain_error"))
        used |= {f"reward/{label}", f"reward_std/{label}"}
        codes = [c for c in _codes(name)[: 1 if judges_alone else 2] if c in run.names]
        base = lines[0].points[0][1] if lines and lines[0].marks else None
        yield Chart(shown_score(name), lines, ", ".join(codes), base=base)
    total = run.column("reward")
    used |= {"reward", "reward_std"}
    if total and not (len(labels) == 1 and total == run.column(f"reward/{labels[0]}")):
        yield Chart("Weighted sum of the rewards", [Curve("mean", total)], "reward")
    spreads = [Curve("weighted sum", run.column("reward_std"))] if len(labels) != 1 else []
    spreads += [Curve(name, run.column(f"reward_std/{name}")) for name in labels]
    yield Chart("Spread over samples", spreads, "reward_std", "standard deviation")
    if "flat_groups" in run.names:
        used.add("flat_groups")
        yield _single(run, "flat_groups", "Groups without a spread", "share")
    sets = [name for name in run.names if name.startswith("data_set/")]
    used.update(sets)
    yield from (_single(run, name, name.removeprefix("data_set/"), "") for name in sets)


def _policy(run: RunFolder, used: set[str]) -> Iterator[Chart]:
    age = max((value for _, value in run.column(_AGE)), default=0.0)
    used.add(_AGE)
    lag = f", at lag {age:.0f}" if age else ""
    for names, title, unit in (
        (_CLIPPED, f"Clipped shares{lag}", "share"),
        (_RATIOS, f"Ratio of new to old policy{lag}", ""),
    ):
        present = [name for name in names if name in run.names]
        used.update(present)
        code = "ratio" if names is _RATIOS else "clipped_low, clipped_high"
        if present:
            yield Chart(title, [Curve(names[n], run.column(n)) for n in present], code, unit)
    averages = [n for n in run.names if n.startswith("kl_") and n not in POLICY_NAMES]
    for name in [*averages, *(name for name in POLICY_NAMES if name in run.names)]:
        used.add(name)
        title, unit = POLICY_NAMES.get(name, (f"KL from the average {name[3:]}", ""))
        late = lag if name.startswith("kl") else ""
        yield _single(run, name, title + late, unit)


def _statistics(run: RunFolder, used: set[str]) -> Iterator[Chart]:
    names = [name.removeprefix("held_out/") for name in run.names]
    for name in dict.fromkeys(n for n in names if n.startswith(PREFIXES)):
        held_out = Curve("held-out samples", run.column(f"held_out/{name}"), marks=True)
        used |= {name, f"held_out/{name}", f"held_out_std/{name}", f"held_out_gain_error/{name}"}
        title, unit = STATISTIC_NAMES.get(name, (name, ""))
        yield Chart(title, _pair(run, held_out, name), name, unit)


def _waiting(run: RunFolder) -> Chart:
    """Shares of each iteration that training and workers wait for each other."""
    lines = [line for line in run.metrics if line.get("workers/joined")]
    shares = {
        "training, for samples": [line["seconds/waiting/sampling"] for line in lines],
        "training, for scores": [line["seconds/waiting/scoring"] for line in lines],
        "workers, for training": [max(0.0, line["seconds"] - busy_seconds(line)) for line in lines],
    }
    curves = [
        Curve(
            waiting,
            [
                (line["iteration"], s / line["seconds"])
                for line, s in zip(lines, column, strict=True)
            ],
        )
        for waiting, column in shares.items()
    ]
    return Chart("Who waits", curves, "seconds/waiting/PHASE, workers/seconds/PHASE", "share")


def busy_seconds(m: Mapping[str, float]) -> float:
    """Seconds of each sampling worker for an iteration's samples."""
    seconds = sum(v for n, v in m.items() if n.startswith(OF_WORKERS))
    return (seconds - m.get(f"{OF_WORKERS}replicas", 0.0)) / max(m["workers/joined"], 1.0)


def _seconds(run: RunFolder, used: set[str]) -> Iterator[Chart]:
    phases = [phase for phase in (*WAITS, *PHASES) if f"seconds/{phase}" in run.names]
    used.update(f"seconds/{phase}" for phase in phases)
    lines = [Curve(phase, run.column(f"seconds/{phase}")) for phase in phases]
    if lines:
        yield Chart("Seconds by phase", lines, "seconds/PHASE", "s", stacked=True)
    theirs = [name for name in run.names if name.startswith(OF_WORKERS)]
    used.update(theirs, (name for name in run.names if name.startswith("workers/")))
    if theirs:
        lines = [Curve(name.removeprefix(OF_WORKERS), run.column(name)) for name in theirs]
        title = "Seconds of the workers for an iteration's samples"
        yield Chart(title, lines, f"{OF_WORKERS}PHASE", "s", stacked=True)
        yield _waiting(run)
        counts = [Curve(n, run.column(f"workers/{n}")) for n in ("joined", "restarts")]
        yield Chart("Workers", counts, "workers/joined, workers/restarts", "")
    for name in _TIMES:
        if name in run.names:
            used.add(name)
            yield _single(run, name, _TIMES[name], "s")
