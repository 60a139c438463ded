"""Videos as looping GIFs for any browser: one video, or a page of them."""

from collections.abc import Sequence
from pathlib import Path
from struct import error as StructError

from PIL import Image, ImageSequence
from torch import Tensor

from flowrl.errors import UserError
from flowrl.media import pictures

LONGEST, SHORTEST = 0.2, 0.06  # seconds per frame: few frames last longer
LENGTH = 1.5  # seconds of a video, where the limits allow it
PAUSE = 0.6  # seconds of the last frame, so that the start is recognized
MOST_TILES = 32  # frames of a page; longer videos show every other frame, every third, ...
PALETTE_SIZE = 256  # colours of a GIF


def shown_seconds(frames: int) -> float:
    """Seconds that a page shows a video of so many frames for, before it begins again."""
    return frames * min(LONGEST, max(SHORTEST, LENGTH / frames))


def save_gif(frames: Sequence[Image.Image], path: Path) -> None:
    """Write frames of equal size as a GIF. UserError if the file cannot be written."""
    seconds = shown_seconds(len(frames)) / len(frames)
    times = [round(1000 * seconds)] * (len(frames) - 1) + [round(1000 * PAUSE)]
    palette = _palette(frames)
    first, *rest = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        first.save(path, save_all=True, append_images=rest, duration=times, loop=0, optimize=False)
    except OSError as error:
        raise UserError(f"{path}: cannot write the video: {error}") from error


def frames(video: Tensor) -> list[Image.Image]:
    """Frames of a video [f 3 h w] in 0..1; small ones are enlarged by an integer factor."""
    return [pictures.enlarged(pictures.to_image(frame)) for frame in video]


def video_page(
    videos: Tensor | Sequence[Tensor],
    captions: Sequence[str],
    scores: Sequence[pictures.ShownScore],
    title: str,
) -> list[Image.Image]:
    """One contact grid per frame; shorter videos stay at their last frame."""
    longest = max(len(video) for video in videos)
    step = -(-longest // MOST_TILES)
    return [
        pictures.contact_grid(
            [video[min(at, len(video) - 1)] for video in videos], captions, scores, title
        )
        for at in sorted({*range(0, longest, step), longest - 1})
    ]


def saved_frames(path: Path) -> list[Image.Image]:
    """Read the frames of a saved page; none if the file is missing or damaged."""
    try:
        with Image.open(path, formats=("GIF",)) as saved:
            return [frame.convert("RGB") for frame in ImageSequence.Iterator(saved)]
    except (OSError, ValueError, SyntaxError, LookupError, EOFError, StructError):
        return []


def videos_side_by_side(
    before: Sequence[Image.Image], right: Sequence[Image.Image]
) -> list[Image.Image]:
    """Place two pages of videos next to each other."""
    return [
        pictures.images_side_by_side(before[min(at, len(before) - 1)], frame)
        for at, frame in enumerate(right)
    ]


def _palette(frames: Sequence[Image.Image]) -> Image.Image:
    """One palette for all frames, computed from some of them, since a palette per frame would
    flicker."""
    sample = frames[:: -(-len(frames) // 8)]
    width, height = frames[0].size
    strip = Image.new("RGB", (width * len(sample), height))
    for i, frame in enumerate(sample):
        strip.paste(frame, (i * width, 0))
    return strip.quantize(PALETTE_SIZE, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
