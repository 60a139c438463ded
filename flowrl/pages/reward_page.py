"""The page of `flowrl evaluate-rewards`: one file without scripts or external files."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from flowrl.evaluation.agreement import MeanInterval, preferred
from flowrl.evaluation.measure import Gallery
from flowrl.evaluation.perturb import EDITS, change
from flowrl.evaluation.preferences import Preferences
from flowrl.evaluation.reward_evaluation import EvaluateRewards, Measured, measure_rewards, table
from flowrl.evaluation.reward_report import ReportTree, RewardResult, percent
from flowrl.media.thumbnails import small_copy
from flowrl.pages.records import GivenImage
from flowrl.pages.stack import from_template, varying
from flowrl.whole_file import write_whole
from rewards import Reward

LARGEST = 192  # pixels of an image's longer side on the page
TIE_RULES = {
    "half": "ties count half (Pick-a-Pic)",
    "excluded": "human ties left out (ImageReward, HPDv2)",
    "calibrated": "three verdicts, tie threshold fitted (GenAI-Bench, VideoGen-RewardBench)",
    "one_order": "judged in one order only",
}
JudgedImage = tuple[GivenImage, float, bool]  # its prompt, its score, people's choice
VaryingTable = tuple[list[str], list[list[Any]], list[tuple[str, Any]]]


def report_rewards(
    arguments: EvaluateRewards, objects: Mapping[str, Reward] = {}, notes: Sequence[str] = ()
) -> Path:
    """Evaluate rewards and write a report; returns the folder with the page and the JSON.
    `objects` are additional rewards by label, passed from Python; `notes` are sentences that come
    first."""
    measured = measure_rewards(arguments, objects, notes)
    page = measured.folder / "evaluation.html"
    write_whole(page, reward_page(measured, arguments.examples, arguments.seed))
    print(table(measured.tree))
    print(f"\npage: {page}\nnumbers: {measured.folder / 'evaluation.json'}")
    return measured.folder


def reward_page(measured: Measured, examples: int, seed: int) -> str:
    """The page as HTML."""
    tree, data = measured.tree, measured.tree["dataset"]
    rewards, ties = tree["rewards"], tree["ties"]
    order = sorted(rewards, key=lambda name: -_low(rewards[name]["accuracy"][ties].value))
    accuracies = {name: rewards[name]["accuracy"][ties] for name in order}
    values = {
        "title": f"Rewards on {data['name']}", "heading": f"Which reward to trust: {data['name']}",
        "chips": [f"layout {data['layout']}"], "sections": [], "interactive": False,
        "tree": tree, "data": data, "rewards": rewards, "known": accuracies,
        "axis": ShareAxis.of(accuracies),
        "tie_rule": TIE_RULES[ties], "level": percent(tree["level"], 0),
        "treatments": _treatments(tree, order), "differences": _differences(tree),
        "ranks": {name: r["rank"] for name, r in rewards.items() if r.get("rank")},
        "held": {name: r["robustness"] for name, r in rewards.items() if r.get("robustness")},
        "position": _position(tree), "costs": _costs(tree),
        "strip": edit_strip(measured.outcomes, measured.preferences, measured.gallery, seed),
        "wrong": [
            wrong_pairs(outcome, measured.preferences, measured.gallery, examples)
            for outcome in measured.outcomes
        ],
    }  # fmt: skip
    return str(from_template("rewards.html", values))


@dataclass(frozen=True)
class ShareAxis:
    """An axis that covers all intervals and one half, with ends at multiples of ten percent."""

    low: float
    high: float

    @classmethod
    def of(cls, accuracies: Mapping[str, MeanInterval]) -> "ShareAxis":
        ends = [
            x for e in accuracies.values() for x in (e.value, e.low, e.high) if math.isfinite(x)
        ]
        low = math.floor(10 * min([*ends, 0.5]) + 1e-9) / 10
        return cls(low, max(math.ceil(10 * max([*ends, 0.5]) - 1e-9) / 10, low + 0.1))

    def at(self, x: float) -> str:
        return f"{100 * (x - self.low) / (self.high - self.low):.2f}%"


def _low(x: float) -> float:
    return x if x == x else -1.0


def _treatments(tree: ReportTree, order: Sequence[str]) -> VaryingTable:
    rewards = tree["rewards"]
    kinds = [k for k in TIE_RULES if any(k in r["accuracy"] for r in rewards.values())]
    rows = [
        [name, *(rewards[name]["accuracy"].get(kind, "\N{EN DASH}") for kind in kinds)]
        + [str(rewards[name][key]) for key in ("tied_pairs", "unscored_pairs")]
        for name in order
    ]
    return varying(["", *(k.replace("_", " ") for k in kinds), "tied", "no verdict"], rows)


def _differences(tree: ReportTree) -> VaryingTable:
    rows = [
        [
            f"{d['first']} \N{MINUS SIGN} {d['second']}",
            MeanInterval(d["value"], d["low"], d["high"], d["n"]),
            "settled" if d["low"] > 0 or d["high"] < 0 else "not settled",
        ]
        for d in tree["differences"]
    ]
    return varying(["", "points", "verdict"], rows)


def _position(tree: ReportTree) -> VaryingTable:
    rows = []
    for name, reward in tree["rewards"].items():
        if "position" in reward:
            p = reward["position"]
            shares = (f"{100 * p[key]:.1f}" for key in ("consistent", "to_first", "to_second"))
            rows.append([name, f"{100 * p['toward_first']:+.1f}", *shares, str(p["n"])])
    head = ["", "bias to first", "same winner", "always first", "always second", "pairs"]
    return varying(head, rows)


def _costs(tree: ReportTree) -> VaryingTable:
    rows = []
    for name, reward in tree["rewards"].items():
        c = reward["cost"]
        memory = "\N{EN DASH}" if c["megabytes"] is None else f"{c['megabytes']:.1f}"
        rows.append([name, f"{1000 * c['seconds']:.3g}", memory, f"{c['load_seconds']:.1f}"])
    return varying(["", "ms per sample or verdict", "MB per sample, peak", "s to load"], rows)


def edit_strip(
    outcomes: Sequence[RewardResult], p: Preferences, gallery: Gallery, seed: int
) -> tuple[str, list[tuple[GivenImage, list[tuple[str, float]]]]]:
    """A sample's prompt, and the sample unedited and after every edit, with all scores."""
    scored = [(a, a.score) for a in outcomes if a.score is not None and a.changed]
    scored_rows = np.all([~np.isnan(c) for a, _ in scored for c in a.changed.values()], 0)
    if not scored or not scored_rows.any():
        return "", []
    row = int(np.flatnonzero(scored_rows)[0])
    strip = []
    for edit in ("unedited", *EDITS):
        change_of = change(EDITS[edit], seed) if edit in EDITS else None
        columns = [(a.name, a.changed[edit] if edit in EDITS else score) for a, score in scored]
        shown = _image(edit, gallery.samples([row], change_of).media[0])
        strip.append((shown, [(name, float(column[row])) for name, column in columns]))
    return p.items[row].prompt, strip


def wrong_pairs(
    a: RewardResult, p: Preferences, gallery: Gallery, most: int
) -> tuple[str, int, list[list[JudgedImage]]]:
    """Each reward with the number of its verdicts that contradict people, and the most confident of
    them."""
    wrong = np.flatnonzero(np.nan_to_num(a.margin) * preferred(p.label) < 0)
    if p.texts:  # the page shows images alone
        return a.name, len(wrong), []
    order = wrong[np.argsort(-np.abs(a.margin[wrong]), kind="stable")][:most]
    return a.name, len(wrong), [_pair(a, p, gallery, int(i)) for i in order]


def _pair(a: RewardResult, p: Preferences, gallery: Gallery, i: int) -> list[JudgedImage]:
    rows = int(p.a[i]), int(p.b[i])
    media, prompt = gallery.samples(rows).media, p.items[rows[0]].prompt[:200]
    scores = (0.5 + a.margin[i], 0.5 - a.margin[i])
    if a.score is not None:
        scores = a.score[rows[0]], a.score[rows[1]]
    people = bool(p.label[i] > 0.5)
    of = zip(media, scores, (people, not people), strict=True)
    return [(_image(prompt, media), float(score), chosen) for media, score, chosen in of]


def _image(name: str, media: Tensor) -> GivenImage:
    """A copy of an image [3 h w], or of the middle frame of a video [f 3 h w]."""
    small = small_copy(media if media.ndim == 3 else media[len(media) // 2], LARGEST)
    return GivenImage(name, small.url, small.width, small.height)
