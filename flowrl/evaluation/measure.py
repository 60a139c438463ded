"""Score many samples with one reward, in chunks, and measure the cost.

Groups (samples of one prompt) are contiguous and never split, since some rewards compare within
them.
"""

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import ValidationError
from torch import Tensor

from flowrl.blame import blamed_in_words
from flowrl.errors import UserError, terminal_text
from flowrl.evaluation.sources import Source, read_media
from flowrl.settings import RewardSpec
from flowrl.settings.file.strict_yaml import list_entries
from flowrl.settings.read import explain
from rewards import Judge, Reward, Samples, check_reward, load, score_all
from rewards.audio import Audio
from rewards.checks.self_test import Prompts, self_test
from rewards.combine import judged
from rewards.load import load_judge
from rewards.perception.media import WrongMedia

T = TypeVar("T")

CACHE = 512 * 2**20  # bytes of decoded samples that are kept for the next reward

Perturbation = Callable[[Tensor, int], Tensor]  # a sample and its row -> the sample, changed


class Item(NamedTuple):
    source: Source
    prompt: str
    group: int
    meta: Mapping[str, Any]


class Cost(NamedTuple):
    seconds: float  # per sample (or per verdict of a judge), wall time
    calls: int  # samples or verdicts that were timed
    megabytes: float | None  # largest growth of memory per sample; None if unknown


IMAGES_BEGIN = "paths begin at the folder of the table, or at --images"


@dataclass
class Gallery:
    """Samples of a data set, read on demand, and cached if they are few.

    broken     files that are not readable, with the reasons
    refused    by reward: the files of a kind that it does not score, such as videos, and its
               sentence
    abstained  by reward: the files to which it does not apply (None)
    """

    items: Sequence[Item]
    frames: int = 16
    broken: dict[str, str] = field(default_factory=dict)
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    abstained: dict[str, list[str]] = field(default_factory=dict)
    _kept: dict[int, Tensor | Audio | str | None] = field(default_factory=dict)
    _bytes: int = 0

    def samples(self, rows: Sequence[int], change: Perturbation | None = None) -> Samples:
        """Samples of these rows; one tensor if all have the same size."""
        missing = [row for row in rows if row not in self._kept]
        read = read_media([self.items[row].source for row in missing], self.frames)
        self.broken |= read.broken
        fresh = dict(zip(missing, read.media, strict=True))
        for row, media in fresh.items():
            size = _size(media)
            if self._bytes + size <= CACHE:
                self._kept[row], self._bytes = media, self._bytes + size
        media = [fresh[row] if row in fresh else self._kept[row] for row in rows]
        if change is not None:
            pairs = zip(media, rows, strict=True)
            media = [change(m, row) if isinstance(m, Tensor) else m for m, row in pairs]
        chosen = [self.items[row] for row in rows]
        group = torch.tensor([item.group for item in chosen], dtype=torch.long)
        shapes = {m.shape if isinstance(m, Tensor) else None for m in media}
        stacked: Any = media if None in shapes or len(shapes) != 1 else torch.stack(media)  # type: ignore[arg-type]
        return Samples(stacked, [i.prompt for i in chosen], group, [i.meta for i in chosen])

    def problem(self, name: str) -> str:
        """Why a file has no score, or not of every reward; empty if it has."""
        refused = (files[name] for files in self.refused.values() if name in files)
        return "; ".join(dict.fromkeys([*filter(None, [self.broken.get(name)]), *refused]))

    def refusals(self) -> list[str]:
        """A sentence per reward that does not score some of the files."""
        sentences = []
        for reward, files in self.refused.items():
            first, reason = next(iter(files.items()))
            further = f" and {len(files) - 1} others" if len(files) > 1 else ""
            sentences.append(f"not scored by {reward}: {first}{further}: {reason}")
        for reward, names in self.abstained.items():
            further = f" and {len(names) - 1} others" if len(names) > 1 else ""
            sentences.append(f"{reward} does not apply to {names[0]}{further}: it returned None")
        return sentences


def unread(gallery: Gallery, items: Sequence[Item], before: str, way: str) -> str:
    """A sentence on those of the items that could not be read, with the first reason; empty if all
    could. UserError, which begins with `before`, if none could. `way` says where paths begin."""
    names = [item.source.name for item in items if item.source.name in gallery.broken]
    if not names:
        return ""
    reason = "; ".join(filter(None, [gallery.broken[names[0]], way]))
    if len(names) == len(items):
        raise UserError(f"{before}no sample can be read: {reason}")
    return f"{before}{len(names)} of {len(items)} samples cannot be read: {reason}"


def chunks(items: Sequence[Item], rows: Sequence[int], size: int) -> Iterator[list[int]]:
    """Split rows into parts of about `size` without splitting groups."""
    part: list[int] = []
    for i, row in enumerate(rows):
        begins = i == 0 or items[row].group != items[rows[i - 1]].group
        if begins and part:
            group = next(
                (k for k, r in enumerate(rows[i:]) if items[r].group != items[row].group),
                len(rows) - i,
            )
            if len(part) + group > size:
                yield part
                part = []
        part.append(row)
    if part:
        yield part


def scores(
    name: str,
    reward: Reward,
    gallery: Gallery,
    rows: Sequence[int],
    size: int,
    change: Perturbation | None = None,
) -> tuple[Float[np.ndarray, " n"], Cost]:
    """Scores of these rows, NaN for unscored samples: those that cannot be read, those of a kind
    that the reward does not score, and those to which it does not apply. UserError if it scores
    none of their kinds."""
    values = np.full(len(rows), np.nan)
    clock = Clock()
    refused = dict[str, str]()
    at = {row: i for i, row in enumerate(rows)}
    for part in watched(list(chunks(gallery.items, rows, size)), len(rows), name):
        samples = gallery.samples(part, change)
        waiting = _kinds(samples)
        while waiting:
            rows_ = waiting.pop(0)
            chosen = samples if len(rows_) == len(part) else samples.take(rows_)
            try:
                with clock.timing(len(rows_)), errors_of(name):
                    result = score_all({name: reward}, chosen)
            except _Refused as error:
                groups = _groups(chosen, rows_)
                if len(groups) > 1:  # one that is too short must not take the others with it
                    waiting = [*groups, *waiting]
                    continue
                names = [gallery.items[part[row]].source.name for row in rows_]
                refused |= dict.fromkeys(names, str(error))
                continue
            column, applies = result.column(name)
            values[[at[part[row]] for row in rows_]] = column.numpy()
            outside = [
                row for row, applied in zip(rows_, applies.tolist(), strict=True) if not applied
            ]
            if outside and change is None:
                names = [gallery.items[part[row]].source.name for row in outside]
                gallery.abstained.setdefault(name, []).extend(names)
    _note_refused(name, gallery, rows, refused)
    return values, clock.cost


def _note_refused(
    name: str, gallery: Gallery, rows: Iterable[int], refused: Mapping[str, str]
) -> None:
    """Keep the refusals for the report. UserError if nothing else was there to score."""
    unlike = {gallery.items[row].source.name for row in rows} - {*refused, *gallery.broken}
    if refused and not unlike:
        raise UserError(f"reward {name!r}: {next(iter(refused.values()))}")
    if refused:
        gallery.refused.setdefault(name, {}).update(refused)


def _kinds(samples: Samples) -> list[list[int]]:
    """Rows of images, videos, sounds and texts: a reward gets one kind per call. Unreadable samples
    go with the first kind."""
    if isinstance(samples.media, Tensor):
        return [list(range(len(samples.prompts)))]
    kinds: dict[int, list[int]] = {}
    first = next((_dimensions(m) for m in samples.media if m is not None), 0)
    for row, media in enumerate(samples.media):
        kinds.setdefault(first if media is None else _dimensions(media), []).append(row)
    return list(kinds.values())


def _dimensions(media: Tensor | Audio | str) -> int:
    """3 for an image, 4 for a video, 1 for a sound, 0 for a text."""
    if isinstance(media, Audio):
        return 1
    return media.ndim if isinstance(media, Tensor) else 0


def _size(media: Tensor | Audio | str | None) -> int:
    """Bytes of a sample."""
    media = media.waveform if isinstance(media, Audio) else media
    return media.nbytes if isinstance(media, Tensor) else len(media or "")


def _groups(samples: Samples, rows: Sequence[int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for group, row in zip(samples.group.tolist(), rows, strict=True):
        groups.setdefault(group, []).append(row)
    return list(groups.values())


class _Refused(Exception):
    """A reward's refusal of samples of a kind that it does not score."""


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Turn an error of a reward or judge into a UserError that names it, and a refusal as such."""
    try:
        with blamed_in_words():
            try:
                yield
            except WrongMedia as error:
                raise _Refused(str(error)) from error
    except UserError as error:
        if re.search(rf"\b(reward|judge) '?{re.escape(name)}(?!\w)", str(error)):
            raise
        raise UserError(f"reward {name!r}: {error}") from error


def verdicts(
    name: str,
    judge: Judge,
    gallery: Gallery,
    pairs: tuple[Int[np.ndarray, " p"], Int[np.ndarray, " p"]],
    size: int,
) -> tuple[Float[np.ndarray, " p"], Cost]:
    """P(first preferred) for each pair of rows, NaN without a verdict."""
    first, second = pairs
    refused = dict[str, str]()
    values = np.full(len(first), np.nan)
    clock = Clock()
    parts = [range(i, min(i + size, len(first))) for i in range(0, len(first), size)]
    for part in watched(parts, len(first), name):
        rows = sorted({int(r) for i in part for r in (first[i], second[i])})
        samples = gallery.samples(rows)
        pairs_of = zip(rows, samples.media, strict=True)
        kinds = {row: _dimensions(m) for row, m in pairs_of if m is not None}
        for kind in dict.fromkeys(kinds.values()):  # a pair of an image and a video has no verdict
            alike = {row for row, own_kind in kinds.items() if own_kind == kind}
            chosen = [i for i in part if first[i] in alike and second[i] in alike]
            if not chosen:
                continue
            compared = [k for k, row in enumerate(rows) if row in alike]
            index = {rows[k]: i for i, k in enumerate(compared)}
            a = torch.tensor([index[int(first[i])] for i in chosen])
            b = torch.tensor([index[int(second[i])] for i in chosen])
            try:
                with clock.timing(len(chosen)), errors_of(name):
                    values[chosen] = judged(name, judge, samples.take(compared), a, b).numpy()
            except _Refused as error:
                names = [gallery.items[rows[k]].source.name for k in compared]
                refused |= dict.fromkeys(names, str(error))
    _note_refused(name, gallery, {int(r) for pair in pairs for r in pair}, refused)
    return values, clock.cost


@dataclass
class Clock:
    """Wall-clock seconds and memory growth: of the GPU if there is one, otherwise of the process if
    the system (Linux) reports a peak.

    The first of several calls, which imports and allocates, does not count.
    """

    calls: list[tuple[int, float]] = field(default_factory=list)  # samples, seconds
    megabytes: float | None = None
    _begun: float = 0.0
    _count: int = 0
    _before: float | None = None

    def timing(self, count: int) -> "Clock":
        self._count = count
        return self

    def __enter__(self) -> None:
        self._before = _peak(reset=True)
        self._begun = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.calls.append((self._count, time.perf_counter() - self._begun))
        after = _peak(reset=False)
        if after is not None and self._before is not None:
            grown = max(0.0, after - self._before) / self._count
            self.megabytes = max(self.megabytes or 0.0, grown)

    @property
    def cost(self) -> Cost:
        timed = self.calls[1:] or self.calls
        count = sum(count for count, _ in timed)
        seconds = sum(seconds for _, seconds in timed)
        return Cost(seconds / count if count else float("nan"), count, self.megabytes)


def _peak(reset: bool) -> float | None:
    """Peak memory since the last reset, in MB of 10^6 bytes."""
    if torch.cuda.is_available():
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 1e6
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if line is None else int(line.split()[1]) * 1024 / 1e6


def watched(parts: Sequence[Any], total: int, name: str) -> Iterator[Any]:
    """Iterate over parts, with a progress bar on terminals."""
    from tqdm import tqdm

    with tqdm(total=total, desc=name, leave=False, disable=not sys.stderr.isatty()) as bar:
        for part in parts:
            yield part
            bar.update(len(part))


def parse_specs(words: Sequence[str], place: str) -> dict[str, RewardSpec]:
    """Parse `shapes,brightness` or `{name: shapes, kind: strict}` into specifications by label.

    The same reward may be given several times with different settings: the label of a later one
    includes them.
    """
    by_label: dict[str, RewardSpec] = {}
    for entry in list_entries(words, place):
        try:
            spec = RewardSpec.model_validate(entry)
        except ValidationError as error:
            raise UserError(f"{place}: {explain(error, RewardSpec)}") from error
        label = spec.label
        if label in by_label:
            settings = ", ".join(f"{k}={v}" for k, v in spec.settings.items())
            label = f"{spec.name}({settings})"
        if label in by_label:
            raise UserError(f"{place}: {label} is given twice; remove one of them")
        by_label[label] = spec.model_copy(update={"label": label})
    return by_label


def check_labels(named: Iterable[str], objects: Mapping[str, Reward]) -> None:
    """UserError for a label that a named reward shares with an object from Python: one of the two
    would take the other's column."""
    if shared := set(objects) & set(named):
        raise UserError(f"rewards: {', '.join(shared)} is also the label of an object; change one")


def check_specs(
    specs: Mapping[str, RewardSpec], place: str, want: Literal["load", "judge"] = "load"
) -> None:
    """Check names and settings without loading anything. UserError for a wrong name or setting."""
    for spec in specs.values():
        try:
            check_reward(spec.name, spec.settings, want)
        except ValueError as error:
            raise UserError(f"{place}: {error}") from error


def loaded(name: str, spec: RewardSpec, items: Sequence[Item]) -> tuple[Reward, float]:
    """Load and test a reward; also returns the loading time in seconds."""
    reward, seconds = _made(name, lambda: load(spec.name, **spec.settings))
    return tested(name, reward, items), seconds


def tested(name: str, reward: Reward, items: Sequence[Item]) -> Reward:
    """Run a reward's self-test, which only warns, since nothing is trained. It is silent on samples
    of a kind that the reward does not score: the scores of the same samples say so."""
    shown = items[:4]
    kind = shown[0].source.kind if shown else "image"
    prompts = Prompts([item.prompt for item in shown], [item.meta for item in shown], kind=kind)
    try:
        with blamed_in_words():
            try:
                self_test(name, reward, prompts)
            except WrongMedia:
                return reward
    except ValueError as error:
        print(terminal_text(f"warning: {error}"), file=sys.stderr)
    return reward


def loaded_judge(name: str, spec: RewardSpec) -> tuple[Judge, float]:
    return _made(name, lambda: load_judge(spec.name, **spec.settings))


def _made(name: str, maker: Callable[[], T]) -> tuple[T, float]:
    """The result of a call and its seconds. UserError for a missing library or missing weights."""
    begun = time.perf_counter()
    try:
        reward = maker()
    except (ValueError, ImportError, OSError) as error:
        raise UserError(f"reward {name!r}: {error}") from error
    return reward, time.perf_counter() - begun
