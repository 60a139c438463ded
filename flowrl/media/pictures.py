"""Grids of samples with their prompts and scores."""

import textwrap
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from flowrl.errors import UserError
from flowrl.media.fonts import load_fonts

TILE, GAP, LINE = 128, 8, 13
PAPER, INK, PALE = (250, 250, 248), (30, 30, 30), (110, 110, 110)
GOOD, BAD = (46, 160, 67), (207, 60, 50)
ABSTAINS: Final = "does not apply"  # instead of a score, where no reward applies to the sample
ShownScore = float | Literal["does not apply"] | None  # None: unscored


def to_image(pixels: Tensor) -> Image.Image:
    """Convert an image [3 h w] in 0..1 to 8 bits, rounded as in diffusers."""
    bytes_ = (pixels.float().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(bytes_.permute(1, 2, 0).cpu().numpy())


def still(media: Tensor) -> Tensor:
    """An image unchanged; for a video [f 3 h w], three frames side by side."""
    if media.ndim == 3:
        return media
    return torch.cat([media[i] for i in (0, len(media) // 2, len(media) - 1)], 2)


def contact_grid(
    media: Tensor | Sequence[Tensor],
    captions: Sequence[str],
    scores: Sequence[ShownScore],
    title: str,
) -> Image.Image:
    """A grid of tiles with prompts and scores; a bar runs from red (lowest) to green (highest of
    the grid)."""
    font, small = load_fonts(15), load_fonts(11)
    tiles = [_fit(to_image(still(m))) for m in media]
    width, height = max(t.width for t in tiles), max(t.height for t in tiles)
    texts = [_wrapped(c, max(12, width // 6))[:3] for c in captions]
    below = LINE * (1 + max(len(t) for t in texts)) + 8
    columns = min(len(tiles), max(1, 1100 // (width + GAP)), max(4, round(len(tiles) ** 0.5 * 1.5)))
    rows = -(-len(tiles) // columns)
    page = Image.new(
        "RGB",
        (columns * (width + GAP) + GAP, rows * (height + below + GAP) + 36),
        PAPER,
    )
    pen = ImageDraw.Draw(page)
    font.draw(pen, (GAP, 9), title, INK)
    numbers = [s for s in scores if isinstance(s, float | int)]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 0.0)
    for i, (tile, text, score) in enumerate(zip(tiles, texts, scores, strict=True)):
        x, y = GAP + i % columns * (width + GAP), 36 + i // columns * (height + below + GAP)
        page.paste(tile, (x, y))
        if score is None or isinstance(score, str):
            label, colour = score or "unscored", PALE
        else:
            share = 1.0 if high == low else (score - low) / (high - low)
            label = f"{score:.2f}"
            colour = tuple(round(b + (g - b) * share) for b, g in zip(BAD, GOOD, strict=True))
        pen.rectangle((x, y + height, x + width - 1, y + height + 3), fill=colour)
        small.draw(pen, (x, y + height + 5), label, colour)
        for k, line in enumerate(text):
            small.draw(pen, (x, y + height + 5 + LINE * (k + 1)), line, PALE)
    return page


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns. Chinese, Japanese and Korean letters take two columns, and
    lines can break after them; words that are too long can break anywhere."""
    lines = []
    for line in textwrap.wrap(text, width) or [""]:
        part, columns = "", 0
        for letter in line:
            wide = 2 if unicodedata.east_asian_width(letter) in "WF" else 1
            if columns + wide > width:
                lines.append(part)
                part, columns = "", 0
            part, columns = part + letter, columns + wide
        lines.append(part)
    return lines if text.strip() else []


def images_side_by_side(left: Image.Image, right: Image.Image) -> Image.Image:
    """Two pages with the same tiles, side by side."""
    page = Image.new("RGB", (left.width + right.width, max(left.height, right.height)), PAPER)
    page.paste(left, (0, 0))
    page.paste(right, (left.width, 0))
    return page


def _fit(image: Image.Image) -> Image.Image:
    """The image at about the size of a tile: enlarged by an integer factor, or scaled down."""
    if image.height > 2 * TILE:
        width = round(image.width * 2 * TILE / image.height)
        return image.resize((width, 2 * TILE), Image.Resampling.LANCZOS)
    return enlarged(image)


def enlarged(image: Image.Image) -> Image.Image:
    """Enlarge an image by an integer factor to about the height of a tile; larger images stay
    unchanged."""
    times = max(1, TILE // image.height)
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)


def save_grid(image: Image.Image, path: Path) -> None:
    """Write an image. UserError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write the image: {error}") from error
