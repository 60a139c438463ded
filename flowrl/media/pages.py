"""Samples as files to look at: a page of images, videos or texts."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.media import pictures, texts, videos
from rewards import Samples
from rewards.perception.files import open_image_file


@dataclass(frozen=True)
class Page:
    """Samples with one score each; None for a sample without a score."""

    samples: Samples
    scores: Sequence[float | None]
    title: str

    def save(self, folder: Path, name: str) -> Path:
        """Write `folder/name.png`; for videos `name.gif` too, for texts `name.html` and
        `name.jsonl` instead.

        Returns the path of the image, the GIF or the HTML page.
        """
        if self.texts:
            return texts.save_texts(_lines(self), self.title, folder, name)
        pictures.save_grid(_still_page(self), folder / f"{name}.png")
        if not self.moving:
            return folder / f"{name}.png"
        videos.save_gif(_moving_page(self), folder / f"{name}.gif")
        return folder / f"{name}.gif"

    def save_beside(self, folder: Path, earlier: str, name: str) -> None:
        """Write this page next to the saved page `earlier`, if that exists and is readable."""
        if self.texts and (folder / f"{earlier}.jsonl").is_file():
            texts.save_beside(_lines(self), self.title, folder, earlier, name)
        elif before := _saved(folder / f"{earlier}.png"):
            pictures.save_grid(
                pictures.images_side_by_side(before, _still_page(self)), folder / f"{name}.png"
            )
        if self.moving and (frames := videos.saved_frames(folder / f"{earlier}.gif")):
            both = videos.videos_side_by_side(frames, _moving_page(self))
            videos.save_gif(both, folder / f"{name}.gif")

    def save_each(self, folder: Path) -> None:
        """Write one file per image or video; texts are all in the page."""
        for i, media in enumerate(() if self.texts else self.samples.media):
            if self.moving:
                videos.save_gif(videos.frames(media), folder / f"{i:03d}.gif")
            else:
                pictures.save_grid(pictures.to_image(media), folder / f"{i:03d}.png")

    @property
    def texts(self) -> bool:
        return self.samples.kind == "text"

    @property
    def moving(self) -> bool:
        return self.samples.kind == "video"


def _saved(path: Path) -> Image.Image | None:
    with suppress(ValueError):
        return open_image_file(path).convert("RGB")
    return None


def _still_page(page: Page) -> Any:
    return pictures.contact_grid(page.samples.media, page.samples.prompts, page.scores, page.title)


def _moving_page(page: Page) -> list[Image.Image]:
    return videos.video_page(page.samples.media, page.samples.prompts, page.scores, page.title)


def _lines(page: Page) -> list[dict[str, Any]]:
    rows = zip(page.samples.prompts, page.samples.media, page.scores, strict=True)
    return [{"prompt": prompt, "text": text, "score": score} for prompt, text, score in rows]
