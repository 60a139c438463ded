"""A new folder of votes, from samples of any source. Its files are copies of the pixels that
rewards score, so it can be moved, and a file says nothing of its origin."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.errors import UserError, terminal_text
from flowrl.evaluation.folders import EDITED
from flowrl.evaluation.measure import Gallery, Item, unread
from flowrl.evaluation.preferences import Preferences
from flowrl.media.animated_png import video_bytes
from flowrl.media.sounds import save_wav, wave_image
from flowrl.media.videos import shown_seconds
from flowrl.prompts.files import VOTED_SAMPLES
from flowrl.votes.plan import PlannedSample, SourceKind, VotePlan, orders, pairs_within
from rewards.audio import Audio
from rewards.perception.files import open_image_cell
from rewards.perception.media import to_pil, to_tensor
from rewards.perception.references import read_references, reference_key
from rewards.types import Samples

MOST_PAIRS = 200  # of a folder, unless --votes says otherwise


@dataclass(frozen=True)
class VoteQuestion:
    """The way to ask for votes: the question, the number of pairs (None: the source's own), the
    number of raters, and the seed of pairs, order and sides."""

    text: str
    votes: int | None = None
    raters: int = 1
    seed: int = 0


@dataclass
class SampleCopies:
    """Writes samples into a folder of votes, in the order in which they are added."""

    folder: Path
    planned: list[PlannedSample] = field(default_factory=list)
    _sources: dict[Hashable, str] = field(default_factory=dict)

    def add(
        self,
        media: object,
        prompt: str,
        origin: str,
        scores: Mapping[str, float | None] = {},
        source: Any = None,
        sound: Audio | None = None,
    ) -> int:
        """Write a sample; returns its row. UserError for tensors that are no images or videos.

        source  the image that was edited, as a cell of a table; None for what is no edit
        sound   of this one video; or this one sound, whose drawing the media are
        """
        row = len(self.planned)
        (self.folder / VOTED_SAMPLES).mkdir(exist_ok=True)
        whole = prompt.encode("utf-8", "replace").decode()  # halves of a character have no code
        sample = PlannedSample(
            f"{VOTED_SAMPLES}/{row:05d}", whole, origin, scores, self._source(source)
        )
        if isinstance(media, str):
            sample = replace(sample, file=sample.file + ".txt")
            (self.folder / sample.file).write_text(media, encoding="utf-8", errors="replace")
        elif isinstance(media, Audio):
            drawing = to_tensor(wave_image(media.waveform[0]))
            sample = self._sound(sample, drawing, media)
        elif isinstance(media, Tensor) and media.ndim == 3 and sound is not None:
            sample = self._sound(sample, media, sound)
        elif isinstance(media, Tensor) and media.ndim == 3:
            sample = replace(sample, file=sample.file + ".png")
            to_pil(media).save(self.folder / sample.file, "PNG", compress_level=1)
        elif isinstance(media, Tensor) and media.ndim == 4:
            sample = self._video(sample, media, sound)
        else:
            raise UserError(
                f"vote: {origin} is a tensor, and people vote on images, videos, sounds and texts: "
                "give your model an `image` function that draws its samples"
            )
        self.planned.append(sample)
        return row

    def _sound(self, sample: PlannedSample, drawing: Tensor, sound: Audio) -> PlannedSample:
        file = sample.file
        save_wav(sound.waveform[0], sound.rate, self.folder / f"{file}.wav")
        to_pil(drawing).save(self.folder / f"{file}.png", "PNG", compress_level=1)
        seconds = sound.waveform.shape[-1] / sound.rate
        wav = f"{file}.wav"
        return replace(sample, file=wav, sound=wav, drawing=f"{file}.png", seconds=seconds)

    def _video(self, sample: PlannedSample, media: Tensor, sound: Audio | None) -> PlannedSample:
        seconds, file = shown_seconds(len(media)), sample.file
        if sound is not None:
            seconds = sound.waveform.shape[-1] / sound.rate
            save_wav(sound.waveform[0], sound.rate, self.folder / f"{file}.wav")
            sample = replace(sample, sound=f"{file}.wav")
        (self.folder / f"{file}.apng").write_bytes(video_bytes(media, seconds))
        return replace(sample, file=f"{file}.apng", frames=len(media), seconds=seconds)

    def _source(self, cell: Any) -> str:
        """The copy of an edit's source; the same file for the same source."""
        key = reference_key(cell)
        if key is None:
            return ""
        if key not in self._sources:
            (image,) = read_references("vote:", [cell])
            file = ""
            if image is not None:
                file = f"{VOTED_SAMPLES}/source-{len(self._sources):05d}.png"
                to_pil(image).save(self.folder / file, "PNG", compress_level=1)
            self._sources[key] = file
        return self._sources[key]

    def add_all(
        self,
        samples: Samples,
        origin: str,
        scores: Mapping[str, Sequence[float | None]] = {},
        column: str = "image",
    ) -> list[int]:
        """Write samples of a model; returns their rows. `column`: of the prompt file, with the
        image that is edited."""
        rows, sounds = [], samples.sounds
        for i, (media, prompt) in enumerate(zip(samples.media, samples.prompts, strict=True)):
            cell = samples.meta[i].get(column) if samples.meta else None
            source = cell if isinstance(cell, str | bytes | Mapping) else None
            sound = sounds[i] if sounds else None
            own_scores = {name: column[i] for name, column in scores.items()}
            rows.append(self.add(media, prompt, origin, own_scores, source, sound))
        return rows


def plan_pairs(
    copies: SampleCopies,
    kind: SourceKind,
    source: str,
    pairs: Sequence[tuple[int, int]],
    question: VoteQuestion,
    sides: tuple[str, ...] = (),
) -> VotePlan:
    """Write the plan of votes on these pairs of copied samples; with `sides`, their a is a sample
    of the first side."""
    turns = orders(len(pairs), question.raters, question.seed)
    plan = VotePlan(
        question=question.text,
        seed=question.seed,
        kind=kind,
        source=source,
        sides=sides,
        samples=copies.planned,
        pairs=pairs,
        turns=turns,
    )
    plan.write(copies.folder)
    return plan


def plan_folder(
    folder: Path, items: Sequence[Item], source: str, question: VoteQuestion
) -> VotePlan:
    """The plan of votes on samples of a folder: pairs of samples of one prompt. UserError if no
    prompt has two samples that can be read."""
    pairs = pairs_within(
        [item.group for item in items], question.votes or MOST_PAIRS, question.seed
    )
    if not pairs:
        raise UserError(
            f"vote: {source} has no two samples of one prompt: sample each prompt twice or more"
        )
    edited = [row for row, item in enumerate(items) if item.meta.get(EDITED)]
    return _copied(folder, items, pairs, "folder", source, question, edited)


def plan_again(
    folder: Path, preferences: Preferences, source: str, question: VoteQuestion
) -> VotePlan:
    """The plan of votes on the pairs of a preference file."""
    pairs = list(dict.fromkeys(zip(preferences.a.tolist(), preferences.b.tolist(), strict=True)))
    return _copied(
        folder, preferences.items, pairs[: question.votes], "preferences", source, question,
        preferences.edited,
    )  # fmt: skip


def _copied(
    folder: Path,
    items: Sequence[Item],
    pairs: Sequence[tuple[int, int]],
    kind: SourceKind,
    source: str,
    question: VoteQuestion,
    edited: Collection[int] = (),
) -> VotePlan:
    """Copy the samples of these pairs, without pairs of which one cannot be read. `edited`: rows of
    samples that are edits of their `source`; without that image, people could not judge them."""
    copies, gallery = SampleCopies(folder), Gallery(items)
    rows: dict[int, int | None] = {}
    reasons: dict[str, str] = {}  # of sources, empty for those that can be read
    for row in dict.fromkeys(row for pair in pairs for row in pair):
        media = gallery.samples([row]).media[0]
        item = items[row]
        if media is None:
            rows[row] = None
            continue
        original = str(item.meta["source"]) if row in edited else None
        if original is not None and original not in reasons:
            reasons[original] = _unread_source(original)
        if original is not None and reasons[original]:
            rows[row] = None
            continue
        rows[row] = copies.add(media, item.prompt, item.source.name, source=original)
    whole = [(a, b) for x, y in pairs if (a := rows[x]) is not None and (b := rows[y]) is not None]
    way = "paths begin at the folder of the table" if kind == "preferences" else ""
    if sentence := unread(gallery, [items[row] for row in rows], "vote: ", way):
        print(terminal_text(sentence))
    if lost := [reason for reason in reasons.values() if reason]:
        print(
            terminal_text(
                f"vote: {len(lost)} of {len(reasons)} images that were edited cannot be read, and "
                f"nobody is asked about their edits: {lost[0]}"
            )
        )
    if not whole:
        raise UserError(f"vote: no pair of {source} has two samples that can be read")
    return plan_pairs(copies, kind, source, whole, question)


def _unread_source(path: str) -> str:
    """Why an image that was edited cannot be read; empty if it can."""
    try:
        open_image_cell(path)
    except ValueError as error:
        return str(error)
    return ""
