"""Grids of samples with their prompts and scores."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.errors import UserError

TILE, GAP, LINE = 128, 8, 13
PAPER, INK, PALE = (250, 250, 248), (30, 30, 30), (110, 110, 110)
GOOD, BAD = (46, 160, 67), (207, 60, 50)


def to_image(pixels: Tensor) -> Image.Image:
    """[3 h w] in 0..1 to 8 bits, rounded as diffusers does."""
    bytes_ = (pixels.float().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(bytes_.permute(1, 2, 0).cpu().numpy())


def still(media: Tensor) -> Tensor:
    """An image as it is; of a video [f 3 h w] three frames side by side."""
    if media.ndim == 3:
        return media
    return torch.cat([media[i] for i in (0, len(media) // 2, len(media) - 1)], 2)


def contact_grid(
    media: Tensor | Sequence[Tensor],
    captions: Sequence[str],
    scores: Sequence[float | None],
    title: str,
) -> Image.Image:
    """Tiles with prompt and score; a bar from red (lowest) to green (highest of the grid)."""
    font, small = ImageFont.load_default(15), ImageFont.load_default(11)
    tiles = [_fit(to_image(still(m))) for m in media]
    width, height = max(t.width for t in tiles), max(t.height for t in tiles)
    texts = [textwrap.wrap(c, max(12, width // 6))[:3] for c in captions]
    below = LINE * (1 + max(len(t) for t in texts)) + 8
    columns = min(len(tiles), max(1, 1100 // (width + GAP)), max(4, round(len(tiles) ** 0.5 * 1.5)))
    rows = -(-len(tiles) // columns)
    page = Image.new(
        "RGB",
        (columns * (width + GAP) + GAP, rows * (height + below + GAP) + 36),
        PAPER,
    )
    pen = ImageDraw.Draw(page)
    pen.text((GAP, 9), title, INK, font)
    known = [s for s in scores if s is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    for i, (tile, text, score) in enumerate(zip(tiles, texts, scores, strict=True)):
        x, y = GAP + i % columns * (width + GAP), 36 + i // columns * (height + below + GAP)
        page.paste(tile, (x, y))
        share = 1.0 if score is None or high == low else (score - low) / (high - low)
        colour = (
            PALE
            if score is None
            else tuple(round(b + (g - b) * share) for b, g in zip(BAD, GOOD, strict=True))
        )
        pen.rectangle((x, y + height, x + width - 1, y + height + 3), fill=colour)
        label = "unscored" if score is None else f"{score:.2f}"
        pen.text((x, y + height + 5), label, colour, small)
        for k, line in enumerate(text):
            pen.text((x, y + height + 5 + LINE * (k + 1)), line, PALE, small)
    return page


def images_side_by_side(left: Image.Image, right: Image.Image) -> Image.Image:
    """Two pages of the same tiles, next to each other."""
    page = Image.new("RGB", (left.width + right.width, max(left.height, right.height)), PAPER)
    page.paste(left, (0, 0))
    page.paste(right, (left.width, 0))
    return page


def _fit(image: Image.Image) -> Image.Image:
    """Small pictures are enlarged by whole pixels, large ones are scaled down."""
    if image.height > 2 * TILE:
        width = round(image.width * 2 * TILE / image.height)
        return image.resize((width, 2 * TILE), Image.Resampling.LANCZOS)
    return enlarged(image)


def enlarged(image: Image.Image) -> Image.Image:
    """By whole pixels, to about the height of a tile; larger ones as they are."""
    times = max(1, TILE // image.height)
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)


def save_grid(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        image.save(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write the picture: {error}") from error
