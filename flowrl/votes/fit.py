"""`flowrl fit-reward`: a reward from votes, and whether it can be trusted on other prompts."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from flowrl.errors import UserError, terminal_text
from flowrl.evaluation.agreement import MeanInterval, Resamples, credits
from flowrl.evaluation.measure import IMAGES_BEGIN, Gallery, check_specs, parse_specs, unread
from flowrl.evaluation.outputs import make_output_folder
from flowrl.evaluation.preferences import Preferences, ReadOptions, load_preferences
from flowrl.evaluation.reward_evaluation import EvaluateRewards, column_names
from flowrl.pages.reward_page import report_rewards
from flowrl.pages.stack import from_template
from flowrl.paths import find
from flowrl.settings.command_line.arguments import AtLeastOne, Word
from flowrl.votes.answer import count_of
from flowrl.votes.voted_table import voted_table
from rewards.catalogue.fitted import feature_settings, load_columns
from rewards.fitted.folder import FeatureSource, FittedFolder, prompt_hash, weights_digest
from rewards.fitted.heads import (
    CURVE,
    LinearHead,
    VotedPairs,
    choose_ridge,
    held_out_heads,
    held_out_margins,
)
from rewards.fitted.scoring import FeatureColumns, HeldOutScores
from rewards.perception.files import READER
from rewards.perception.weight_files import check_file

DEFAULT_FEATURES = ("clip", "patches")  # what is in an image, and how it looks
STORED_FEATURES = "features.safetensors"
LEVEL, DRAWS = 0.95, 2000
SAME_FEATURES = 1e-5  # of the features' size: models in float32 differ so much by rounding
LITTLE_GAIN = 0.02  # of accuracy: a gain that is called little


@dataclass
class FitReward:
    """Fit a reward to votes on pairs: Bradley-Terry with ties on a linear head, the ridge chosen by
    cross-validation over prompts. Writes a folder that loads as {name: fitted, path: FOLDER}, with
    a page that says whether it can be trusted."""

    votes: Word[Path]
    """A table of votes (votes.jsonl, or any layout of `flowrl evaluate-rewards`), or a folder of
    `flowrl vote`."""
    features: tuple[str, ...] = DEFAULT_FEATURES
    """Models whose features are used, side by side: clip, pickscore, hps, siglip, dinov2, patches,
    of texts last_hidden, or YAML such as '{name: patches, model: FOLDER}'."""
    out: Path | None = None
    """A new folder for the reward."""
    reuse: Path | None = None
    """The folder of an earlier fit: features of the same pixels, prompts and models are taken from
    it."""
    beside: tuple[str, ...] = ()
    """Rewards that are measured on the same votes."""
    layout: str | None = None
    """The layout, if the columns do not determine it."""
    columns: tuple[str, ...] = ()
    """The file's names of a layout's columns, such as prompt=caption,a=first,b=second."""
    images: Path | None = None
    """The folder to which paths are relative; by default the table's folder."""
    robust: int = 200
    """Number of pairs whose samples are edited to find out which edits fool the reward; 0: none."""
    chunk: AtLeastOne = 16
    """Samples per call."""
    frames: AtLeastOne = 16
    """Frames of a video, evenly spaced, whose features are averaged."""


@dataclass(frozen=True)
class CurvePoint:
    """Accuracy on held-out prompts of heads that were fitted on a part of the votes."""

    part: float
    votes: float  # that a head was fitted on, on average over the folds
    accuracy: MeanInterval


@dataclass(frozen=True)
class FittedReward:
    """A finished fit.

    folder     loads as {"name": "fitted", "path": folder}
    accuracy   share of votes on held-out prompts that the reward names as people do, ties half;
               None if all votes are of prompts of one fold
    curve      the same over parts of the votes
    sentences  what was found, as the terminal prints it
    """

    folder: Path
    pairs: int
    prompts: int
    ridge: float
    accuracy: MeanInterval | None
    curve: tuple[CurvePoint, ...]
    sentences: tuple[str, ...]


def fit_reward_to(arguments: FitReward) -> FittedReward:
    """Fit a reward to votes and write its folder with the page. UserError for votes, features or
    images that cannot be used."""
    if arguments.out is None:
        raise UserError("fit-reward: name the new folder with --out, such as --out taste")
    if arguments.out.exists():
        raise UserError(f"fit-reward: {arguments.out} already exists: choose a new folder")
    sources = feature_sources(arguments.features)
    check_specs(parse_specs(arguments.beside, "--beside"), "--beside")
    if arguments.reuse is not None and not (arguments.reuse / STORED_FEATURES).is_file():
        raise UserError(
            f"--reuse: {arguments.reuse} has no {STORED_FEATURES}, which fit-reward writes: name "
            "the folder of an earlier fit, or leave --reuse out"
        )
    table, notes = voted_table(arguments.votes, "fit-reward")
    choice = ReadOptions(
        arguments.layout, images=arguments.images, columns=column_names(arguments.columns)
    )
    preferences = load_preferences(find(str(table)), choice)
    if (preferences.label == 0.5).all():
        raise UserError(
            f"fit-reward: {table}: every vote is a tie, so nothing says which sample is better: "
            "vote on pairs that differ more"
        )
    try:
        columns = load_columns(sources)
    except (ValueError, ImportError, OSError) as error:
        raise UserError(f"fit-reward: {error}") from error
    if preferences.texts != ("text" in columns.kinds):
        kinds = ("texts", "images") if preferences.texts else ("images", "texts")
        hint = "{name: last_hidden, model: FOLDER}" if preferences.texts else "clip"
        raise UserError(
            f"fit-reward: {table} has {kinds[0]}, and these features are of {kinds[1]}: use "
            f"--features '{hint}'"
        )
    columns = FeatureColumns(
        tuple(
            FeatureSource(source.name, source.settings, weights_digest(reward))
            for source, reward in zip(sources, columns.rewards, strict=True)
        ),
        columns.rewards,
    )
    make_output_folder(arguments.out)
    try:
        gallery = Gallery(preferences.items, arguments.frames)
        cache = FeatureCache.of(arguments.out, arguments.reuse, columns, arguments.frames)
        pairs = voted_pairs(preferences, cache.read(gallery, arguments.chunk))
        check_differ(pairs, columns)
        return _fitted(arguments, table, columns, pairs, notes)
    except BaseException:
        shutil.rmtree(arguments.out, ignore_errors=True)  # it did not exist before
        raise


def feature_sources(words: Sequence[str]) -> tuple[FeatureSource, ...]:
    """Parse `--features`. UserError for a reward without features, or a wrong setting."""
    specs = parse_specs(words, "--features")
    if not specs:
        raise UserError("fit-reward: no features; add some, such as --features clip")
    for spec in specs.values():
        try:
            feature_settings(spec.name, spec.settings)
        except ValueError as error:
            raise UserError(f"--features: {error}") from error
    return tuple(FeatureSource(spec.name, dict(spec.settings)) for spec in specs.values())


def voted_pairs(p: Preferences, features: Float[np.ndarray, "n d"]) -> VotedPairs:
    """The pairs of a data set whose samples have features. The column `side` of votes says where a
    was shown."""
    prompts = np.array([p.items[row].prompt for row in p.a], dtype=object)
    side = np.array([{"left": 1.0, "right": -1.0}.get(str(row.get("side")), 0.0) for row in p.rows])
    readable = ~np.isnan(features[p.a]).any(1) & ~np.isnan(features[p.b]).any(1)
    rows = np.flatnonzero(readable)
    if not len(rows):
        raise UserError(f"fit-reward: {p.name}: no pair has two samples that can be read")
    chosen = [str(prompts[row]) for row in rows.tolist()]
    return VotedPairs(features, p.a[rows], p.b[rows], p.label[rows], side[rows], chosen)


def check_differ(pairs: VotedPairs, columns: FeatureColumns) -> None:
    """UserError where the two samples of every pair have the same features, to rounding: a fit
    would scale the rounding up to a score."""
    size = float(np.sqrt(np.square(pairs.features[pairs.a]).mean()))
    difference = pairs.features[pairs.a] - pairs.features[pairs.b]
    if float(np.sqrt(np.square(difference).mean())) <= SAME_FEATURES * size:
        names = ", ".join(source.name for source in columns.sources)
        raise UserError(
            f"fit-reward: to the features {names} the two samples of every pair are alike, so "
            "they explain no vote: choose other --features, or vote on pairs that differ"
        )


@dataclass
class FeatureCache:
    """Features by pixels and prompt, kept in the folder of the reward. A later fit can take them
    from there if the models behind them and the reader of media are the same."""

    path: Path
    columns: FeatureColumns
    stamp: str
    kept: dict[str, Float[np.ndarray, " d"]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, folder: Path, earlier: Path | None, columns: FeatureColumns, frames: int
    ) -> "FeatureCache":
        sources = [
            [source.name, dict(source.settings), source.digest] for source in columns.sources
        ]
        stamp = hashlib.sha256(json.dumps([READER, frames, sources]).encode()).hexdigest()
        rows_kept: dict[str, Any] = {}
        if earlier is not None:
            try:
                check_file(earlier / STORED_FEATURES)
                stored = load_file(earlier / STORED_FEATURES)
            except (OSError, ValueError, SafetensorError) as error:
                raise UserError(
                    f"--reuse: {earlier / STORED_FEATURES} is damaged, or no file of fit-reward: "
                    "leave --reuse out, and the features are computed again"
                ) from error
            rows_kept = {name: row for name, row in stored.items() if name.startswith(stamp[:16])}
            print(f"{len(rows_kept)} of {len(stored)} stored features are of these models")
        return cls(folder / STORED_FEATURES, columns, stamp, rows_kept)

    def read(self, gallery: Gallery, chunk: int) -> Float[np.ndarray, "n d"]:
        """Features of all samples; NaN where a sample cannot be read. UserError if none can."""
        count = len(gallery.items)
        rows: list[Float[np.ndarray, " d"] | None] = [None] * count
        for start in range(0, count, chunk):
            part = range(start, min(start + chunk, count))
            self._read_part(gallery, part, rows)
        if sentence := unread(gallery, gallery.items, "fit-reward: ", IMAGES_BEGIN):
            print(terminal_text(sentence))
        width = next(len(row) for row in rows if row is not None)
        save_file(self.kept, self.path)
        return np.stack([np.full(width, np.nan) if row is None else row for row in rows])

    def _read_part(
        self, gallery: Gallery, part: range, rows: list[Float[np.ndarray, " d"] | None]
    ) -> None:
        samples = gallery.samples(part)
        keys, missing = {}, []
        for index, row in enumerate(part):
            media = samples.media[index]
            if media is not None:
                keys[row] = self._key(media, samples.prompts[index])
                if keys[row] not in self.kept:
                    missing.append(index)
        for alike in _by_kind(samples.media, missing):
            try:
                features = self.columns.of(samples.take(alike))
            except ValueError as error:
                raise UserError(f"fit-reward: {error}") from error
            for index, vector in zip(alike, features, strict=True):
                self.kept[keys[part[index]]] = vector
        for row, key in keys.items():
            rows[row] = self.kept[key]

    def _key(self, media: Tensor | str, prompt: str) -> str:
        if isinstance(media, str):
            whole = hashlib.sha256(f"{prompt}\0{media}".encode("utf-8", "replace"))
            return f"{self.stamp[:16]} {whole.hexdigest()}"
        pixels = media.contiguous().numpy()
        whole = hashlib.sha256(f"{pixels.shape} {prompt}".encode())
        whole.update(pixels.data)
        return f"{self.stamp[:16]} {whole.hexdigest()}"


def _by_kind(media: Sequence[Any], places: Sequence[int]) -> list[list[int]]:
    """Places of images, of videos and of texts, since a call gets one kind."""
    kinds: dict[int, list[int]] = {}
    for place in places:
        dimensions = media[place].ndim if isinstance(media[place], Tensor) else 0
        kinds.setdefault(dimensions, []).append(place)
    return list(kinds.values())


def _fitted(
    arguments: FitReward,
    table: Path,
    columns: FeatureColumns,
    pairs: VotedPairs,
    notes: Sequence[str],
) -> FittedReward:
    """Fit, measure, and write the folder with its page."""
    assert arguments.out is not None
    choice = choose_ridge(pairs)
    head = LinearHead.fit(pairs, choice.ridge)
    prompts = sorted(set(pairs.prompts))
    several = len(pairs.folds) > 1
    curve = learning_curve(pairs) if several else ()
    accuracy = curve[-1].accuracy if curve else None
    lines = [_fit_sentence(pairs, head), *notes]
    lines += _trust_sentences(accuracy, curve, prompts)
    if several:
        lines.append(more_votes_sentence(gain_of_doubling(pairs)))
    label = arguments.out.name
    record = {
        "votes": {
            "file": str(arguments.votes),
            "digest": hashlib.sha256(table.read_bytes()).hexdigest() if table.is_file() else "",
            "pairs": len(pairs.a),
            "prompts": len(prompts),
            "ties": int((pairs.label == 0.5).sum()),
        },
        "held_out_accuracy": None
        if accuracy is None
        else {"value": accuracy.value, "low": accuracy.low, "high": accuracy.high},
        "found": lines,
    }
    seen = frozenset(prompt_hash(prompt) for prompt in prompts)
    folder = FittedFolder(columns.sources, head, seen, record)
    values = {"name": label, "lines": lines, "sources": columns.sources, "votes": record["votes"]}
    folder.write(arguments.out, str(from_template("fitted.md", values)))
    if not several:  # the report prints them before its own
        print(terminal_text("\n".join(lines)))
    else:
        held_out = HeldOutScores(columns, held_out_heads(pairs))
        report_rewards(
            EvaluateRewards(
                dataset=table, rewards=arguments.beside, layout=arguments.layout,
                columns=arguments.columns, images=arguments.images, robust=arguments.robust,
                chunk=arguments.chunk, frames=arguments.frames,
                level=LEVEL, resamples=DRAWS, ties="half", out=arguments.out / "evaluation",
            ),
            {f"{label}, held-out prompts": held_out},
            lines,
        )  # fmt: skip
    print(f"in a run: {{name: fitted, path: {arguments.out}}}")
    return FittedReward(
        folder=arguments.out,
        pairs=len(pairs.a),
        prompts=len(prompts),
        ridge=choice.ridge,
        accuracy=accuracy,
        curve=curve,
        sentences=tuple(lines),
    )


def learning_curve(pairs: VotedPairs) -> tuple[CurvePoint, ...]:
    """Accuracy on held-out prompts over the number of votes. All points are of the same votes."""
    resamples, cluster = _resamples(pairs)
    points = []
    for part in (*CURVE, 1.0):
        right = _credits(pairs, part)
        votes = part * len(pairs.a) * (1 - 1 / len(pairs.folds))
        points.append(CurvePoint(part, votes, resamples.share(right, cluster)))
    return tuple(points)


def _credits(pairs: VotedPairs, part: float) -> Float[np.ndarray, " p"]:
    return credits(held_out_margins(pairs, held_out_heads(pairs, part)), pairs.label, "half")


def _resamples(pairs: VotedPairs) -> tuple[Resamples, np.ndarray]:
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(pairs.prompts))}
    cluster = np.array([number[prompt] for prompt in pairs.prompts])
    return Resamples.draw(len(number), DRAWS, LEVEL, 0), cluster


def gain_of_doubling(pairs: VotedPairs) -> MeanInterval:
    """Accuracy with all votes minus accuracy with half of them, on the same held-out votes."""
    resamples, cluster = _resamples(pairs)
    return resamples.within(_credits(pairs, 1.0) - _credits(pairs, 0.5), cluster, -1.0, 1.0)


def _fit_sentence(pairs: VotedPairs, head: LinearHead) -> str:
    ties = int((pairs.label == 0.5).sum())
    text = (
        f"fitted to {count_of(len(pairs.a), 'vote')} on pairs of "
        f"{count_of(len(set(pairs.prompts)), 'prompt')}, {ties} of them ties; "
        f"{count_of(pairs.features.shape[1], 'feature')}, ridge {head.model.ridge:g}"
    )
    if pairs.side.any():
        text += f"; the left side has {head.model.beta:+.2f} log-odds"
    return text


def _trust_sentences(
    accuracy: MeanInterval | None, curve: Sequence[CurvePoint], prompts: Sequence[str]
) -> list[str]:
    if accuracy is None:
        return [
            f"{count_of(len(prompts), 'prompt')}, too few to hold any out: nobody knows how good "
            "the reward is; its ridge is the number of its features"
        ]
    lines = [
        f"on prompts that it has not seen it agrees with people on {100 * accuracy.value:.0f} % of "
        f"the votes (95 % interval {100 * accuracy.low:.0f} to {100 * accuracy.high:.0f}, prompts "
        "resampled; ties half)"
    ]
    if accuracy.low <= 0.5:
        lines.append("that cannot be distinguished from guessing: do not train on it")
    steps = ", ".join(f"{100 * p.accuracy.value:.0f} % with {p.votes:.0f}" for p in curve)
    lines.append(f"learning curve, by votes that it was fitted on: {steps}")
    return lines


def more_votes_sentence(gain: MeanInterval) -> str:
    """A sentence on what the learning curve says about more votes, or that it cannot be known."""
    interval = f"95 % interval {100 * gain.low:+.1f} to {100 * gain.high:+.1f}"
    if gain.low != gain.low:
        return "whether more votes would help cannot be seen from so few prompts"
    if gain.low > 0:
        return (
            f"doubling the votes has raised it by {100 * gain.value:.1f} points ({interval}): more "
            "votes should help"
        )
    if gain.high < LITTLE_GAIN:
        return (
            f"doubling the votes has changed it by {100 * gain.value:+.1f} points ({interval}): "
            "more votes of this kind add little"
        )
    return f"whether more votes would help cannot be seen: doubling gave {interval} points"
