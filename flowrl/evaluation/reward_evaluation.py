"""`flowrl evaluate-rewards`: which reward to trust, measured on human preferences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from flowrl.errors import UserError, terminal_text
from flowrl.evaluation.agreement import Resamples, Ties
from flowrl.evaluation.measure import (
    IMAGES_BEGIN,
    Cost,
    Gallery,
    check_labels,
    check_specs,
    loaded,
    loaded_judge,
    parse_specs,
    scores,
    tested,
    unread,
    verdicts,
)
from flowrl.evaluation.outputs import make_output_folder, removed_if_empty
from flowrl.evaluation.perturb import EDITS, ScoredPairs, change
from flowrl.evaluation.preferences import Preferences, ReadOptions, load_preferences
from flowrl.evaluation.reward_report import (
    ReportTree,
    RewardResult,
    headline,
    percent,
    results,
    sentences,
)
from flowrl.json_text import json_text
from flowrl.paths import find, new_numbered
from flowrl.settings import RewardSpec
from flowrl.settings.command_line.arguments import MOST_COUNTED, Word
from rewards import Judge, Reward
from rewards.fitted.scoring import KnowsPrompts
from rewards.types import parts_of


@dataclass
class EvaluateRewards:
    """Compare rewards and judges with human preferences: accuracy, ranks, calibration, position
    bias, agreement, cost, and the edits that fool them. Writes a page and a JSON file."""

    dataset: Word[Path]
    """A table or a folder of tables: prompt, a, b, label; or the layout of Pick-a-Pic, HPDv2,
    HPDv3, ImageReward, GenAI-Bench, VideoGen-RewardBench or EditReward-Bench; or a folder of
    `flowrl vote`."""
    rewards: tuple[str, ...] = ()
    """Names, or YAML such as '{name: shapes, kind: strict}'."""
    judges: tuple[str, ...] = ()
    """Pairwise judges, which get each pair in both orders."""
    layout: str | None = None
    """The layout, if the columns do not determine it."""
    dimension: str | None = None
    """The column with labels, such as VQ in VideoGen-RewardBench."""
    columns: tuple[str, ...] = ()
    """The file's names of a layout's columns, such as
    prompt=caption,chosen=best,rejected=other.image."""
    images: Path | None = None
    """The folder to which paths are relative; by default the table's folder."""
    prompts: int | None = None
    """Maximum number of prompts, selected with the seed."""
    ties: Ties | None = None
    """Treatment of ties in the main result; by default as in the data set's paper."""
    level: float = 0.99
    """Confidence level of the intervals: 0.99, since one page makes many comparisons."""
    resamples: int = 2000
    robust: int = 200
    """Number of pairs whose samples are edited to find out which edits fool the rewards; 0:
    none."""
    examples: int = 6
    """Number of pairs to show per reward: those with its largest errors."""
    chunk: int = 16
    """Samples (or pairs) per call."""
    frames: int = 16
    """Frames of a video, evenly spaced."""
    seed: int = 0
    out: Path | None = None
    """A new folder; by default reward-evaluation-0001 or the next free number."""


@dataclass(frozen=True)
class Measured:
    """A finished evaluation: the folder with its JSON, the results, and the samples behind them."""

    folder: Path
    tree: ReportTree
    outcomes: Sequence[RewardResult]
    preferences: Preferences
    gallery: Gallery


def measure_rewards(
    arguments: EvaluateRewards, objects: Mapping[str, Reward] = {}, notes: Sequence[str] = ()
) -> Measured:
    """Evaluate rewards, and write the JSON. `objects` are additional rewards by label, passed from
    Python; `notes` are sentences that come before those of the evaluation."""
    rewards = parse_specs(arguments.rewards, "--rewards")
    judges = parse_specs(arguments.judges, "--judges")
    _check(arguments, rewards, judges, objects)
    choice = ReadOptions(
        arguments.layout, arguments.dimension, arguments.images, arguments.prompts, arguments.seed,
        column_names(arguments.columns),
    )  # fmt: skip
    preferences = load_preferences(find(str(arguments.dataset)), choice)
    ties = headline(preferences, arguments.ties)
    say = f"{preferences.name} ({preferences.layout}): {preferences.clusters} prompts, "
    less = f", {preferences.unlabelled} rows without a judgement left out"
    less = less if preferences.unlabelled else ""
    print(f"{say}{len(preferences.items)} samples, {len(preferences.a)} pairs{less}")
    out = arguments.out or new_numbered(Path(), "reward-evaluation")
    make_output_folder(out)
    with removed_if_empty(out):
        outcomes, gallery = _outcomes(arguments, rewards, judges, objects, preferences)
    resamples = Resamples.draw(
        preferences.clusters, arguments.resamples, arguments.level, arguments.seed
    )
    tree = results(preferences, outcomes, resamples, ties)
    for sentence in gallery.refusals():
        print(terminal_text(sentence))
    tree["dataset"]["broken"] = gallery.broken
    tree["sentences"] = [*notes, *sentences(tree)]
    (out / "evaluation.json").write_text(json_text(plain(tree), indent=1) + "\n")
    return Measured(out, tree, outcomes, preferences, gallery)


def _outcomes(
    arguments: EvaluateRewards,
    rewards: Mapping[str, RewardSpec],
    judges: Mapping[str, RewardSpec],
    objects: Mapping[str, Reward],
    preferences: Preferences,
) -> tuple[list[RewardResult], Gallery]:
    """Scores and verdicts of each reward and judge. UserError if no sample can be read."""
    gallery = Gallery(preferences.items, arguments.frames)
    items = preferences.items
    outcomes = [
        score_pairs(n, loaded(n, s, items), preferences, gallery, arguments)
        for n, s in rewards.items()
    ]
    outcomes += [
        score_pairs(n, (tested(n, r, items), 0.0), preferences, gallery, arguments)
        for n, r in objects.items()
    ]
    outcomes += [
        judge_pairs(n, *loaded_judge(n, s), preferences, gallery, arguments)
        for n, s in judges.items()
    ]
    if sentence := unread(gallery, items, "", IMAGES_BEGIN):
        print(terminal_text(sentence))
    return outcomes, gallery


def column_names(words: Sequence[str]) -> dict[str, str]:
    """Parse `prompt=caption,chosen=best`. UserError for anything else, and for a name given
    twice."""
    names: dict[str, str] = {}
    for word in ",".join(words).split(","):
        new, mark, old = (part.strip() for part in word.partition("="))
        if not word.strip():
            continue
        if not (mark and new and old):
            raise UserError(
                f"--columns: {word!r} is no NAME=COLUMN, such as prompt=caption,a=image_0,b=image_1"
            )
        if new in names:
            raise UserError(f"--columns: {new} is given twice; keep one")
        names[new] = old
    return names


def _check(
    arguments: EvaluateRewards,
    rewards: Mapping[str, RewardSpec],
    judges: Mapping[str, RewardSpec],
    objects: Mapping[str, Reward],
) -> None:
    if not rewards and not judges and not objects:
        raise UserError(
            "evaluate-rewards: no rewards; name some with --rewards, such as shapes,brightness"
        )
    check_labels((*rewards, *judges), objects)
    if shared := set(rewards) & set(judges):
        raise UserError(f"--judges: {', '.join(shared)} is also among the rewards; leave one out")
    if not 0 < arguments.level < 1:
        raise UserError(f"--level must be between 0 and 1, not {arguments.level}")
    least = {"resamples": 1, "chunk": 1, "frames": 1, "robust": 0, "examples": 0, "seed": 0}
    for name, value in vars(arguments).items():
        if name in least and value < least[name]:
            raise UserError(f"--{name} must be at least {least[name]}, not {value}")
        if name == "resamples" and value > MOST_COUNTED:
            raise UserError(f"--{name} must be at most {MOST_COUNTED}, not {value}")
    if arguments.prompts is not None and arguments.prompts < 1:
        raise UserError(f"--prompts must be at least 1, not {arguments.prompts}")
    check_specs(rewards, "--rewards")
    check_specs(judges, "--judges", "judge")


def score_pairs(
    name: str,
    timed: tuple[Reward, float],
    preferences: Preferences,
    gallery: Gallery,
    arguments: EvaluateRewards,
) -> RewardResult:
    """Score all samples, and the samples of some pairs after every edit."""
    reward, seconds = timed
    p = preferences
    score, cost = scores(name, reward, gallery, range(len(p.items)), arguments.chunk)
    changed = {}
    rows = [] if p.texts else robust_rows(p, arguments.robust, arguments.seed)
    for edit in EDITS if rows else ():
        scored = np.full(len(p.items), np.nan)
        change_of = change(EDITS[edit], arguments.seed)
        scored[rows], _ = scores(
            f"{name}, {edit}", reward, gallery, rows, arguments.chunk, change_of
        )
        changed[edit] = scored
    margin = score[p.a] - score[p.b]
    return RewardResult(
        name, margin, cost, seconds, score=score, changed=changed, seen=_seen(reward, p)
    )


def _seen(reward: Reward, p: Preferences) -> Bool[np.ndarray, " p"] | None:
    """Pairs of prompts that a reward, or a member of it, was fitted to; None if it knows none."""
    fits = list(parts_of(reward, KnowsPrompts))
    if not fits:
        return None
    return np.array([any(fit.has_seen(p.items[row].prompt) for fit in fits) for row in p.a])


def robust_rows(p: Preferences, most: int, seed: int) -> list[int]:
    """Samples of at most `most` pairs with a human winner, in whole groups and in order."""
    pairs = ScoredPairs.of(p.a, p.b, p.label, p.cluster)
    order = np.random.default_rng([seed, 1]).permutation(len(pairs.winner))[:most]
    chosen = {int(row) for i in order for row in (pairs.winner[i], pairs.loser[i])}
    groups = {p.items[row].group for row in chosen}  # groupwise rewards compare inside a group
    return [row for row, item in enumerate(p.items) if item.group in groups]


def judge_pairs(
    name: str,
    judge: Judge,
    seconds: float,
    preferences: Preferences,
    gallery: Gallery,
    arguments: EvaluateRewards,
) -> RewardResult:
    """Judge every pair in both orders; the margin is the mean of both verdicts minus 1/2."""
    p = preferences
    ab, first = verdicts(name, judge, gallery, (p.a, p.b), arguments.chunk)
    ba, second = verdicts(f"{name}, other order", judge, gallery, (p.b, p.a), arguments.chunk)
    calls = first.calls + second.calls
    total = first.seconds * first.calls + second.seconds * second.calls
    sizes = [c.megabytes for c in (first, second) if c.megabytes is not None]
    cost = Cost(total / calls if calls else math.nan, calls, max(sizes, default=None))
    return RewardResult(name, (ab + 1 - ba) / 2 - 0.5, cost, seconds, orders=(ab, ba))


def table(tree: ReportTree) -> str:
    """Format a report for the terminal: one row per reward, then its sentences."""
    level = percent(tree["level"], 0)
    head = ("reward", f"accuracy ({tree['ties']})", f"{level} interval", "tied", "unscored", "ms")
    rows: list[tuple[str, ...]] = [head]
    for name, reward in tree["rewards"].items():
        e = reward["accuracy"][tree["ties"]]
        rows.append(
            (
                name,
                percent(e.value) if e.n else "-",
                f"{100 * e.low:.1f} - {100 * e.high:.1f}" if e.n else "-",
                str(reward["tied_pairs"]),
                str(reward["unscored_pairs"]),
                f"{1000 * reward['cost']['seconds']:.1f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(["", *(line.rstrip() for line in lines), "", *tree["sentences"]])


def plain(tree: Any) -> Any:
    """Convert a tree to JSON types: named tuples to mappings, numbers to Python's, NaN and infinity
    to null."""
    if isinstance(tree, Mapping):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and type(tree) is not tuple:
        return plain(tree._asdict())  # type: ignore[attr-defined]
    if isinstance(tree, (list, tuple)):
        return [plain(value) for value in tree]
    if isinstance(tree, (float, np.floating)):
        return float(tree) if math.isfinite(tree) else None
    return int(tree) if isinstance(tree, np.integer) else tree
