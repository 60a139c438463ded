"""Edits that do not improve an image, so no reward should favour them.

A policy learns every edit that its reward favours: this is reward hacking. Sizes are
shares of the image's shorter side, so that a thumbnail and a photograph change by the same amount.
"""

import io
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont
from torch import Tensor

from flowrl.evaluation.agreement import MeanInterval, Resamples, Values, preferred
from rewards.perception.media import to_pil, to_tensor

STAMPED = "best quality"

Rng = np.random.Generator
Edit = Callable[[Image.Image, Rng], Image.Image]


def blur(image: Image.Image, _rng: Rng) -> Image.Image:
    """Gaussian blur with a standard deviation of 1 % of the shorter side, at least 0.6 pixels."""
    return image.filter(ImageFilter.GaussianBlur(max(0.6, 0.01 * min(image.size))))


def noise(image: Image.Image, rng: Rng) -> Image.Image:
    """White noise with a standard deviation of 0.04 of the full range, different for every
    sample."""
    values = np.asarray(image).astype(np.float32)
    values = values + rng.normal(0, 0.04 * 255, values.shape)
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))


def crop(image: Image.Image, _rng: Rng) -> Image.Image:
    """Crop the central 80 % of both sides, and resize to the original size."""
    width, height = image.size
    box = (width * 0.1, height * 0.1, width * 0.9, height * 0.9)
    return image.resize((width, height), Image.Resampling.BICUBIC, box=box)


def sharpen(image: Image.Image, _rng: Rng) -> Image.Image:
    """Unsharp mask of 150 % with a radius of 1 % of the shorter side, at least one pixel."""
    return image.filter(ImageFilter.UnsharpMask(max(1.0, 0.01 * min(image.size)), 150, 0))


def jpeg(image: Image.Image, _rng: Rng) -> Image.Image:
    """JPEG compression at quality 30."""
    store = io.BytesIO()
    image.save(store, "JPEG", quality=30)
    return Image.open(store).convert("RGB")


def text(image: Image.Image, _rng: Rng) -> Image.Image:
    """The words "best quality" in white on a dark band along the lower edge."""
    width, height = image.size
    band = max(7, height // 8)
    image = image.copy()
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, height - band, width, height), fill=(20, 20, 20))
    font = ImageFont.load_default(max(5.0, 0.75 * band))
    pen.text((width / 2, height - band / 2), STAMPED, (255, 255, 255), font, anchor="mm")
    return image


def saturate(image: Image.Image, _rng: Rng) -> Image.Image:
    """Increase the distance of colours from gray by a factor of 1.6."""
    return ImageEnhance.Color(image).enhance(1.6)


def brighten(image: Image.Image, _rng: Rng) -> Image.Image:
    """Brighten by 15 %."""
    return ImageEnhance.Brightness(image).enhance(1.15)


EDITS: dict[str, Edit] = {
    f.__name__: f for f in (blur, noise, crop, sharpen, jpeg, text, saturate, brighten)
}


def change(edit: Edit, seed: int) -> Callable[[Tensor, int], Tensor]:
    """Return a function (media, row) that edits an image [3 h w] or every frame of a video [f 3 h
    w].

    The same seed and row give the same result."""

    def changed(media: Tensor, row: int) -> Tensor:
        frames = media if media.ndim == 4 else media[None]
        rng = np.random.default_rng([seed, row])
        edited = torch.stack([to_tensor(edit(to_pil(frame), rng)) for frame in frames])
        return edited if media.ndim == 4 else edited[0]

    return changed


class Robustness(NamedTuple):
    """Effect of an edit on a reward. Shares refer to pairs with a human winner."""

    shift: MeanInterval  # mean (changed - clean score), in units of `spread`
    raised: float  # share of samples that score higher once changed
    overtakes: MeanInterval  # share of pairs, of those decided rightly, whose changed loser wins
    n: int  # of samples that were changed and scored


def spread(score: Float[np.ndarray, " n"], group: Int[np.ndarray, " n"]) -> float:
    """Standard deviation of scores within groups (samples of one prompt), pooled over groups.

    Computed over all samples if no group has two scored samples. A group's advantages are in this
    unit, so a shift of 1 equals a typical difference between samples.
    """
    scored = ~np.isnan(score)
    score, group = score[scored], np.unique(group[scored], return_inverse=True)[1]
    if len(score) < 2:
        return float("nan")
    count = np.bincount(group)
    centre = np.bincount(group, score) / count
    free = len(score) - len(count)
    if free == 0:
        return float(score.std(ddof=1))
    return float((np.square(score - centre[group]).sum() / free) ** 0.5)


class ScoredPairs(NamedTuple):
    """Pairs (winner, loser) as rows of scores, and the index of their prompt."""

    winner: Int[np.ndarray, " p"]
    loser: Int[np.ndarray, " p"]
    cluster: Int[np.ndarray, " p"]

    @classmethod
    def of(
        cls,
        a: Int[np.ndarray, " p"],
        b: Int[np.ndarray, " p"],
        label: Values,
        cluster: Int[np.ndarray, " p"],
    ) -> "ScoredPairs":
        """Pairs that have a human winner."""
        people = preferred(label)
        named = people != 0
        first = people[named] > 0
        a, b = a[named], b[named]
        return cls(np.where(first, a, b), np.where(first, b, a), cluster[named])


def robustness(
    clean: Float[np.ndarray, " n"],
    changed: Mapping[str, Float[np.ndarray, " n"]],
    pairs: ScoredPairs,
    scale: float,
    resamples: Resamples,
) -> dict[str, Robustness]:
    """Effect of each edit. `changed` is NaN for unedited samples; `unit` is `spread`."""
    owner = np.zeros(len(clean), int)
    owner[pairs.loser], owner[pairs.winner] = pairs.cluster, pairs.cluster
    right = clean[pairs.winner] > clean[pairs.loser]
    effects = {}
    for name, score in changed.items():
        moved = score - clean
        scored = ~np.isnan(moved)
        # a reward that gives all samples one score has no unit: any shift is then infinite
        with np.errstate(divide="ignore", invalid="ignore"):
            shift = resamples.estimate(np.where(moved == 0, 0.0, moved / scale), owner)
        beats = (score[pairs.loser] > clean[pairs.winner]).astype(float)
        counted = right & ~np.isnan(score[pairs.loser])
        overtakes = resamples.share(np.where(counted, beats, np.nan), pairs.cluster)
        raised = float((moved[scored] > 0).mean()) if scored.any() else float("nan")
        effects[name] = Robustness(shift, raised, overtakes, int(scored.sum()))
    return effects
