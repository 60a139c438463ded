"""Samples as files to look at: a page of pictures or films, or lines of text."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl import pictures, videos
from flowrl.errors import UserError
from rewards import Samples


@dataclass(frozen=True)
class Page:
    """Samples with one score each; None where there is none."""

    samples: Samples
    scores: Sequence[float | None]
    title: str

    def save(self, folder: Path, name: str) -> Path:
        """`folder/name.png`, of films `name.gif` too, of texts `name.jsonl` with a line each.

        Gives what was written, of films the page that moves.
        """
        if self.texts:
            return _save_lines(self, folder, name)
        pictures.save(_picture(self), folder / f"{name}.png")
        if not self.films:
            return folder / f"{name}.png"
        videos.save(_film(self), folder / f"{name}.gif")
        return folder / f"{name}.gif"

    def save_beside(self, folder: Path, earlier: str, name: str) -> None:
        """This page and the saved page `earlier` of the same prompts as one, if there is that."""
        if self.texts and (folder / f"{earlier}.jsonl").is_file():
            _lines_beside(self, folder / f"{earlier}.jsonl", folder / f"{name}.jsonl")
        elif (folder / f"{earlier}.png").is_file():
            before = Image.open(folder / f"{earlier}.png").convert("RGB")
            pictures.save(pictures.beside(before, _picture(self)), folder / f"{name}.png")
        if self.films and (folder / f"{earlier}.gif").is_file():
            both = videos.beside(folder / f"{earlier}.gif", _film(self))
            videos.save(both, folder / f"{name}.gif")

    def save_each(self, folder: Path) -> None:
        """A picture or a film a file; texts are all in the page."""
        for i, media in enumerate(() if self.texts else self.samples.media):
            if self.films:
                videos.save(videos.frames(media), folder / f"{i:03d}.gif")
            else:
                pictures.save(pictures.to_image(media), folder / f"{i:03d}.png")

    @property
    def texts(self) -> bool:
        return self.samples.kind == "text"

    @property
    def films(self) -> bool:
        return self.samples.kind == "video"


def _picture(page: Page) -> Any:
    return pictures.grid(page.samples.media, page.samples.prompts, page.scores, page.title)


def _film(page: Page) -> list[Image.Image]:
    return videos.page(page.samples.media, page.samples.prompts, page.scores, page.title)


def _save_lines(page: Page, folder: Path, name: str) -> Path:
    rows = zip(page.samples.prompts, page.samples.media, page.scores, strict=True)
    lines = [{"prompt": prompt, "text": text, "score": score} for prompt, text, score in rows]
    return _write(lines, folder / f"{name}.jsonl")


def _lines_beside(page: Page, earlier: Path, out: Path) -> None:
    before = [json.loads(line) for line in earlier.read_text().splitlines()]
    rows = zip(before, page.samples.media, page.scores, strict=True)
    lines = [
        {
            "prompt": old["prompt"], "before": old["text"], "after": text,
            "score_before": old["score"], "score_after": score,
        }
        for old, text, score in rows
    ]  # fmt: skip
    _write(lines, out)


def _write(lines: Sequence[dict[str, Any]], path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    except OSError as error:
        raise UserError(f"{path}: cannot write the samples: {error}") from error
    return path
