"""Pieces of a page: HTML and SVG text without scripts or external files.

All text from outside is escaped here.
"""

import base64
import io
import math
from collections.abc import Sequence
from html import escape

from PIL import Image
from torch import Tensor

from flowrl.evaluation.agreement import MeanInterval
from rewards.perception.media import to_pil

LARGEST = 192  # pixels of an image's longer side on the page


def table_number(x: float, digits: int = 1, scale: float = 100.0) -> str:
    """A share in percent (or `scale` times a number); a dash for NaN."""
    return f"{scale * x:.{digits}f}" if math.isfinite(x) else "&ndash;"


def dots(rows: Sequence[tuple[str, MeanInterval]], mark: float | None = 0.5) -> str:
    """Rows of name, dot with its interval on 0..1, and number. `mark` is a dashed line.

    The axis begins and ends at tens of percent around all intervals.
    """
    ends = [x for _, e in rows for x in (e.value, e.low, e.high) if math.isfinite(x)]
    low = math.floor(10 * min([*ends, mark or 1.0]) + 1e-9) / 10
    high = math.ceil(10 * max([*ends, mark or 0.0]) - 1e-9) / 10
    high = max(high, low + 0.1)

    def at(x: float) -> str:
        return f"{100 * (x - low) / (high - low):.2f}%"

    lines = []
    for name, e in rows:
        track = "" if mark is None else f'<i class="half" style="--at:{at(mark)}"></i>'
        if math.isfinite(e.low):
            track += f'<i class="span" style="--low:{at(e.low)};--high:{at(e.high)}"></i>'
        if math.isfinite(e.value):
            track += f'<i class="dot" style="--at:{at(e.value)}"></i>'
        span = f"{table_number(e.low)} &ndash; {table_number(e.high)}"
        text = f"<b>{table_number(e.value)}</b> <small>{span}</small>"
        lines.append(
            f'<div class="row"><span>{escape(name)}</span><div class="track">{track}</div>'
            f"<span>{text}</span></div>"
        )
    axis = f"<span>{100 * low:.0f} %</span><span>{100 * high:.0f} %</span>"
    lines.append(f'<div class="row"><span></span><div class="axis">{axis}</div><span></span></div>')
    return "\n".join(lines)


def section(title: str, note: str, body: str) -> str:
    """A part of the page, of HTML: its title, a note on how to read it, and its content."""
    return f'<h2>{title}</h2><p class="note">{note}</p>{body}'


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls by itself. Cells are HTML, wrapped in <td> if they are not yet."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = [
        "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row)
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def matrix(names: Sequence[str], share: Sequence[Sequence[float]]) -> str:
    """A table of shares of agreement: the farther above one half, the deeper the cell's colour."""
    rows = []
    for i, name in enumerate(names):
        cells = [f"<td>{escape(name)}</td>"]
        for j, x in enumerate(share[i]):
            depth = 0 if i == j or not math.isfinite(x) else max(0.0, 2 * x - 1) * 70
            style = f"background:color-mix(in srgb, var(--mark) {depth:.0f}%, transparent)"
            cells.append(f'<td style="{style}">{"" if i == j else table_number(x, 0)}</td>')
        rows.append(cells)
    return html_table(["", *names], rows)


def reliability(said: Sequence[float], seen: Sequence[float], count: Sequence[int]) -> str:
    """A plot of predicted (across) against observed shares (up); a dot's area is its pairs."""
    size, edge = 200, 28
    span, most = size - edge - 8, max(count, default=1)

    def x(v: float) -> float:
        return edge + span * v

    def y(v: float) -> float:
        return 8 + span * (1 - v)

    points = list(zip(said, seen, count, strict=True))
    marks = [
        f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="{2 + 7 * (c / most) ** 0.5:.1f}" '
        f'fill="var(--soft)" stroke="var(--mark)"/>'
        for a, b, c in points
    ]
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b, _ in points)
    frame = f'x="{x(0.0)}" y="{y(1.0)}" width="{span}" height="{span}"'
    ticks = "".join(
        f'<text x="{x(v):.1f}" y="{size - 14}" text-anchor="middle">{v:g}</text>'
        f'<text x="{edge - 4}" y="{y(v) + 3:.1f}" text-anchor="end">{v:g}</text>'
        for v in (0.0, 0.5, 1.0)
    )
    return (
        f'<svg viewBox="0 0 {size} {size}" width="{size}" height="{size}" role="img" '
        f'aria-label="reliability diagram"><rect {frame} fill="none" stroke="var(--line)"/>'
        f'<line x1="{x(0.0)}" y1="{y(0.0)}" x2="{x(1.0)}" y2="{y(1.0)}" stroke="var(--pale)" '
        f'stroke-dasharray="3 3"/><polyline points="{path}" fill="none" stroke="var(--mark)"/>'
        f'{"".join(marks)}{ticks}<text x="{x(0.5)}" y="{size - 2}" text-anchor="middle">said'
        f"</text></svg>"
    )


def html_image(media: Tensor, alt: str) -> str:
    """An image [3 h w], or the middle frame of a video [f 3 h w], inside the page."""
    image = to_pil(media if media.ndim == 3 else media[len(media) // 2])
    small = max(image.size) <= 96
    if max(image.size) > LARGEST:
        scale = LARGEST / max(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    store = io.BytesIO()
    if small:
        image.save(store, "PNG", optimize=True)
    else:
        image.save(store, "JPEG", quality=88)
    kind, code = "png" if small else "jpeg", base64.b64encode(store.getvalue()).decode()
    look = ' class="small"' if small else ""
    return f'<img{look} src="data:image/{kind};base64,{code}" alt="{escape(alt, quote=True)}">'
