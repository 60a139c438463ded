"""The report of scripts/benchmarks/compare.py on finished runs: a table, a figure, and their
numbers."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from experiment import Curve, over_seeds

from flowrl.whole_file import write_whole


class Looks(NamedTuple):
    """The metrics that are compared; a comparison's file has them under `looks`."""

    metric: str  # held-out accuracy
    keep: str | None  # diversity, of which a share of the base's must be kept
    goal: float  # the accuracy to which costs are counted
    beside: str | None  # the method whose last accuracy is a second goal
    watch: Sequence[str] = ()  # further held-out scores, which choose nothing


AXES: dict[str, tuple[str, ...]] = {  # label -> metrics that are summed
    "network evaluations in sampling": ("count/sampling",),
    "all network evaluations": ("count/sampling", "count/training", "count/frozen"),
    "samples scored": ("count/scored",),  # each is decoded once, intermediate samples too
    "CPU seconds of training": ("seconds/cpu",),
}
SAMPLING, SECONDS = "network evaluations in sampling", "CPU seconds of training"


def points(curve: Curve, metrics: Sequence[str], accuracy: str) -> list[tuple[float, float]]:
    """(spent until then, held-out accuracy) at each evaluation; the base has spent nothing."""
    spent = accumulate(sum(line.get(name, 0.0) for name in metrics) for line in curve)
    return [(x, line[accuracy]) for x, line in zip(spent, curve, strict=True) if accuracy in line]


def reach(known: Sequence[tuple[float, float]], goal: float) -> float | None:
    """The cost at which the accuracy first crosses the goal, linear between evaluations."""
    for (x0, y0), (x1, y1) in pairwise(known):
        if y1 >= goal:
            return x0 if y0 >= goal else x0 + (x1 - x0) * (goal - y0) / (y1 - y0)
    return None


def gain(curves: Sequence[Curve], metric: str) -> str:
    """The gain over the base, averaged over seeds, with its 95 % interval over them."""
    gains = [curve[-1][metric] - curve[0][metric] for curve in curves]
    wide = over_seeds(gains)
    return f"{mean(gains):+.3f}" + ("" if wide is None else f" +- {wide:.3f}")


def where(curve: Curve, looks: Looks, watched: str) -> float | None:
    """A watched score where the compared one first crosses the goal."""
    lines = [line for line in curve if looks.metric in line]
    for a, b in pairwise(lines):
        if b[looks.metric] >= looks.goal:
            rise = b[looks.metric] - a[looks.metric]
            share = 0.0 if a[looks.metric] >= looks.goal else (looks.goal - a[looks.metric]) / rise
            return a[watched] + share * (b[watched] - a[watched])
    return None


def spread(values: Sequence[float | None], write: Callable[[float], str]) -> str:
    """The mean, with the lowest and highest if they differ, and the number of missing values."""
    known = [v for v in values if v is not None]
    if not known:
        return "not reached"
    text = write(mean(known))
    if write(min(known)) != write(max(known)):
        text += f" ({write(min(known))} to {write(max(known))})"
    return text if len(known) == len(values) else f"{text}, {len(known)} of {len(values)} seeds"


def thousands(value: float) -> str:
    return f"{value / 1000:.1f} k"


FORMS = (thousands, thousands, thousands, "{:.0f}".format)  # of AXES


def row(name: str, found: Mapping[str, Any], looks: Looks) -> str:
    curves: list[Curve] = found["curves"]
    last = [curve[-1][looks.metric] for curve in curves]
    wide = over_seeds(last)
    cells = [name, str(found["chosen"]), spread(last, "{:.3f}".format)]
    cells.append("one seed" if wide is None else f"{wide:.3f}")
    for metrics, form in zip(AXES.values(), FORMS, strict=True):
        cells.append(spread([points(c, metrics, looks.metric)[-1][0] for c in curves], form))
    for axis, form in ((SAMPLING, thousands), (SECONDS, FORMS[-1])):
        known = [points(curve, AXES[axis], looks.metric) for curve in curves]
        cells.append(spread([reach(each, looks.goal) for each in known], form))
    if looks.keep is not None:
        kept = [curve[-1][looks.keep] / curve[0][looks.keep] for curve in curves]
        cells.append(spread(kept, "{:.2f}".format))
    if looks.watch:
        cells.insert(4, gain(curves, looks.metric))
    for name in looks.watch:
        ends = spread([curve[-1][name] for curve in curves], "{:.3f}".format)
        cells.append(f"{mean(curve[0][name] for curve in curves):.3f} -> {ends}")
        cells.append(spread([where(curve, looks, name) for curve in curves], "{:.3f}".format))
    return f"| {' | '.join(cells)} |"


def table(results: Mapping[str, Mapping[str, Any]], looks: Looks) -> str:
    heads = [
        "method", "trial chosen", "held-out accuracy at the end", "+- 95 % over seeds", *AXES,
        f"evaluations in sampling to {looks.goal}", f"CPU seconds to {looks.goal}",
        *(["diversity kept"] if looks.keep is not None else []),
    ]  # fmt: skip
    if looks.watch:
        heads.insert(4, "its gain +- 95 % over seeds")
    for name in looks.watch:
        short = name.removeprefix("held_out/")
        heads += [short, f"{short} at {looks.goal}"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join(lines + [row(name, found, looks) for name, found in results.items()]) + "\n"


def at_goal(
    results: Mapping[str, Mapping[str, Any]], accuracy: str, goal: float
) -> dict[str, dict[str, Any]]:
    """The cost of each method, per seed, to reach an accuracy."""
    return {
        name: {
            axis: [reach(points(curve, metrics, accuracy), goal) for curve in found["curves"]]
            for axis, metrics in AXES.items()
        }
        for name, found in results.items()
    }


def figure(results: Mapping[str, Mapping[str, Any]], looks: Looks, file: Path) -> None:
    """Plot accuracy over cost: a line per method, the seeds' range around their mean."""
    import matplotlib
    import numpy as np

    matplotlib.use("agg")
    from matplotlib import pyplot

    pictures, panels = pyplot.subplots(1, 3, figsize=(15, 6), sharey=True)
    styles = [("-", None), ("--", None), (":", None)]
    shown = [axis for axis in AXES if axis != "all network evaluations"]
    for panel, axis in zip(panels, shown, strict=True):
        for i, (name, found) in enumerate(results.items()):
            curves = [points(c, AXES[axis], looks.metric) for c in found["curves"]]
            end = min(curve[-1][0] for curve in curves)
            x = np.linspace(0, end, 100)
            y = np.stack([np.interp(x, *zip(*curve, strict=True)) for curve in curves])
            colour, style = f"C{i % 10}", styles[i // 10][0]
            panel.plot(x, y.mean(0), style, color=colour, label=name, linewidth=1.6)
            panel.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.10, linewidth=0)
        panel.axhline(looks.goal, color="grey", linewidth=0.8)
        panel.set_xlabel(axis)
        panel.grid(alpha=0.25)
    panels[0].set_ylabel(looks.metric)
    panels[-1].legend(fontsize=8, loc="lower right")
    pictures.tight_layout()
    pictures.savefig(file, dpi=110)
    pyplot.close(pictures)


def report(folder: Path, results: Mapping[str, Mapping[str, Any]], looks: Looks) -> None:
    finished = {name: found for name, found in results.items() if found["curves"]}
    write_whole(folder / "table.md", table(finished, looks))
    ends = {n: [c[-1][looks.metric] for c in f["curves"]] for n, f in finished.items()}
    facts: dict[str, Any] = {
        "last": ends,
        f"to_{looks.goal}": at_goal(finished, looks.metric, looks.goal),
    }
    if looks.beside in ends:
        reached = mean(ends[looks.beside])
        facts[f"{looks.beside}_last"] = reached
        facts[f"to_{looks.beside}_last"] = at_goal(finished, looks.metric, reached)
    write_whole(folder / "results.json", json.dumps(facts, indent=1))
    if finished:
        figure(finished, looks, folder / "curves.png")
