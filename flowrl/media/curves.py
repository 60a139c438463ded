"""Curves over iterations as a PNG, one small panel each, for pages that show no scripts."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from flowrl.media.fonts import load_fonts

CurvePoints = Sequence[tuple[float, float]]  # (iteration, value), in order
_WIDE, _HIGH, _EDGE, _COLUMNS = 420, 220, 68, 2
_INK, _GREY, _LINE = (24, 24, 27), (161, 161, 170), (29, 78, 216)
_SIZE = 14


def save_curves(curves: Mapping[str, CurvePoints], path: Path) -> None:
    """Draw each curve with the names and ends of its axes. Values that are not finite are gaps.

    ValueError without any curve of finite values.
    """
    kept = {name: [p for p in c if math.isfinite(p[1])] for name, c in curves.items()}
    kept = {name: curve for name, curve in kept.items() if curve}
    if not kept:
        raise ValueError("no curve has a finite value")
    columns = min(_COLUMNS, len(kept))
    rows = -(-len(kept) // columns)
    page = Image.new("RGB", (columns * _WIDE, rows * _HIGH), "white")
    for i, (name, curve) in enumerate(kept.items()):
        _panel(ImageDraw.Draw(page), (i % columns * _WIDE, i // columns * _HIGH), name, curve)
    page.save(path)


def _panel(pen: ImageDraw.ImageDraw, at: tuple[int, int], name: str, curve: CurvePoints) -> None:
    fonts, (left, top) = load_fonts(_SIZE), at
    box = (left + _EDGE, top + 32, left + _WIDE - 16, top + _HIGH - 30)
    xs, ys = [x for x, _ in curve], [y for _, y in curve]
    (x0, x1), (y0, y1) = _span(xs), _span(ys)
    points = [
        (
            box[0] + (x - x0) / (x1 - x0) * (box[2] - box[0]),
            box[3] - (y - y0) / (y1 - y0) * (box[3] - box[1]),
        )
        for x, y in curve
    ]
    pen.rectangle(box, outline=_GREY)
    fonts.draw(pen, (left + _EDGE, top + 8), name, _INK)
    for value, y in ((y1, box[1] - 6), (y0, box[3] - 10)):
        fonts.draw(pen, (left + 4, y), f"{value:.3g}", _INK)
    for value, x in ((x0, box[0]), (x1, box[2] - 24)):
        fonts.draw(pen, (x, box[3] + 6), f"{value:.0f}", _INK)
    if len(points) > 1:
        pen.line(points, fill=_LINE, width=2)
    for x, y in points if len(points) < 30 else points[-1:]:
        pen.ellipse((x - 3, y - 3, x + 3, y + 3), fill=_LINE)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
