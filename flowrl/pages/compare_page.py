"""The page that compares runs: scores with paired intervals, curves, samples and settings"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.errors import UserError
from flowrl.evaluation.agreement import MeanInterval
from flowrl.evaluation.paired import paired_gain, prompt_means
from flowrl.pages.charts import LINE_COLOURS, Chart, Curve
from flowrl.pages.curves import held_out_line
from flowrl.pages.records import EvaluationRecord, SampleRecord
from flowrl.pages.run_folder import RunFolder
from flowrl.pages.run_page import (
    kept_diversity,
    last_gain,
    prompt_places,
    score_column,
    settings_rows,
    state,
)
from flowrl.pages.stack import duration_text, from_template, number, sign, signed, varying
from flowrl.whole_file import write_whole

MOST_RUNS = 12
ALL_PAIRS = 5  # runs up to which every pair is compared; beyond, each with the first
TRAINING_REWARD = "Training reward"
OTHERS = (
    ("kl", "KL divergence from the start"),
    ("held_out/image/diversity", "Diversity of held-out samples"),
    ("held_out/text/distinct", "Texts of a prompt that differ"),
    ("seconds", "Seconds of an iteration"),
)
NamedRuns = Mapping[str, RunFolder]


def write_comparison(folders: Sequence[Path], out: Path) -> None:
    """Write the page of several runs. UserError for fewer than two, or for a folder that is not a
    run."""
    if not 2 <= len(folders) <= MOST_RUNS:
        raise UserError(
            f"compare: give 2 to {MOST_RUNS} runs; `flowrl report RUN` shows a single run"
        )
    write_whole(out, comparison_page([RunFolder.read(folder) for folder in folders]))


def comparison_page(runs: Sequence[RunFolder]) -> str:
    """The page as HTML."""
    short = [run.name for run in runs]
    whole = [str(run.folder) for run in runs]
    names = short if len({*short}) == len(runs) else whole
    if len({*names}) < len(runs):
        raise UserError("compare: the same run is given twice")
    named = dict(zip(names, runs, strict=True))
    facts, same = _facts(named)
    differences = varying(["runs", *_DIFFERENCE], list(_differences(named)))
    samples, settings = _samples(named), _settings(named)
    sections = [
        ("summary", "Summary", True), ("differences", "Differences", differences[1]),
        ("curves", "Curves", True), ("samples", "Samples", samples), ("settings", "Settings", True),
    ]  # fmt: skip
    values = {
        "title": f"{', '.join(names)[:200]}: comparison",
        "heading": f"{len(runs)} runs compared", "chips": names, "interactive": True,
        "sections": [(anchor, title) for anchor, title, present in sections if present],
        "names": names, "facts": facts, "same": same, "differences": differences,
        "charts": list(_charts(named)), "colours": len(LINE_COLOURS),
        "samples": samples, "settings": settings, **_samples_note(named),
    }  # fmt: skip
    return str(from_template("compare.html", values))


def shared_judges(named: NamedRuns) -> list[str]:
    """Held-out rewards that at least two of the runs have."""
    names = [name for run in named.values() for name in run.judges]
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


def reward_settings(run: RunFolder, label: str) -> str:
    """The name and settings of a held-out reward of a run. Two runs may give
    one label to rewards that measure different things."""
    listed = run.settings.get("held_out_rewards") or run.settings.get("rewards")
    for spec in listed if isinstance(listed, list) else ():
        if isinstance(spec, Mapping) and spec.get("label", spec.get("name")) == label:
            return json.dumps([spec.get("name"), spec.get("settings", {})], sort_keys=True)
    return ""


def training_reward(run: RunFolder) -> str:
    """The rewards of training with their weights, as one text: `0.5 hpsv3 + shapes.strict`."""
    listed = run.settings.get("rewards")
    terms = list[str]()
    for spec in listed if isinstance(listed, list) else ():
        if isinstance(spec, Mapping):
            weight, label = spec.get("weight", 1.0), spec.get("label") or spec.get("name")
            terms.append(f"{label}" if weight == 1.0 else f"{weight} {label}")
        else:
            terms.append(str(spec))
    return " + ".join(sorted(terms))


def _by(named: NamedRuns, of: Callable[[RunFolder], str]) -> dict[str, NamedRuns]:
    """Runs by a text that says what they have in common."""
    groups: dict[str, dict[str, RunFolder]] = {}
    for name, run in named.items():
        groups.setdefault(of(run), {})[name] = run
    return dict(groups)


def _facts(named: NamedRuns) -> tuple[list[tuple[str, list[Any]]], list[tuple[str, Any]]]:
    """Rows of the summary with a value per run, and rows with the same value in all runs."""
    rows: list[tuple[str, list[Any]]] = [
        (f"held-out {name}", [_gain(run, name) for run in named.values()])
        for name in dict.fromkeys(name for run in named.values() for name in run.judges)
    ]
    readers = {
        "recipe": lambda run: run.recipe,
        "progress": state,
        "diversity left": _diversity,
        "time": lambda run: duration_text(run.seconds),
        "alarms": lambda run: f"{run.raised:.0f}",
    }
    same: list[tuple[str, Any]] = []
    for title, of in readers.items():
        values = [(of(run), "") for run in named.values()]
        if len({*values}) > 1:
            rows.append((title, values))
        else:
            same.append((title, values[0][0]))
    return rows, same


def _gain(run: RunFolder, name: str) -> tuple[str, str]:
    points, gain = run.column(f"held_out/{name}"), last_gain(run, name)
    if gain is None:
        return number(points[-1][1] if points else None), ""
    return gain.values, gain.words


def _diversity(run: RunFolder) -> str:
    diversity = kept_diversity(run)
    return number(None) if diversity is None else f"{100 * diversity:.0f} %"


def _pairs(named: NamedRuns) -> list[tuple[str, str]]:
    names = list(named)
    if len(names) <= ALL_PAIRS:
        return [(b, a) for a, b in combinations(names, 2)]
    return [(name, names[0]) for name in names[1:]]


def difference(a: EvaluationRecord, b: EvaluationRecord, name: str) -> MeanInterval:
    """Mean of a - b over the prompts of both runs, with its 95 % interval over prompts."""
    means = [
        dict(
            zip(
                run.digests,
                prompt_means(score_column(run, name), prompt_places(run)),
                strict=True,
            )
        )
        for run in (a, b)
    ]
    common = [digest for digest in means[0] if digest in means[1]]
    now, base = (np.array([side[digest] for digest in common], dtype=float) for side in means)
    return paired_gain(now, base, np.arange(len(common)))


_DIFFERENCE = ("reward", "difference", "95 % interval", "prompts in both", "noise", "verdict")


def _differences(named: NamedRuns) -> Iterator[list[Any]]:
    for first, second in _pairs(named):
        for name in shared_judges(named):
            columns = [
                [e for e in named[run].evaluations if name in e.scores] for run in (first, second)
            ]
            kinds = {reward_settings(named[run], name) for run in (first, second)}
            if all(columns) and len(kinds) > 1:
                dash, reason = number(None), "other settings: not comparable"
                yield [
                    f"{first} \N{MINUS SIGN} {second}",
                    name,
                    (dash, ""),
                    dash,
                    "0",
                    dash,
                    reason,
                ]
            elif all(columns):
                a, b = (column[-1] for column in columns)
                yield [f"{first} \N{MINUS SIGN} {second}", name, *_cells(a, b, name)]


def _cells(a: EvaluationRecord, b: EvaluationRecord, name: str) -> list[Any]:
    gain = difference(a, b, name)
    dash = number(None)
    if not gain.n:
        return [(dash, ""), dash, "0", dash, "no prompt in common"]
    sure, bounded = gain.low > 0 or gain.high < 0, gain.low == gain.low
    bounds = f"{signed(gain.low)} to {signed(gain.high)}" if bounded else dash
    paired = a.seed == b.seed and a.digests == b.digests and a.per_prompt == b.per_prompt
    verdict = "more than chance" if sure else "may be chance" if bounded else "needs two prompts"
    value = (signed(gain.value), sign(gain.value) if sure else "")
    return [value, bounds, str(gain.n), "the same" if paired else "differs", verdict]


def _charts(named: NamedRuns) -> Iterator[Chart]:
    """Curves of all runs on one chart, but never of two rewards: they have units of their own."""
    for name in shared_judges(named):
        kinds = _by(named, lambda run, name=name: reward_settings(run, name))
        for runs in kinds.values():
            of = f" of {', '.join(runs)}" if len(kinds) > 1 else ""
            lines = [held_out_line(run, name, label) for label, run in runs.items()]
            yield Chart(f"held-out {name}{of}", lines, f"held_out/{name}")
    sums = _by(named, training_reward)
    for text, runs in sums.items():
        lines = [Curve(label, run.column("reward")) for label, run in runs.items()]
        yield Chart(
            f"{TRAINING_REWARD}: {text}" if len(sums) > 1 else TRAINING_REWARD, lines, "reward"
        )
    for name, title in OTHERS:
        lines = [
            Curve(label, run.column(name), marks="held" in name) for label, run in named.items()
        ]
        yield Chart(title, lines, name)


def _lasts(named: NamedRuns) -> dict[str, EvaluationRecord]:
    """Each run's last evaluation with samples; empty unless all runs have one."""
    evaluations = {n: [e for e in run.evaluations if e.same] for n, run in named.items()}
    return (
        {n: recorded[-1] for n, recorded in evaluations.items()}
        if all(evaluations.values())
        else {}
    )


def _samples_note(named: NamedRuns) -> dict[str, Any]:
    lasts = list(_lasts(named).values())
    return {
        "alike": len({evaluation.seed for evaluation in lasts}) == 1,
        "kind": lasts[0].kind if lasts else "",
        "when": "" if _differ(lasts) else f", after iteration {lasts[0].iteration}",
    }


def _differ(lasts: Sequence[EvaluationRecord]) -> bool:
    return len({evaluation.iteration for evaluation in lasts}) != 1


def _samples(named: NamedRuns) -> list[list[tuple[str, str, SampleRecord]]]:
    """Name, reward and sample of each run, for the prompts shown in the last evaluation of all
    runs."""
    lasts = _lasts(named)
    if not lasts:
        return []
    shown = {
        n: {_spot(evaluation, s): s for s in evaluation.same} for n, evaluation in lasts.items()
    }
    first = next(iter(shown.values()))
    common = [spot for spot in first if all(spot in of_run for of_run in shown.values())]
    return [list(_row_samples(named, lasts, shown, spot)) for spot in common]


def _spot(record: EvaluationRecord, sample: SampleRecord) -> tuple[int, str]:
    """The sample's index within its prompt, which keys its noise, and the prompt."""
    return sample.place % max(1, record.per_prompt), sample.prompt


def _row_samples(
    named: NamedRuns,
    records: Mapping[str, EvaluationRecord],
    shown: Mapping[str, Mapping[tuple[int, str], SampleRecord]],
    spot: tuple[int, str],
) -> Iterator[tuple[str, str, SampleRecord]]:
    """The samples of a row; the base model's come first if all runs started with the same model."""
    first = next(iter(named.values()))
    base = first.evaluations[0]
    same_model = all(r.settings.get("model") == first.settings.get("model") for r in named.values())
    if same_model and base.iteration == 0:
        yield from (("base", base.key, s) for s in base.same if _spot(base, s) == spot)
    differ = _differ(list(records.values()))
    for name, record in records.items():
        when = f", iteration {record.iteration}" if differ else ""
        yield f"{name}{when}", record.key, shown[name][spot]


def _settings(named: NamedRuns) -> list[list[str]]:
    """Settings that differ between runs, with each run's value."""
    trees = [dict(settings_rows(run.settings)) for run in named.values()]
    names = dict.fromkeys(name for tree in trees for name in tree)
    rows = [[name, *(tree.get(name, "") for tree in trees)] for name in names]
    return [row for row in rows if len({*row[1:]}) > 1]
