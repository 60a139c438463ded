"""The page of a run: `report.html` in its folder, one file that opens without a network"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from flowrl.evaluation.agreement import MeanInterval
from flowrl.evaluation.paired import paired_gain
from flowrl.pages.curves import DIVERSITIES, NORMAL, RunCharts
from flowrl.pages.records import UNLIKE, EvaluationRecord, SampleRecord
from flowrl.pages.run_folder import RunFolder, flat
from flowrl.pages.stack import count, duration_text, from_template, number, signed
from flowrl.pages.tree import TreeView
from flowrl.pages.unseen import Unseen
from flowrl.settings.words.scores import shown_score
from flowrl.whole_file import write_whole

REPORT = "report.html"
ARROW = "\N{RIGHTWARDS ARROW}"
MOST_LETTERS = 600  # of a setting's value
MOST_SHOWN_BYTES = 8_000_000  # of all samples over the run; fewer evaluations are shown beyond
MOST_SHOWN = 25  # evaluations


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run, by default into its folder. Returns its path.

    UserError if the folder is not a run's; OSError if the page cannot be written.
    """
    path = out or folder / REPORT
    write_whole(path, run_page(RunFolder.read(folder)))
    return path


def run_page(run: RunFolder) -> str:
    """The page as HTML."""
    charts, trees = RunCharts.of(run), [TreeView(record) for record in run.trees]
    unseen, extremes = (
        Unseen.of(run.settings),
        [record for record in run.evaluations if record.best],
    )
    shown = shown_evaluations(run.evaluations, run.best)
    plans: dict[str, int] = {}
    for start in run.starts:
        plans.setdefault(start.plan, start.iteration)
    alarms = ("alarms", "Alarms", True)
    first = bool(run.raised or run.alarms)
    sections = [
        ("summary", "Summary", True),
        *([alarms] if first else []),
        ("samples", "Samples", shown),
        ("extremes", "Best and worst", extremes),
        ("curves", "Curves", charts.deciding or charts.others),
        ("tree", "Tree" if trees and trees[-1].branched else "Group", trees),
        ("plan", "Plan", plans),
        ("settings", "Settings", True),
        ("environment", "Environment", run.starts),
        *([] if first else [alarms]),
    ]
    values = {
        "title": f"{run.name}: report", "heading": run.name, "chips": [run.recipe, state(run)],
        "sections": [(anchor, title) for anchor, title, present in sections if present],
        "interactive": True, "run": run, "cards": list(_cards(run)),
        "findings": [e for e in (*_sentences(run), *run.votes, unseen.no_judge) if e],
        "rows": list(_rows(shown)), "shown": shown, "extremes": extremes[-1:],
        "charts": charts, "unseen": unseen.sentence if run.judges else "",
        "trees": trees[-1:] if len({view.tree.iteration for view in trees}) < 2 else trees,
        "plans": plans, "starts": _starts(run),
        "alarms_first": first, "alarms_off": _off(run),
        "chosen": settings_rows(run.chosen), "every": settings_rows(run.settings),
    }  # fmt: skip
    return str(from_template("run.html", values))


def last_words(run: RunFolder, folder: str) -> str:
    """Say, for the end of a run with alarms, what happened last and which weights are best. Empty
    without alarms. `folder`: the run's, as a command names it."""
    if not run.raised:
        return ""
    said = count(int(run.raised), "alarm")
    if run.alarms:
        last = run.alarms[-1]
        said += f", the last after iteration {last.iteration}: {last.sentence.rstrip('.')}"
    scores = dict(run.column(f"held_out/{run.key}")) if run.key else {}
    best = run.best
    if best is None:
        return f"{said}."
    owner = "the base model's" if best == 0 else f"those of iteration {best}"
    return (
        f"{said}.\nThe best weights are {owner}, with {run.key} {number(scores[best])}: "
        f"flowrl sample {folder} PROMPT --weights best"
    )


def summary_html(run: RunFolder) -> str:
    """The summary of the page as a fragment: what the run is, its numbers, and its findings in
    sentences. For notebooks, whose colours it takes."""
    rows = Markup("").join(
        Markup("<tr><td>{}</td><td>{}</td><td>{}</td></tr>").format(
            card.title, card.value, card.note
        )
        for card in _cards(run)
    )
    findings = Markup("").join(
        Markup("<li>{}</li>").format(sentence) for sentence in (*_sentences(run), *run.votes)
    )
    page = run.folder / REPORT
    link = Markup('<p><a href="{}">the whole page</a></p>').format(page) if page.is_file() else ""
    return str(
        Markup("<div><b>{}</b>: {}, {}<table>{}</table><ul>{}</ul>{}</div>").format(
            run.name, run.recipe, state(run), rows, findings, link
        )
    )


def state(run: RunFolder) -> str:
    """Progress of the run, in words."""
    if run.finished:
        return f"done, {count(run.done, 'iteration')}"
    so_far = f"{run.done:,} of {count(run.planned, 'iteration')}"
    return so_far if run.end is None else f"{run.end.kind} after {so_far}"


class GainOfRun(NamedTuple):
    """A held-out score of the base and of another evaluation, and their difference."""

    name: str
    base: float
    now: float
    gain: MeanInterval
    over: str  # prompts, or samples where a run has no records

    @property
    def values(self) -> str:
        return f"{number(self.base)} {ARROW} {number(self.now)}"

    @property
    def words(self) -> str:
        """The difference in words, with its 95 % interval."""
        if self.gain.low != self.gain.low:
            return f"{signed(self.gain.value)}, without an interval"
        bounds = f"{signed(self.gain.low)} to {signed(self.gain.high)}"
        return f"{signed(self.gain.value)}, 95 % interval {bounds} over {self.over}"

    @property
    def verdict(self) -> str:
        gain = self.gain
        if gain.low != gain.low:
            return f"changed by {signed(gain.value)}; there is no interval."
        if gain.low == gain.high == 0:
            return "did not change on any prompt."
        if gain.low <= 0 <= gain.high:
            return f"changed by {signed(gain.value)}, which may be chance: the interval includes 0."
        word = "rose" if gain.value > 0 else "fell"
        return f"{word} by {number(abs(gain.value))}, which is more than chance explains."


def last_gain(run: RunFolder, name: str) -> GainOfRun | None:
    """Gain of the last evaluation over the base."""
    points = run.column(f"held_out/{name}")
    return gain_of(run, name, int(points[-1][0])) if points else None


def gain_of(run: RunFolder, name: str, iteration: int) -> GainOfRun | None:
    """Gain over the base at an iteration; None without two evaluations."""
    points = dict(run.column(f"held_out/{name}"))
    if len(points) < 2 or iteration not in points:
        return None
    base, now = next(iter(points.values())), points[iteration]
    records = {evaluation.iteration: evaluation for evaluation in run.evaluations}
    first, last = records.get(int(next(iter(points)))), records.get(iteration)
    if first is not None and last is not None and _paired(first, last, name):
        scores, before = score_column(last, name), score_column(first, name)
        gain = paired_gain(scores, before, prompt_places(first))
        return GainOfRun(name, base, now, gain, count(gain.n, "prompt"))
    half = NORMAL * dict(run.column(f"held_out_gain_error/{name}")).get(iteration, float("nan"))
    gain = MeanInterval(now - base, now - base - half, now - base + half, 0)
    return GainOfRun(name, base, now, gain, "samples")


def _paired(first: EvaluationRecord, last: EvaluationRecord, name: str) -> bool:
    same = first.digests == last.digests and first.seed == last.seed
    lengths = {len(evaluation.scores.get(name, ())) for evaluation in (first, last)}
    return same and len(lengths) == 1 and lengths != {0}


def score_column(record: EvaluationRecord, name: str) -> np.ndarray:
    """Scores of all samples [n]; NaN for unscored ones."""
    return np.array([np.nan if x is None else x for x in record.scores[name]], dtype=float)


def prompt_places(record: EvaluationRecord) -> np.ndarray:
    """Index of each sample's prompt [n] in the record's prompts."""
    return np.arange(len(record.scores[record.key])) // max(1, record.per_prompt)


class Card(NamedTuple):
    title: str
    value: str
    note: str = ""
    broad: bool = False


def _cards(run: RunFolder) -> Iterator[Card]:
    for name in run.held_out_scores:
        points, gain = run.column(f"held_out/{name}"), last_gain(run, name)
        shown = f"held-out {shown_score(name)}"
        if gain is not None:
            yield Card(shown, gain.values, gain.words, True)
        elif points:
            yield Card(shown, number(points[-1][1]), "the base model")
    if (diversity := kept_diversity(run)) is not None:
        yield Card("diversity", f"{100 * diversity:.0f} %", "of the base's")
    rewards = run.column("reward")
    if rewards:
        value = f"{number(rewards[0][1])} {ARROW} {number(rewards[-1][1])}"
        yield Card("training reward", value, "first and last iteration", True)
    per_iteration = f"{duration_text(run.seconds / run.done)} each" if run.done else ""
    yield Card("iterations", f"{run.done:,} of {run.planned:,}", per_iteration)
    yield Card("training time", duration_text(run.seconds), "without evaluations")
    yield Card("alarms", f"{run.raised:.0f}", "off" if _off(run) else "")


def kept_diversity(run: RunFolder) -> float | None:
    """Diversity of the last held-out samples as a share of the base's."""
    for name in DIVERSITIES:
        points = run.column(f"held_out/{name}")
        if len(points) > 1 and points[0][1]:
            return points[-1][1] / points[0][1]
    return None


def _off(run: RunFolder) -> bool:
    train = run.settings.get("train")
    return isinstance(train, Mapping) and train.get("alarms") == "off"


def _sentences(run: RunFolder) -> Iterator[str]:
    """Findings in plain words, each based on a number or a setting on the page."""
    if run.end is not None and not run.finished:
        yield f"The run {run.end.kind}: {' '.join(run.end.text.split())}"
    if run.starts and (differs := run.starts[-1].facts.get(UNLIKE)):
        yield Markup("Evaluations are unlike training: {}.").format(differs)
    for name in run.judges:
        gain = last_gain(run, name)
        if gain is not None:
            yield Markup("The held-out score <b>{}</b> {}").format(name, gain.verdict)
    best = run.best
    if best is not None and len(run.column(f"held_out/{run.key}")) > 1:
        when = "the base model" if best == 0 else f"iteration {best}"
        text = Markup("{} is highest at {}; its weights are in <code>best/{}</code>.")
        yield text.format(run.key, when, f"{best:06d}")
    diversity = kept_diversity(run)
    if diversity is not None and diversity < 0.6:
        yield (
            "The samples of a prompt became alike: their diversity is "
            f"{100 * diversity:.0f} % of the base's."
        )


def shown_evaluations(
    evaluations: Sequence[EvaluationRecord], best: int | None, most_bytes: int = MOST_SHOWN_BYTES
) -> list[EvaluationRecord]:
    """The first, best and last evaluations, and as many evenly spaced ones in between as fit."""
    recorded = [evaluation for evaluation in evaluations if evaluation.same]
    if not recorded:
        return []
    size = max(sum(len(sample.media) for sample in evaluation.same) for evaluation in recorded)
    room = min(len(recorded), MOST_SHOWN, max(2, most_bytes // max(1, size)))
    indices = {round(i * (len(recorded) - 1) / max(1, room - 1)) for i in range(room)}
    indices |= {i for i, evaluation in enumerate(recorded) if evaluation.iteration == best}
    return [recorded[i] for i in sorted(indices)]


@dataclass(frozen=True)
class OverRun:
    """A sample of one evaluation, with its score and the change from the base. `applies`: whether
    the reward applies to it."""

    iteration: int
    sample: SampleRecord
    score: float | None
    change: float
    applies: bool = True


def _rows(shown: Sequence[EvaluationRecord]) -> Iterator[list[OverRun]]:
    """Samples that all shown evaluations have; a resumed run may evaluate others."""
    if not shown:
        return
    key = shown[0].key
    for sample_place in sorted(
        set.intersection(*({s.place for s in evaluation.same} for evaluation in shown))
    ):
        row = [(e.iteration, next(s for s in e.same if s.place == sample_place)) for e in shown]
        base = row[0][1].scores.get(key)
        scores = [sample.scores.get(key) for _, sample in row]
        changes = [0.0 if None in (base, score) else score - base for score in scores]  # type: ignore[operator]
        cells = zip(row, scores, changes, strict=True)
        yield [
            OverRun(iteration, sample, s, c, key in sample.scores)
            for (iteration, sample), s, c in cells
        ]


def _starts(run: RunFolder) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the environment: a column per start; equal adjacent columns are merged."""
    starts = [s for i, s in enumerate(run.starts) if not i or s.facts != run.starts[i - 1].facts]
    names = dict.fromkeys(name for start in starts for name in start.facts)
    since = [f"from iteration {start.iteration + 1}" for start in starts]
    head = ["", *(since if len(starts) > 1 else ["value"])]
    return head, [[name, *(start.facts.get(name, "") for start in starts)] for name in names]


def settings_rows(tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Paths of settings with their values in YAML, cut off if very long."""
    texts = (
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in flat(tree)
    )
    return [(n, t if len(t) <= MOST_LETTERS else f"{t[:MOST_LETTERS]} ...") for n, t in texts]
