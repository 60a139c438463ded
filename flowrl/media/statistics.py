"""Cheap statistics of samples, to show how they change during training."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# what a statistic's name begins with, which no reward's does
PREFIXES = ("image/", "sound/", "sample/", "text/")
THUMBNAIL_SIZE = 64  # statistics are computed on images of at most this size


class Statistics(NamedTuple):
    """Statistics of n samples by name: means, and per-sample values if they exist."""

    means: dict[str, float]
    columns: dict[str, Tensor]  # [n]

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(next(iter(self.columns.values()), ()))

    def named(self, prefix: str) -> "Statistics":
        """The same statistics with a prefix before every name."""
        means = {f"{prefix}{name}": value for name, value in self.means.items()}
        return Statistics(means, {f"{prefix}{name}": c for name, c in self.columns.items()})


class WeightedMean(float):
    """A mean over other things than samples, such as tokens, with their number `count`."""

    count: int

    @classmethod
    def of(cls, value: float, count: int) -> "WeightedMean":
        mean = cls(value)
        mean.count = count
        return mean


def merged_means(parts: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Combine the means of all processes, weighted by their numbers of samples, or by its own count
    where a mean is a `WeightedMean`. Since all groups have the same size, this also weights pairs
    within groups correctly."""
    if len(parts) == 1:
        return dict(parts[0][0])
    names = dict.fromkeys(name for means, _ in parts for name in means)
    return {name: _merged([(means[name], n) for means, n in parts]) for name in names}


def _merged(parts: Sequence[tuple[float, int]]) -> float:
    counted = [(value, value.count if isinstance(value, WeightedMean) else n) for value, n in parts]
    total = sum(count for _, count in counted)
    mean = sum(value * count for value, count in counted) / max(total, 1)
    weighted = any(isinstance(value, WeightedMean) for value, _ in parts)
    return WeightedMean.of(mean, total) if weighted else mean


def image_statistics(media: Tensor, group: Tensor) -> Statistics:
    """Statistics of images [n 3 h w] or videos [n f 3 h w] in 0..1; groups are contiguous rows.

    brightness    mean luma, 0..1
    saturation    mean of (max - min) / max over channels, 0..1
    edges         share of pixels whose luma gradient is above 0.1
    entropy       entropy in bits of each image's histogram of 4 x 4 x 4 colours, averaged
    diversity     root mean square distance per pixel between two samples of one group; 0 if equal
    """
    images = media[:, media.shape[1] // 2] if media.ndim == 5 else media
    if max(images.shape[-2:]) > THUMBNAIL_SIZE:  # on their device, so that few pixels are copied
        scale = THUMBNAIL_SIZE / max(images.shape[-2:])
        images = F.interpolate(images, scale_factor=scale, mode="area")
    images = images.float().cpu()
    luma = (images * images.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1)
    high, low = images.amax(1), images.amin(1)
    across = (luma[:, :, 1:] - luma[:, :, :-1])[:, :-1]
    down = (luma[:, 1:] - luma[:, :-1])[:, :, :-1]
    maps = {
        "brightness": luma,
        "saturation": (high - low) / high.clamp(min=1e-6),
        "edges": (across.hypot(down) > 0.1).float(),
        "entropy": _entropy(images),
    }
    diversity, away = _diversity(images, group)
    means = {name: float(values.mean()) for name, values in maps.items()}
    columns = {name: values.flatten(1).mean(1) for name, values in maps.items()}
    return Statistics(means | {"diversity": diversity}, columns | {"diversity": away})


def _entropy(images: Tensor) -> Tensor:
    """Entropy of each image in bits [n 1]."""
    level = (images * 4).long().clamp(0, 3)
    code = (level[:, 0] * 16 + level[:, 1] * 4 + level[:, 2]).flatten(1)
    code += 64 * torch.arange(len(code))[:, None]
    counts = code.flatten().bincount(minlength=64 * len(code)).view(-1, 64).float()
    share = counts / counts.sum(1, keepdim=True)
    return -(share * share.clamp(min=1e-12).log2()).sum(1, keepdim=True)


def _diversity(images: Tensor, group: Tensor) -> tuple[float, Tensor]:
    """Mean distance of all pairs within groups, and of each sample to the others in its group
    [n]."""
    flat = images.flatten(1)
    _, sizes = torch.unique_consecutive(group, return_counts=True)
    distances, columns = [], []
    for part in flat.split(sizes.tolist()):
        pairs = torch.pdist(part)
        one, other = torch.triu_indices(len(part), len(part), 1, device=pairs.device)
        sums = pairs.new_zeros(len(part)).index_add(0, one, pairs).index_add(0, other, pairs)
        distances.append(pairs)
        columns.append(sums / max(len(part) - 1, 1))
    all_distances, scale = torch.cat(distances), flat.shape[1] ** 0.5
    return float(all_distances.mean()) / scale if len(all_distances) else 0.0, torch.cat(
        columns
    ) / scale


def tensor_statistics(media: Tensor, group: Tensor) -> Statistics:
    """Statistics of tensors [n ...]; groups are contiguous rows.

    mean, size  of a sample's numbers; size is their root mean square
    diversity   root mean square distance per number between two samples of one group
    """
    flat = media.flatten(1).float().cpu()
    diversity, away = _diversity(flat, group)
    columns = {"mean": flat.mean(1), "size": flat.square().mean(1).sqrt()}
    means = {name: float(column.mean()) for name, column in columns.items()}
    return Statistics(means | {"diversity": diversity}, columns | {"diversity": away})


def sound_statistics(media: Tensor, group: Tensor) -> Statistics:
    """Statistics of waveforms [n channels time]; groups are contiguous rows.

    level      root mean square, of full scale 1
    clipped    share of numbers at full scale or beyond, which a file cuts
    crossings  share of neighbours in time between which the first channel changes its sign
    diversity  root mean square distance per number between two samples of one group
    """
    waves = media.float().cpu()
    diversity, away = _diversity(waves.flatten(1), group)
    first = waves[:, 0] > 0
    columns = {
        "level": waves.square().flatten(1).mean(1).sqrt(),
        "clipped": (waves.abs() >= 1).float().flatten(1).mean(1),
        "crossings": (first[:, 1:] != first[:, :-1]).float().mean(1),
    }
    means = {name: float(column.mean()) for name, column in columns.items()}
    return Statistics(means | {"diversity": diversity}, columns | {"diversity": away})


def text_statistics(
    texts: Sequence[str], group: Tensor, lengths: Tensor, stopped: Tensor
) -> Statistics:
    """Statistics of n texts whose groups are contiguous.

    length     number of tokens, including the stop token
    stopped    share of texts that ended by themselves and were not cut off
    empty      share of texts with only white space
    distinct   share of pairs of a group whose texts differ: 0 if all are equal, 1 if all differ
    """
    _, sizes = torch.unique_consecutive(group, return_counts=True)
    at, differ, pairs, away = 0, 0, 0, []
    for size in sizes.tolist():
        part = texts[at : at + size]
        counts = Counter(part)
        pairs += size * (size - 1)
        differ += size * size - sum(count * count for count in counts.values())
        away += [(size - counts[text]) / max(size - 1, 1) for text in part]
        at += size
    columns = {
        "length": lengths.double(),
        "stopped": stopped.double(),
        "empty": torch.tensor([float(not text.strip()) for text in texts]).double(),
        "distinct": torch.tensor(away).double(),
    }
    means = {
        "length": float(columns["length"].mean()),
        "stopped": float(columns["stopped"].mean()),
        "empty": float(columns["empty"].sum()) / max(len(texts), 1),
        "distinct": differ / pairs if pairs else 0.0,
    }
    return Statistics(means, {name: column.cpu() for name, column in columns.items()})
