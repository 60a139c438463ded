"""Samples as viewable files: grids of images, GIFs of videos, HTML pages and lines of texts."""

from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.bounded_files import bounded_lines, parsed_json
from flowrl.errors import UserError
from flowrl.json_text import json_text
from flowrl.media import pictures, sounds, videos
from flowrl.media.pictures import ABSTAINS, ShownScore
from flowrl.pages.stack import from_template
from rewards import Samples
from rewards.perception.files import open_image_file

_MOST_TABLE = 2**26  # bytes of saved texts
Line = dict[str, Any]


@dataclass(frozen=True)
class Page:
    """Samples with one score each; None for unscored samples, ABSTAINS where no reward applies."""

    samples: Samples
    scores: Sequence[ShownScore]
    title: str

    def save(self, folder: Path, name: str) -> Path:
        """Write `folder/name.png`; for videos also `name.gif`, for texts `name.html` and
        `name.jsonl` instead.

        Returns the path of the image, the GIF or the HTML page.
        """
        if self.texts:
            rows = [("", line["prompt"], [(line["score"], line["text"])]) for line in self._lines]
            page = _text_page(self.title, "", ("prompt", "text"), rows)
            return _written(self._lines, page, folder, name)
        pictures.save_grid(self._still, folder / f"{name}.png")
        if not self.moving:
            return folder / f"{name}.png"
        videos.save_gif(self._moving, folder / f"{name}.gif")
        return folder / f"{name}.gif"

    def save_beside(self, folder: Path, earlier: str, name: str) -> None:
        """Write this page next to the saved page `earlier`, if that exists and can be read."""
        if self.texts and (folder / f"{earlier}.jsonl").is_file():
            self._save_texts_beside(folder, earlier, name)
        elif before := _saved_image(folder / f"{earlier}.png"):
            beside = pictures.images_side_by_side(before, self._still)
            pictures.save_grid(beside, folder / f"{name}.png")
        if self.moving and (frames := videos.saved_frames(folder / f"{earlier}.gif")):
            joined = videos.videos_side_by_side(frames, self._moving)
            videos.save_gif(joined, folder / f"{name}.gif")

    def save_each(self, folder: Path) -> None:
        """Write one file per image or video, and a WAV file of its sound; all texts are on the
        page."""
        for i, media in enumerate(() if self.texts else self.samples.media):
            if self.moving:
                videos.save_gif(videos.frames(media), folder / f"{i:03d}.gif")
            else:
                pictures.save_grid(pictures.to_image(media), folder / f"{i:03d}.png")
        for i, sound in enumerate(self.samples.sounds):
            sounds.save_wav(sound.waveform[0], sound.rate, folder / f"{i:03d}.wav")
            spectrogram = sounds.spectrogram(sound.waveform[0])
            spectrogram.save(folder / f"{i:03d}.spectrogram.png")

    @property
    def texts(self) -> bool:
        return self.samples.kind == "text"

    @property
    def moving(self) -> bool:
        return self.samples.kind == "video"

    @property
    def _still(self) -> Image.Image:
        samples = self.samples
        return pictures.contact_grid(samples.media, samples.prompts, self.scores, self.title)

    @property
    def _moving(self) -> list[Image.Image]:
        samples = self.samples
        return videos.video_page(samples.media, samples.prompts, self.scores, self.title)

    @property
    def _lines(self) -> list[Line]:
        rows = zip(self.samples.prompts, self.samples.media, self.scores, strict=True)
        return [{"prompt": prompt, "text": text, "score": score} for prompt, text, score in rows]

    def _save_texts_beside(self, folder: Path, earlier: str, name: str) -> None:
        """Lines whose prompt is not on the other page are left out, since a resumed run may show
        another number."""
        old, pairs, rows = _saved_lines(folder / f"{earlier}.jsonl"), [], []
        for after in self._lines:
            if not old[after["prompt"]]:
                continue
            before = old[after["prompt"]].popleft()
            prompt, scores = after["prompt"], (before["score"], after["score"])
            pairs.append(
                {
                    "prompt": prompt, "before": before["text"], "after": after["text"],
                    "score_before": scores[0], "score_after": scores[1],
                }
            )  # fmt: skip
            sides = list(zip(scores, (before["text"], after["text"]), strict=True))
            rows.append((_change(*scores), prompt, sides))
        changes = [change for change, *_ in rows]
        kinds = ("better", "worse", "same")
        summary = ", ".join(f"{changes.count(kind)} {kind}" for kind in kinds)
        page = _text_page(self.title, summary, ("prompt", "before", "after"), rows)
        _written(pairs, page, folder, name)


def _saved_image(path: Path) -> Image.Image | None:
    with suppress(ValueError):
        return open_image_file(path).convert("RGB")
    return None


def _saved_lines(path: Path) -> defaultdict[str, deque[Line]]:
    """Read saved lines, by prompt; unreadable lines are left out."""
    lines: defaultdict[str, deque[Line]] = defaultdict(deque)
    for text in bounded_lines(path, _MOST_TABLE):
        with suppress(ValueError, TypeError, KeyError):
            line = parsed_json(text)
            fields = {"text": str(line["text"]), "score": line["score"]}
            if fields["score"] in (None, ABSTAINS) or isinstance(fields["score"], float):
                lines[line["prompt"]].append(fields)
    return lines


def _change(before: ShownScore, after: ShownScore) -> str:
    """The change of a score; if one of the two is missing, it is neither better nor worse."""
    if not (isinstance(before, float) and isinstance(after, float)):
        return "unscored"
    return "same" if before == after else "better" if after > before else "worse"


def _text_page(title: str, summary: str, heads: Sequence[str], rows: Sequence[Any]) -> str:
    """A table of prompts, scores and texts. Models may write anything, so the page escapes it, and
    has no scripts."""
    top = {"title": title, "heading": title, "chips": [], "sections": [], "interactive": False}
    table = {"summary": summary, "heads": heads, "rows": rows}
    return str(from_template("texts.html", top | table))


def _written(lines: Sequence[Line], page: str, folder: Path, name: str) -> Path:
    path = folder / f"{name}.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rows = (json_text(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the samples: {error}") from error
    return path
