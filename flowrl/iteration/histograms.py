"""Histograms of an iteration's advantages and log-ratios, over all processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.likelihoods.rows import Rows, TransitionRows
from flowrl.losses.base import Metric, metric_values
from samplers.host import on_host, wide

BINS = 64
_BAR, _TALL, _TEXT = 8, 72, 16  # pixels: a bin's width, the highest bin, a line of text
_Gather = Callable[[Any], Sequence[Any]]  # one value per process


class Histogram(NamedTuple):
    """Counts in bins of equal width, and moments of the values."""

    counts: NDArray[np.int64]  # [BINS]
    edges: NDArray[np.float64]  # [BINS + 1]
    number: int
    total: float
    squares: float


@dataclass
class IterationValues:
    """Values of all entries in the loss. Names end with the noise level if a step has one."""

    parts: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, chunk: Rows, metrics: Mapping[str, Metric]) -> None:
        """Add a chunk's advantages and the log-ratios from its loss."""
        level = (
            f"/noise_{float(on_host(chunk.sigma)[0]):.3f}"
            if isinstance(chunk, TransitionRows)
            else ""
        )
        self._keep(f"histogram/advantage{level}", chunk.advantage, chunk.mask)
        if "ratio" in metrics:
            log_ratio = wide(metric_values(metrics["ratio"]).detach()).clamp(min=1e-30).log()
            self._keep(f"histogram/log_ratio{level}", log_ratio, chunk.mask)

    def _keep(self, name: str, values: Tensor, mask: Tensor) -> None:
        entries = values.detach().expand(mask.shape).cpu()[on_host(mask)].double()
        if len(entries):
            self.parts.setdefault(name, []).append(entries)

    def histograms(self, gather: _Gather) -> dict[str, Histogram]:
        """Count the finite values of all processes in common bins. All processes call this."""
        local: dict[str, NDArray[np.float64]] = {}
        for name, parts in self.parts.items():
            joined = np.concatenate([part.numpy() for part in parts])
            if len(finite := joined[np.isfinite(joined)]):
                local[name] = finite
        bounds_by_process: list[Mapping[str, tuple[float, float]]] = list(
            gather({name: (float(v.min()), float(v.max())) for name, v in local.items()})
        )
        ranges: dict[str, tuple[float, float]] = {}
        for bounds in bounds_by_process:
            for name, (low, high) in bounds.items():
                lowest, highest = ranges.get(name, (low, high))
                ranges[name] = min(low, lowest), max(high, highest)
        histograms_by_process: list[Mapping[str, Histogram]] = list(
            gather({name: _counted(values, ranges[name]) for name, values in local.items()})
        )
        return {
            name: _summed([e[name] for e in histograms_by_process if name in e])
            for name in sorted(ranges)
        }


def _counted(values: NDArray[np.float64], bounds: tuple[float, float]) -> Histogram:
    counts, edges = np.histogram(values, BINS, bounds)
    return Histogram(counts, edges, len(values), float(values.sum()), float((values**2).sum()))


def _summed(parts: Sequence[Histogram]) -> Histogram:
    counts = np.sum([part.counts for part in parts], 0)
    numbers = [sum(column) for column in zip(*(part[2:] for part in parts), strict=True)]
    return Histogram(counts, parts[0].edges, int(numbers[0]), numbers[1], numbers[2])


def histogram_image(histograms: Mapping[str, Histogram]) -> Image.Image:
    """One RGB image of all histograms, one below the other: a line with the name, the number of
    values, minimum and maximum, and a bar per bin, relative to the fullest bin."""
    each_tall = _TALL + 2 * _TEXT
    image = Image.new("RGB", (BINS * _BAR, max(1, len(histograms)) * each_tall), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default()
    for index, (name, histogram) in enumerate(histograms.items()):
        top, low, high = index * each_tall, histogram.edges[0], histogram.edges[-1]
        line = f"{name}: {histogram.number} values from {low:.4g} to {high:.4g}"
        draw.text((2, top), line, "black", font)
        bottom = top + _TEXT + _TALL
        for bin_, share in enumerate(histogram.counts / max(1, histogram.counts.max())):
            if share > 0:
                high_end = bottom - max(1, round(float(share) * _TALL))
                draw.rectangle((bin_ * _BAR, high_end, (bin_ + 1) * _BAR - 2, bottom), "steelblue")
    return image
