"""Curve charts as SVG text: small, printable, and readable without a script."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from flowrl.pages.html import number

WIDE, HIGH = 400.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 10.0, 10.0, 26.0
MOST_POINTS = 300  # of a line; more are averaged in neighbours
LINE_COLOURS = 6
FLAT = 1e-5  # a range below this share of the values is a flat line, and not zoomed into
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """A series of (iteration, value). `band` has the lower and upper bound of each point."""

    name: str
    points: Points
    band: Sequence[tuple[float, float]] = ()
    marks: bool = False  # a dot at each point
    colour: int = 0  # 0 to LINE_COLOURS - 1; by default the line's place

    def thinned(self) -> "Curve":
        """The line with at most `MOST_POINTS` points, each the mean of neighbours."""
        size = -(-len(self.points) // MOST_POINTS)
        if size <= 1:
            return self
        groups = [self.points[i : i + size] for i in range(0, len(self.points), size)]
        points = [(g[-1][0], sum(y for _, y in g) / len(g)) for g in groups]
        band = [
            self.band[min(i + size, len(self.band)) - 1] for i in range(0, len(self.band), size)
        ]
        return Curve(self.name, points, band, self.marks, self.colour)


@dataclass(frozen=True)
class Chart:
    """Lines over the same iterations. `code` is the metric's name in metrics.jsonl.

    base     a dashed line across, such as the base model's score
    stacked  areas upon each other, for parts of a sum
    """

    title: str
    lines: Sequence[Curve]
    code: str = ""
    unit: str = ""
    base: float | None = None
    stacked: bool = False


def chart_figure(chart: Chart) -> str:
    """A figure with title, newest value, chart and legend."""
    lines = [line.thinned() for line in chart.lines if line.points]
    if not lines:
        return ""
    scale = Axes.of(chart, lines)
    body = [*_axes(scale), *_base(chart, scale)]
    body += list(_areas(lines, scale)) if chart.stacked else list(_curves(lines, scale))
    body.append(f'<line class="cursor" y1="{TOP}" y2="{HIGH - BOTTOM}" x1="-9" x2="-9"/>')
    words = [f"<code>{escape(chart.code)}</code>" if chart.code else "", escape(chart.unit)]
    below = f"<small>{', '.join(word for word in words if word)}</small>"
    kind = "chart stacked" if chart.stacked else "chart"
    data = escape(json.dumps(_data(lines, scale)), quote=True)
    return (
        f'<figure class="{kind}" data-chart="{data}"><figcaption><b>{escape(chart.title)}</b>'
        f'<output aria-live="polite">{_last(chart, lines)}</output>{below}</figcaption>'
        f'<svg viewBox="0 0 {WIDE:g} {HIGH:g}" role="img" tabindex="0" '
        f'aria-label="{escape(_words(chart, lines), quote=True)}">{"".join(body)}</svg>'
        f"{_legend(lines) if len(lines) > 1 else ''}</figure>"
    )


@dataclass(frozen=True)
class Axes:
    """The ranges of both axes, and the place of a value in the drawing."""

    left: float
    right: float
    low: float
    high: float
    ticks: Sequence[float]

    @classmethod
    def of(cls, chart: Chart, lines: Sequence[Curve]) -> "Axes":
        xs = [x for line in lines for x, _ in line.points]
        ys = [y for line in lines for _, y in line.points]
        ys += [y for line in lines for bound in line.band for y in bound]
        ys += [] if chart.base is None else [chart.base]
        if chart.stacked:
            ys = [0.0, *(sum(column) for column in zip(*_columns(lines), strict=True))]
        low, high = min(ys), max(ys)
        if high - low <= FLAT * abs(high):
            low, high = (low - abs(low) / 10, high + abs(high) / 10) if high else (0.0, 1.0)
        ticks = round_ticks(low, high, 4)
        return cls(
            min(xs), max(max(xs), min(xs) + 1), min(low, ticks[0]), max(high, ticks[-1]), ticks
        )

    def x(self, value: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * (value - self.left) / (self.right - self.left)

    def y(self, value: float) -> float:
        return TOP + (HIGH - TOP - BOTTOM) * (self.high - value) / (self.high - self.low)


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers around [low, high], about `most` of them: multiples of 1, 2 or 5 times a power
    of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.8)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * n for n in range(first, last + 1)]


def _axes(scale: Axes) -> Iterator[str]:
    step = scale.ticks[1] - scale.ticks[0]
    for tick in scale.ticks:
        y = scale.y(tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        text = _tick(tick, step)
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    whole = [t for t in round_ticks(scale.left, scale.right, 5) if t == int(t)]
    inside = [t for t in whole if scale.left <= t <= scale.right]
    for tick in inside or [scale.left, scale.right]:
        end = ' text-anchor="middle"'
        yield f'<text x="{scale.x(tick):.1f}" y="{HIGH - 8}"{end}>{tick:,.0f}</text>'


def _tick(value: float, step: float) -> str:
    """The value with as many digits as tell it from the next tick."""
    if abs(value) < step / 2:
        return "0"
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    size = math.floor(math.log10(abs(value)) + 1e-9)
    if -3 <= size < 5 and places <= 5:
        return f"{value:,.{places}f}".replace("-", "\N{MINUS SIGN}")
    return number(value, max(1, places + size + 1))


def _base(chart: Chart, scale: Axes) -> Iterator[str]:
    if chart.base is not None:
        y = scale.y(chart.base)
        ends = f'x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
        yield f'<line class="base" {ends}/>'
        yield f'<text x="{WIDE - RIGHT}" y="{y - 4:.1f}" text-anchor="end">base</text>'


def _curves(lines: Sequence[Curve], scale: Axes) -> Iterator[str]:
    for i, line in enumerate(lines):
        look = f"c{(line.colour or i) % LINE_COLOURS}"
        if line.band:
            pairs = list(zip(line.points, line.band, strict=True))
            upper = [(x, high) for (x, _), (_, high) in pairs]
            lower = [(x, low) for (x, _), (low, _) in reversed(pairs)]
            yield f'<polygon class="band {look}" points="{_path([*upper, *lower], scale)}"/>'
        yield f'<polyline class="line {look}" points="{_path(line.points, scale)}"/>'
        if line.marks or len(line.points) == 1:
            for x, y in line.points:
                at = f'cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}"'
                yield f'<circle class="mark {look}" {at} r="3"/>'


def _columns(lines: Sequence[Curve]) -> list[list[float]]:
    """The values of each line at all iterations of any of them; 0 where a line has none."""
    xs = sorted({x for line in lines for x, _ in line.points})
    known = [dict(line.points) for line in lines]
    return [[values.get(x, 0.0) for x in xs] for values in known]


def _areas(lines: Sequence[Curve], scale: Axes) -> Iterator[str]:
    xs = sorted({x for line in lines for x, _ in line.points})
    below = [0.0] * len(xs)
    for i, column in enumerate(_columns(lines)):
        above = [a + b for a, b in zip(below, column, strict=True)]
        outline = [*zip(xs, above, strict=True), *reversed(list(zip(xs, below, strict=True)))]
        yield f'<polygon class="area c{i % LINE_COLOURS}" points="{_path(outline, scale)}"/>'
        below = above


def _path(points: Points, scale: Axes) -> str:
    return " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)


def _data(lines: Sequence[Curve], scale: Axes) -> dict[str, object]:
    """The numbers for the script that shows them under the pointer or the arrow keys."""
    return {
        "range": [scale.left, scale.right],
        "box": [LEFT, WIDE - RIGHT, WIDE],
        "lines": [
            {"name": line.name, "points": [[x, float(f"{y:.5g}")] for x, y in line.points]}
            for line in lines
        ],
    }


def _last(chart: Chart, lines: Sequence[Curve]) -> str:
    """The newest value of the first line, or of the sum of all."""
    value = lines[0].points[-1][1]
    if chart.stacked:
        value = sum(column[-1] for column in _columns(lines))
    return number(value)


def _words(chart: Chart, lines: Sequence[Curve]) -> str:
    """The chart in words, for readers who do not see it."""
    parts = []
    for line in lines:
        (x0, y0), (x1, y1) = line.points[0], line.points[-1]
        ends = f"from {number(y0)} at iteration {x0:.0f} to {number(y1)} at iteration {x1:.0f}"
        low, high = (f(y for _, y in line.points) for f in (min, max))
        parts.append(f"{line.name} {ends}, between {number(low)} and {number(high)}")
    unit = f" in {chart.unit}" if chart.unit else ""
    return f"{chart.title}{unit}: {'; '.join(parts)}"


def _legend(lines: Sequence[Curve]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 22 8" aria-hidden="true"><line class="line c'
        f'{(line.colour or i) % LINE_COLOURS}" x1="0" x2="22" y1="4" y2="4"/></svg>'
        f'<span dir="auto">{escape(line.name)}</span></li>'
        for i, line in enumerate(lines)
    )
    return f'<ul class="legend">{items}</ul>'
