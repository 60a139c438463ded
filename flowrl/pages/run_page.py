"""The page of a run: `report.html` in its folder, one file that opens without a network"""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flowrl.evaluation.agreement import MeanInterval
from flowrl.evaluation.paired import paired_gain
from flowrl.pages import html
from flowrl.pages.curves import NORMAL, curve_parts
from flowrl.pages.facts_part import alarms_part, environment_part, plan_part, settings_part
from flowrl.pages.records import EvaluationRecord, write_whole
from flowrl.pages.run_folder import RunFolder
from flowrl.pages.samples_part import extremes_part, slider_part
from flowrl.pages.tree_part import tree_part

REPORT = "report.html"
DIVERSITIES = ("held_out/image/diversity", "held_out/text/distinct")


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run, by default into its folder. Returns the page's path.

    UserError if the folder is not a run's; OSError if the page cannot be written.
    """
    path = out or folder / REPORT
    write_whole(path, run_page(RunFolder.read(folder)))
    return path


def run_page(run: RunFolder) -> str:
    """The page as HTML."""
    alarms = ("alarms", "Alarms", alarms_part(run))
    raised = bool(run.alarms) or any(value for _, value in run.column("alarms"))
    parts = [
        ("summary", "Summary", _summary(run)),
        *([alarms] if raised else []),
        ("samples", "Samples", slider_part(run.evaluations, run.best)),
        ("extremes", "Best and worst", extremes_part(run.evaluations)),
        ("curves", "Curves", curve_parts(run)),
        ("tree", "Tree", tree_part(run.trees)),
        ("plan", "Plan", plan_part(run)),
        ("settings", "Settings", settings_part(run)),
        ("environment", "Environment", environment_part(run)),
        *([] if raised else [alarms]),
    ]
    shown = [(anchor, title) for anchor, title, body in parts if body]
    header = html.top(run.name, [run.recipe, state(run)], shown)
    body = "\n".join(body for _, _, body in parts if body)
    return html.document(f"{run.name}: report", header, body)


def state(run: RunFolder) -> str:
    """The progress of the run, in words."""
    if run.finished:
        return f"done, {html.count(run.done, 'iteration')}"
    return f"{run.done:,} of {html.count(run.planned, 'iteration')}"


class GainOfRun(NamedTuple):
    """A held-out score of the base and of another evaluation, and the difference."""

    name: str
    base: float
    now: float
    gain: MeanInterval
    over: str  # prompts, or samples where a run has no records


def gain_of(run: RunFolder, name: str, iteration: int) -> GainOfRun | None:
    """The gain over the base at an iteration; None without two evaluations."""
    points = dict(run.column(f"held_out/{name}"))
    if len(points) < 2 or iteration not in points:
        return None
    base, now = next(iter(points.values())), points[iteration]
    records = {each.iteration: each for each in run.evaluations}
    first, last = records.get(int(next(iter(points)))), records.get(iteration)
    if first is not None and last is not None and _paired(first, last, name):
        scores, before = score_column(last, name), score_column(first, name)
        gain = paired_gain(scores, before, prompt_places(first))
        return GainOfRun(name, base, now, gain, html.count(gain.n, "prompt"))
    half = NORMAL * dict(run.column(f"held_out_gain_error/{name}")).get(iteration, float("nan"))
    gain = MeanInterval(now - base, now - base - half, now - base + half, 0)
    return GainOfRun(name, base, now, gain, "samples")


def _paired(first: EvaluationRecord, last: EvaluationRecord, name: str) -> bool:
    same = first.digests == last.digests and first.seed == last.seed
    lengths = {len(each.scores.get(name, ())) for each in (first, last)}
    return same and len(lengths) == 1 and lengths != {0}


def score_column(record: EvaluationRecord, name: str) -> np.ndarray:
    """Scores of all samples [n]; NaN where unscored."""
    return np.array([np.nan if x is None else x for x in record.scores[name]], dtype=float)


def prompt_places(record: EvaluationRecord) -> np.ndarray:
    """The prompt of each sample [n], as a place in the record's prompts."""
    return np.arange(len(record.scores[record.key])) // max(1, record.per_prompt)


def _summary(run: RunFolder) -> str:
    cards = "".join(_cards(run))
    sentences = "".join(f"<li>{sentence}</li>" for sentence in _sentences(run))
    findings = f'<ul class="findings">{sentences}</ul>' if sentences else ""
    note = f'<span dir="auto">{escape(str(run.folder))}</span>'
    return html.page_section(
        "summary", "Summary", note, f'<dl class="cards">{cards}</dl>{findings}'
    )


def _card(title: str, value: str, note: str = "", broad: bool = False) -> str:
    small = f"<small>{note}</small>" if note else ""
    look = ' class="broad"' if broad else ""
    return f"<div{look}><dt>{escape(title)}</dt><dd>{value}{small}</dd></div>"


def _cards(run: RunFolder) -> Iterator[str]:
    arrow = "\N{RIGHTWARDS ARROW}"
    for name in run.judges:
        points = run.column(f"held_out/{name}")
        if not points:
            continue
        found = gain_of(run, name, int(points[-1][0]))
        if found is None:
            yield _card(f"held-out {name}", html.number(points[-1][1]), "the base model")
            continue
        value = f"{html.number(found.base)} {arrow} {html.number(found.now)}"
        yield _card(f"held-out {name}", value, interval_text(found.gain, found.over), True)
    for name in DIVERSITIES:
        points = run.column(name)
        if points and points[0][1]:
            share = f"{100 * points[-1][1] / points[0][1]:.0f} % of the base's"
            yield _card("diversity", html.number(points[-1][1]), share)
    rewards = run.column("reward")
    if rewards:
        value = f"{html.number(rewards[0][1])} {arrow} {html.number(rewards[-1][1])}"
        yield _card("training reward", value, "first and last iteration")
    each = f"{html.duration_text(run.seconds / run.done)} each" if run.done else ""
    yield _card("iterations", f"{run.done:,} of {run.planned:,}", each)
    yield _card("time of training", html.duration_text(run.seconds), "without evaluations")
    yield _card("alarms", f"{sum(value for _, value in run.column('alarms')):.0f}")


def interval_text(gain: MeanInterval, over: str) -> str:
    """A difference with its 95 % interval, in words."""
    if gain.low != gain.low:
        return f"{html.signed(gain.value)}, without an interval"
    bounds = f"{html.signed(gain.low)} to {html.signed(gain.high)}"
    return f"{html.signed(gain.value)}, 95 % interval {bounds} over {over}"


def _sentences(run: RunFolder) -> Iterator[str]:
    """Findings in plain words, each from a number on the page."""
    for name in run.judges:
        points = run.column(f"held_out/{name}")
        found = gain_of(run, name, int(points[-1][0])) if points else None
        if found is not None:
            yield f"The held-out score <b>{escape(name)}</b> {_verdict(found.gain)}"
    best = run.best
    if best is not None and len(run.column(f"held_out/{run.key}")) > 1:
        where = f"<code>best/{best:06d}</code>"
        when = "the base model" if best == 0 else f"iteration {best}"
        yield f"The highest {escape(run.key)} is that of {when}; its weights are in {where}."
    for name in DIVERSITIES:
        points = run.column(name)
        if len(points) > 1 and points[-1][1] < 0.6 * points[0][1]:
            share = f"{100 * points[-1][1] / points[0][1]:.0f} %"
            yield f"The samples of a prompt became alike: their diversity is {share} of the base's."


def _verdict(gain: MeanInterval) -> str:
    if gain.low != gain.low:
        return f"changed by {html.signed(gain.value)}; there is no interval."
    if gain.low == gain.high == 0:
        return "did not change on any prompt."
    if gain.low <= 0 <= gain.high:
        return (
            f"changed by {html.signed(gain.value)}, which may be chance: the interval includes 0."
        )
    word = "rose" if gain.value > 0 else "fell"
    return f"{word} by {html.number(abs(gain.value))}, more than chance explains."
