"""A page of judged samples that a pre-training leaves."""

from collections.abc import Sequence

from PIL import Image
from torch import Tensor

from flowrl.media.pictures import to_image

BORDER = 3  # pixels of a frame
RIGHT, WRONG = (0, 170, 0), (220, 0, 0)


def framed_sheet(
    samples: Sequence[Tensor], right: Sequence[bool], columns: int, scale: int
) -> Image.Image:
    """Samples [3 h w] of one size in 0..1, enlarged, in a green frame if right, else in a red one.

    `right` may be longer than `samples`.
    """
    tiles = []
    for sample, good in zip(samples, right[: len(samples)], strict=True):
        image = to_image(sample)
        image = image.resize((scale * image.width, scale * image.height), Image.Resampling.NEAREST)
        size = (image.width + 2 * BORDER, image.height + 2 * BORDER)
        frame = Image.new("RGB", size, RIGHT if good else WRONG)
        frame.paste(image, (BORDER, BORDER))
        tiles.append(frame)
    width, height = tiles[0].size
    page = Image.new("RGB", (columns * width, -(-len(tiles) // columns) * height))
    for i, tile in enumerate(tiles):
        page.paste(tile, (i % columns * width, i // columns * height))
    return page
