"""The page that compares runs: scores with paired intervals, curves, samples and settings"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import combinations
from pathlib import Path

import numpy as np

from flowrl.errors import UserError
from flowrl.evaluation.agreement import MeanInterval
from flowrl.evaluation.paired import paired_gain, prompt_means
from flowrl.pages import html
from flowrl.pages.curves import held_out_line
from flowrl.pages.facts_part import differing_settings
from flowrl.pages.line_chart import LINE_COLOURS, Chart, Curve, chart_figure
from flowrl.pages.records import EvaluationRecord, SampleRecord, write_whole
from flowrl.pages.run_folder import RunFolder
from flowrl.pages.run_page import (
    DIVERSITIES,
    gain_of,
    interval_text,
    prompt_places,
    score_column,
    state,
)

MOST_RUNS = 12
ALL_PAIRS = 5  # runs up to which every pair is compared; beyond, each with the first
OTHERS = (
    ("reward", "Training reward"),
    ("kl", "KL divergence from the start"),
    ("held_out/image/diversity", "Diversity of held-out samples"),
    ("held_out/text/distinct", "Texts of a prompt that differ"),
    ("seconds", "Seconds of an iteration"),
)
NamedRuns = Mapping[str, RunFolder]


def write_comparison(folders: Sequence[Path], out: Path) -> None:
    """Write the page of several runs. UserError for fewer than two, or one that is not a run."""
    if not 2 <= len(folders) <= MOST_RUNS:
        raise UserError(f"compare: name 2 to {MOST_RUNS} runs; `flowrl report RUN` shows one")
    write_whole(out, comparison_page([RunFolder.read(folder) for folder in folders]))


def comparison_page(runs: Sequence[RunFolder]) -> str:
    """The page as HTML."""
    short = [run.name for run in runs]
    whole = [str(run.folder) for run in runs]
    names = short if len({*short}) == len(runs) else whole
    if len({*names}) < len(runs):
        raise UserError("compare: the same run is named twice")
    named = dict(zip(names, runs, strict=True))
    parts = [
        ("summary", "Summary", _summary(named)),
        ("differences", "Differences", _differences(named)),
        ("curves", "Curves", _curves(named)),
        ("samples", "Samples", _samples(named)),
        ("settings", "Settings", _settings(named)),
    ]
    shown = [(anchor, title) for anchor, title, body in parts if body]
    header = html.top(f"{len(runs)} runs compared", names, shown)
    title = f"{', '.join(names)[:200]}: comparison"
    return html.document(title, header, "\n".join(body for _, _, body in parts if body))


def judges(named: NamedRuns) -> list[str]:
    """Held-out rewards of at least two of the runs."""
    every = [name for run in named.values() for name in run.judges]
    return [name for name in dict.fromkeys(every) if every.count(name) > 1]


def _summary(named: NamedRuns) -> str:
    arrow = "\N{RIGHTWARDS ARROW}"
    keys = dict.fromkeys(name for run in named.values() for name in run.judges)
    head = ["run", "recipe", "state", *(f"held-out {name}" for name in keys), "diversity"]
    rows = []
    for name, run in named.items():
        cells = [f'<b dir="auto">{escape(name)}</b>', escape(run.recipe), escape(state(run))]
        for key in keys:
            points = run.column(f"held_out/{key}")
            found = gain_of(run, key, int(points[-1][0])) if points else None
            cells.append(
                html.number(points[-1][1] if points else None)
                if found is None
                else f"<b>{html.number(found.base)} {arrow} {html.number(found.now)}</b>"
                f"<small>{interval_text(found.gain, found.over)}</small>"
            )
        cells += [_diversity(run), html.duration_text(run.seconds)]
        rows.append([*cells, f"{sum(value for _, value in run.column('alarms')):.0f}"])
    body = html.page_table([*head, "time", "alarms"], rows, "Runs")
    note = "The base model and the last evaluation of each run, with the gain between the two."
    return html.page_section("summary", "Summary", note, f'<div class="numbers">{body}</div>')


def _diversity(run: RunFolder) -> str:
    for name in DIVERSITIES:
        points = run.column(name)
        if points and points[0][1]:
            return f"{100 * points[-1][1] / points[0][1]:.0f} % of the base's"
    return html.number(None)


def _pairs(named: NamedRuns) -> list[tuple[str, str]]:
    names = list(named)
    if len(names) <= ALL_PAIRS:
        return [(b, a) for a, b in combinations(names, 2)]
    return [(name, names[0]) for name in names[1:]]


def difference(a: EvaluationRecord, b: EvaluationRecord, name: str) -> MeanInterval:
    """The mean of a - b over the prompts of both, with its 95 % interval over prompts."""
    means = [
        dict(
            zip(
                each.digests,
                prompt_means(score_column(each, name), prompt_places(each)),
                strict=True,
            )
        )
        for each in (a, b)
    ]
    common = [digest for digest in means[0] if digest in means[1]]
    now, base = (np.array([side[digest] for digest in common], dtype=float) for side in means)
    return paired_gain(now, base, np.arange(len(common)))


def _differences(named: NamedRuns) -> str:
    rows = []
    for first, second in _pairs(named):
        for name in judges(named):
            found = [
                [e for e in named[run].evaluations if name in e.scores] for run in (first, second)
            ]
            if all(found):
                a, b = (each[-1] for each in found)
                rows.append(
                    [f"{escape(first)} \N{MINUS SIGN} {escape(second)}", *_cells(a, b, name)]
                )
    if not rows:
        return ""
    head = ["runs", "reward", "difference", "95 % interval", "prompts in both", "noise", ""]
    note = (
        "Last evaluations, prompt by prompt: the scores of a prompt are averaged in each run, and "
        "the differences over the prompts that both runs have. An interval without 0 is more than "
        "chance over prompts explains; chance between two trainings of one kind is not in it."
    )
    body = html.page_table(head, rows, "Differences between runs")
    return html.page_section(
        "differences", "Differences", note, f'<div class="numbers">{body}</div>'
    )


def _cells(a: EvaluationRecord, b: EvaluationRecord, name: str) -> list[str]:
    gain = difference(a, b, name)
    dash = html.number(None)
    if not gain.n:
        return [escape(name), dash, dash, "0", dash, "no prompt in common"]
    sure = gain.low > 0 or gain.high < 0
    sign = ("up" if gain.value > 0 else "down") if sure else ""
    bounds = f"{html.signed(gain.low)} to {html.signed(gain.high)}"
    paired = a.seed == b.seed and a.digests == b.digests and a.per_prompt == b.per_prompt
    verdict = "more than chance" if sure else "may be chance"
    return [
        escape(name),
        f'<b class="{sign}">{html.signed(gain.value)}</b>',
        bounds if gain.low == gain.low else dash,
        str(gain.n),
        "the same" if paired else "differs",
        verdict if gain.low == gain.low else "needs two prompts",
    ]


def _curves(named: NamedRuns) -> str:
    charts = []
    for name in judges(named):
        lines = [
            held_out_line(run, name, label)
            for label, run in named.items()
            if run.column(f"held_out/{name}")
        ]
        charts.append(Chart(f"held-out {name}", lines, f"held_out/{name}"))
    for name, title in OTHERS:
        lines = [
            Curve(label, run.column(name), marks="held" in name) for label, run in named.items()
        ]
        charts.append(Chart(title, lines, name))
    figures = "".join(chart_figure(chart) for chart in charts)
    note = (
        "One line per run, by iteration. Iterations of different recipes do not cost the same. "
        "Bands are 95 % intervals of the gain over the base."
        + (f" Colours repeat after {LINE_COLOURS} runs." if len(named) > LINE_COLOURS else "")
    )
    return html.page_section("curves", "Curves", note, f'<div class="charts">{figures}</div>')


def _samples(named: NamedRuns) -> str:
    """Samples of the last evaluations, of prompts that all runs show."""
    lasts = {
        name: [each for each in run.evaluations if each.same][-1:] for name, run in named.items()
    }
    if not all(lasts.values()):
        return ""
    shown = {n: {_spot(each[0], s): s for s in each[0].same} for n, each in lasts.items()}
    common = [spot for spot in next(iter(shown.values())) if all(spot in s for s in shown.values())]
    if not common:
        return ""
    records = {name: each[0] for name, each in lasts.items()}
    alike = len({r.seed for r in records.values()}) == 1
    noise = "the same noise" if alike else "different noise, since evaluate.seed differs"
    note = f"Last evaluations: the same prompts and {noise}."
    rows = "".join(_row(list(_row_samples(named, records, shown, spot))) for spot in common)
    kind = next(iter(records.values())).kind
    return html.page_section(
        "samples",
        "Samples",
        note,
        f'<div class="every"><div class="rows {kind}">{rows}</div></div>',
    )


def _spot(record: EvaluationRecord, sample: SampleRecord) -> tuple[int, str]:
    """The sample's place among those of its prompt, which keys its noise, and the prompt."""
    return sample.place % max(1, record.per_prompt), sample.prompt


def _row_samples(
    named: NamedRuns,
    records: Mapping[str, EvaluationRecord],
    shown: Mapping[str, Mapping[tuple[int, str], SampleRecord]],
    spot: tuple[int, str],
) -> Iterator[tuple[str, str, SampleRecord]]:
    """Name, reward and sample: the base first where all runs began with the same model."""
    first = next(iter(named.values()))
    base = first.evaluations[0]
    same_model = all(r.settings.get("model") == first.settings.get("model") for r in named.values())
    if same_model and base.iteration == 0:
        yield from (("base", base.key, s) for s in base.same if _spot(base, s) == spot)
    for name, record in records.items():
        yield f"{name}, iteration {record.iteration}", record.key, shown[name][spot]


def _row(samples: Sequence[tuple[str, str, SampleRecord]]) -> str:
    figures = "".join(
        f"<figure>{html.media(sample, f'Sample of {name}')}<figcaption>"
        f'<span dir="auto">{escape(name)}</span><b>{html.number(sample.scores.get(key))}</b>'
        "</figcaption></figure>"
        for name, key, sample in samples
    )
    prompt = samples[0][2].prompt
    return (
        f'<article class="row"><h3 class="prompt" dir="auto">{escape(prompt)}</h3>'
        f'<div class="strip" tabindex="0" role="group" aria-label="Samples of this prompt">'
        f"{figures}</div></article>"
    )


def _settings(named: NamedRuns) -> str:
    rows = [
        [f"<code>{escape(name)}</code>", *(f'<span dir="auto">{escape(v)}</span>' for v in values)]
        for name, values in differing_settings(list(named.values()))
    ]
    if not rows:
        return html.page_section(
            "settings", "Settings", "", "<p>All runs have the same settings.</p>"
        )
    note = f"{html.count(len(rows), 'setting')} that are not the same in all runs."
    return html.page_section(
        "settings", "Settings", note, html.page_table(["setting", *named], rows, "Settings")
    )
