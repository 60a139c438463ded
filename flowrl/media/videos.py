"""Films as files that any browser shows: endless GIFs of one film, or of a page of them."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageSequence
from torch import Tensor

from flowrl.errors import UserError
from flowrl.media import pictures

LONGEST, SHORTEST = 0.2, 0.06  # seconds that a frame is shown: few frames last longer
LENGTH = 1.5  # of a film, in seconds, where the limits allow it
PAUSE = 0.6  # that its last frame is shown, so that the beginning is seen
MOST_TILES = 32  # frames of a page; of longer films every other, every third, ...
PALETTE_SIZE = 256  # of a GIF


def save_gif(frames: Sequence[Image.Image], path: Path) -> None:
    """Frames of one size as a GIF. Raises UserError where the file cannot be written."""
    each = min(LONGEST, max(SHORTEST, LENGTH / len(frames)))
    times = [round(1000 * each)] * (len(frames) - 1) + [round(1000 * PAUSE)]
    palette = _palette(frames)
    first, *rest = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        first.save(path, save_all=True, append_images=rest, duration=times, loop=0, optimize=False)
    except OSError as error:
        raise UserError(f"{path}: cannot write the film: {error}") from error


def frames(film: Tensor) -> list[Image.Image]:
    """Of a film [f 3 h w] in 0..1; small ones are enlarged by whole pixels."""
    return [pictures.enlarged(pictures.to_image(frame)) for frame in film]


def video_page(
    films: Tensor | Sequence[Tensor],
    captions: Sequence[str],
    scores: Sequence[float | None],
    title: str,
) -> list[Image.Image]:
    """`pictures.grid` of each frame; films that have ended stay at their last one."""
    longest = max(len(film) for film in films)
    step = -(-longest // MOST_TILES)
    return [
        pictures.contact_grid(
            [film[min(at, len(film) - 1)] for film in films], captions, scores, title
        )
        for at in sorted({*range(0, longest, step), longest - 1})
    ]


def videos_side_by_side(left: Path, right: Sequence[Image.Image]) -> list[Image.Image]:
    """A saved page and a page of films of the same prompts, next to each other."""
    with Image.open(left) as saved:
        before = [frame.convert("RGB") for frame in ImageSequence.Iterator(saved)]
    return [
        pictures.images_side_by_side(before[min(at, len(before) - 1)], frame)
        for at, frame in enumerate(right)
    ]


def _palette(frames: Sequence[Image.Image]) -> Image.Image:
    """One for all, from some of them: colours that were chosen frame by frame would flicker."""
    some = frames[:: -(-len(frames) // 8)]
    width, height = frames[0].size
    strip = Image.new("RGB", (width * len(some), height))
    for i, frame in enumerate(some):
        strip.paste(frame, (i * width, 0))
    return strip.quantize(PALETTE_SIZE, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
