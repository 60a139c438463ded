"""Samples as files to look at: a page of pictures, films or texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.media import pictures, texts, videos
from rewards import Samples


@dataclass(frozen=True)
class Page:
    """Samples with one score each; None where there is none."""

    samples: Samples
    scores: Sequence[float | None]
    title: str

    def save(self, folder: Path, name: str) -> Path:
        """`folder/name.png`, of films `name.gif` too, of texts `name.html` and `name.jsonl`.

        Gives what was written, of films the page that moves, of texts the page to look at.
        """
        if self.texts:
            return texts.save_texts(_lines(self), self.title, folder, name)
        pictures.save_grid(_picture(self), folder / f"{name}.png")
        if not self.films:
            return folder / f"{name}.png"
        videos.save_gif(_film(self), folder / f"{name}.gif")
        return folder / f"{name}.gif"

    def save_beside(self, folder: Path, earlier: str, name: str) -> None:
        """This page and the saved page `earlier` of the same prompts as one, if there is that."""
        if self.texts and (folder / f"{earlier}.jsonl").is_file():
            texts.save_beside(_lines(self), self.title, folder, earlier, name)
        elif (folder / f"{earlier}.png").is_file():
            before = Image.open(folder / f"{earlier}.png").convert("RGB")
            pictures.save_grid(
                pictures.images_side_by_side(before, _picture(self)), folder / f"{name}.png"
            )
        if self.films and (folder / f"{earlier}.gif").is_file():
            both = videos.videos_side_by_side(folder / f"{earlier}.gif", _film(self))
            videos.save_gif(both, folder / f"{name}.gif")

    def save_each(self, folder: Path) -> None:
        """A picture or a film a file; texts are all in the page."""
        for i, media in enumerate(() if self.texts else self.samples.media):
            if self.films:
                videos.save_gif(videos.frames(media), folder / f"{i:03d}.gif")
            else:
                pictures.save_grid(pictures.to_image(media), folder / f"{i:03d}.png")

    @property
    def texts(self) -> bool:
        return self.samples.kind == "text"

    @property
    def films(self) -> bool:
        return self.samples.kind == "video"


def _picture(page: Page) -> Any:
    return pictures.contact_grid(page.samples.media, page.samples.prompts, page.scores, page.title)


def _film(page: Page) -> list[Image.Image]:
    return videos.video_page(page.samples.media, page.samples.prompts, page.scores, page.title)


def _lines(page: Page) -> list[dict[str, Any]]:
    rows = zip(page.samples.prompts, page.samples.media, page.scores, strict=True)
    return [{"prompt": prompt, "text": text, "score": score} for prompt, text, score in rows]
