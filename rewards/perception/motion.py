"""Motion between frames by block matching: no weights, whole pixels of a reduced image."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from rewards.perception.media import LUMA

SIDE = 128  # pixels of the shorter side at which motion is measured; smaller videos keep theirs
BLOCK_SIDE = 8
REACH = 8  # the longest motion that is found, along each axis: 16 pixels of 256
STILL = 0.002  # of luma, per pixel of motion: between equally good matches the shortest counts


def reduced_luma(video: Float[Tensor, "f 3 h w"]) -> Float[Tensor, "f a b"]:
    """Luma in 0..1 of 8-bit frames, downscaled by averaging to SIDE and cropped to whole blocks."""
    whole = (video.float().nan_to_num(0.0).clamp(0, 1) * 255).round() / 255
    luma = torch.einsum("fchw,c->fhw", whole, torch.tensor(LUMA, device=video.device))
    scale = SIDE / min(luma.shape[-2:])
    if scale < 1:
        size = [round(side * scale) for side in luma.shape[-2:]]
        luma = functional.interpolate(luma[:, None], size, mode="area")[:, 0]
    h, w = (max(side // BLOCK_SIDE, 1) * BLOCK_SIDE for side in luma.shape[-2:])
    return luma[:, :h, :w]


def block_motion(
    first: Float[Tensor, "n h w"], second: Float[Tensor, "n h w"]
) -> Float[Tensor, "n b 2"]:
    """Displacement (down, right) in pixels from each block of `first` to its best match in
    `second`."""
    return _best(lambda down, right: (first, _moved(second, down, right)))


def middle_error(
    first: Float[Tensor, "n h w"], middle: Float[Tensor, "n h w"], last: Float[Tensor, "n h w"]
) -> Float[Tensor, " n"]:
    """Mean absolute difference between `middle` and the frame halfway between its neighbours.

    Each block is predicted as the mean of the two most similar blocks displaced by opposite amounts
    in the two neighbours; `middle` does not affect the choice.
    """

    def pair_at(down: int, right: int) -> tuple[Tensor, Tensor]:
        return _moved(first, -down, -right), _moved(last, down, right)

    moved = _best(pair_at).long()
    error = torch.zeros(len(first), moved.shape[1], device=first.device)
    for down, right in moved.flatten(0, 1).unique(dim=0).tolist():
        a, b = pair_at(down, right)
        difference = _blocks(((a + b) / 2 - middle).abs())
        chosen = (moved == torch.tensor([down, right], device=moved.device)).all(-1)
        error = torch.where(chosen, difference, error)
    return error.mean(1)


def _best(
    pair_at: Callable[[int, int], tuple[Float[Tensor, "n h w"], Float[Tensor, "n h w"]]],
) -> Float[Tensor, "n b 2"]:
    """The shift with the smallest difference for each block; of equal ones the shortest."""
    shifts = _shifts()
    a, b = pair_at(*shifts[0])
    least = _blocks((a - b).abs())
    offsets = torch.zeros(*least.shape, 2, device=least.device)
    for down, right in shifts[1:]:
        a, b = pair_at(down, right)
        cost = _blocks((a - b).abs()) + STILL * (down**2 + right**2) ** 0.5
        better = cost < least
        least = torch.where(better, cost, least)
        offset = torch.tensor([down, right], dtype=offsets.dtype, device=offsets.device)
        offsets = torch.where(better[..., None], offset, offsets)
    return offsets


def _shifts() -> list[tuple[int, int]]:
    span = range(-REACH, REACH + 1)
    return sorted(((d, r) for d in span for r in span), key=lambda s: (s[0] ** 2 + s[1] ** 2, s))


def _moved(frames: Float[Tensor, "n h w"], down: int, right: int) -> Float[Tensor, "n h w"]:
    """The frames shifted by (down, right); beyond the edge, its pixels repeat."""
    h, w = frames.shape[-2:]
    rows = (torch.arange(h, device=frames.device) + down).clamp(0, h - 1)
    columns = (torch.arange(w, device=frames.device) + right).clamp(0, w - 1)
    return frames[:, rows][:, :, columns]


def _blocks(values: Float[Tensor, "n h w"]) -> Float[Tensor, "n b"]:
    side = min(BLOCK_SIDE, *values.shape[-2:])
    return functional.avg_pool2d(values[:, None], side).flatten(1)
