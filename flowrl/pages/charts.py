"""Charts as SVG inside a page: small, printable, and readable without a script."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from markupsafe import Markup

from flowrl.pages.stack import from_template, number

WIDE, HIGH = 400.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 10.0, 10.0, 26.0
MOST_POINTS = 300  # of a line; more are averaged in neighbours
LINE_COLOURS = ("#0072b2", "#d55e00", "#008a64", "#a8558a", "#9a7000", "#6b7280")
FLAT = 1e-5  # a range below this share of the values is a flat line, and not zoomed into
SHEET_COLUMNS, SHEET_TITLE = 2, 24.0  # of a file of charts; the height of a title
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """A series of (iteration, value). `band` has the lower and upper bounds of each point."""

    name: str
    points: Points
    band: Sequence[tuple[float, float]] = ()
    marks: bool = False  # a dot at each point
    colour: int | None = None  # a place in LINE_COLOURS; by default the line's

    def thinned(self) -> "Curve":
        """The line reduced to at most `MOST_POINTS` points, each the mean of neighbouring
        points."""
        size = -(-len(self.points) // MOST_POINTS)
        if size <= 1:
            return self
        groups = [self.points[i : i + size] for i in range(0, len(self.points), size)]
        points = [(g[-1][0], sum(y for _, y in g) / len(g)) for g in groups]
        band = [
            self.band[min(i + size, len(self.band)) - 1] for i in range(0, len(self.band), size)
        ]
        return replace(self, points=points, band=band)


@dataclass(frozen=True)
class Chart:
    """Lines over the same iterations. `code` is the metric's name in metrics.jsonl.

    base     a dashed horizontal line, such as the base model's score
    stacked  stacked areas, for parts of a sum
    """

    title: str
    lines: Sequence[Curve]
    code: str = ""
    unit: str = ""
    base: float | None = None
    stacked: bool = False

    @property
    def empty(self) -> bool:
        return not any(line.points for line in self.lines)

    @property
    def constant(self) -> bool:
        """Whether all lines are constant."""
        return all(len({y for _, y in line.points}) <= 1 for line in self.lines)

    @property
    def figure(self) -> Markup:
        """A figure with title, newest value, chart and legend; empty without points."""
        if self.empty:
            return Markup("")
        return from_template("chart.html", {"chart": self, "plot": Plot(self)})


def chart_sheet(charts: Sequence[Chart]) -> str:
    """A grid of charts as one SVG file, for pages that show only images.

    ValueError if no curve has values."""
    filled = [chart for chart in charts if not chart.empty]
    if not filled:
        raise ValueError("no curve has a value")
    columns, step = min(SHEET_COLUMNS, len(filled)), HIGH + SHEET_TITLE
    placed = [
        (chart, Plot(chart), i % columns * WIDE, i // columns * step)
        for i, chart in enumerate(filled)
    ]
    size = {"wide": columns * WIDE, "high": -(-len(filled) // columns) * step, "title": SHEET_TITLE}
    return str(from_template("sheet.svg", {"placed": placed, **size}))


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Shape:
    """A line or area of a chart: the points of its path and band, and its dots."""

    name: str
    colour: int
    path: str
    band: str
    dots: Sequence[tuple[float, float]]


class Plot:
    """A chart in drawing coordinates."""

    box = (LEFT, WIDE - RIGHT, TOP, HIGH - BOTTOM)
    size = (WIDE, HIGH)
    palette = LINE_COLOURS

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        self.lines = [line.thinned() for line in chart.lines if line.points]
        xs = [x for line in self.lines for x, _ in line.points]
        self.left, self.right = min(xs), max(max(xs), min(xs) + 1)
        ys = list(self._values())
        low, high = min(ys), max(ys)
        if high - low <= FLAT * abs(high):
            low, high = (low - abs(low) / 10, high + abs(high) / 10) if high else (0.0, 1.0)
        self.ticks = round_ticks(low, high, 4)
        self.low, self.high = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def _values(self) -> Iterator[float]:
        if self.chart.stacked:
            yield 0.0
            yield from (sum(column) for column in zip(*self._columns, strict=True))
            return
        for line in self.lines:
            yield from (y for _, y in line.points)
            yield from (y for bound in line.band for y in bound)
        if self.chart.base is not None:
            yield self.chart.base

    def x(self, value: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * (value - self.left) / (self.right - self.left)

    def y(self, value: float) -> float:
        return TOP + (HIGH - TOP - BOTTOM) * (self.high - value) / (self.high - self.low)

    @property
    def rows(self) -> Iterator[Tick]:
        step = self.ticks[1] - self.ticks[0]
        return (Tick(self.y(tick), _tick(tick, step)) for tick in self.ticks)

    @property
    def columns(self) -> Iterator[Tick]:
        whole = [t for t in round_ticks(self.left, self.right, 5) if t == int(t)]
        inside = [t for t in whole if self.left <= t <= self.right]
        return (Tick(self.x(t), f"{t:,.0f}") for t in inside or [self.left, self.right])

    @cached_property
    def _columns(self) -> list[list[float]]:
        """The values of each line at the union of all iterations; 0 where a line has no value."""
        xs = sorted({x for line in self.lines for x, _ in line.points})
        lines = [dict(line.points) for line in self.lines]
        return [[values.get(x, 0.0) for x in xs] for values in lines]

    @property
    def shapes(self) -> Iterator[Shape]:
        if self.chart.stacked:
            yield from self._areas()
            return
        for i, line in enumerate(self.lines):
            pairs = list(zip(line.points, line.band, strict=True)) if line.band else []
            upper = [(x, high) for (x, _), (_, high) in pairs]
            lower = [(x, low) for (x, _), (low, _) in reversed(pairs)]
            dots = line.points if line.marks or len(line.points) == 1 else ()
            places = [(self.x(x), self.y(y)) for x, y in dots]
            band = self._path([*upper, *lower])
            yield Shape(line.name, _colour(line, i), self._path(line.points), band, places)

    def _areas(self) -> Iterator[Shape]:
        xs = sorted({x for line in self.lines for x, _ in line.points})
        below = [0.0] * len(xs)
        for i, (line, column) in enumerate(zip(self.lines, self._columns, strict=True)):
            above = [a + b for a, b in zip(below, column, strict=True)]
            outline = [*zip(xs, above, strict=True), *reversed(list(zip(xs, below, strict=True)))]
            yield Shape(line.name, _colour(line, i), "", self._path(outline), ())
            below = above

    def _path(self, points: Points) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    @property
    def data(self) -> str:
        """Numbers for the script that shows them at the pointer or with the arrow keys."""
        lines = [
            {"name": line.name, "points": [[x, float(f"{y:.5g}")] for x, y in line.points]}
            for line in self.lines
        ]
        view: dict[str, Any] = {"range": [self.left, self.right], "lines": lines}
        return json.dumps(view | {"box": [LEFT, WIDE - RIGHT, WIDE]})

    @property
    def newest(self) -> float:
        """Newest value of the first line, or of the sum of all lines."""
        if self.chart.stacked:
            return sum(column[-1] for column in self._columns)
        return self.lines[0].points[-1][1]

    @property
    def words(self) -> str:
        """Text description of the chart for screen readers."""
        sentences = []
        for line in self.lines:
            (x0, y0), (x1, y1) = line.points[0], line.points[-1]
            ends = f"from {number(y0)} at iteration {x0:.0f} to {number(y1)} at iteration {x1:.0f}"
            low, high = (f(y for _, y in line.points) for f in (min, max))
            sentences.append(f"{line.name} {ends}, between {number(low)} and {number(high)}")
        unit = f" in {self.chart.unit}" if self.chart.unit else ""
        return f"{self.chart.title}{unit}: {'; '.join(sentences)}"


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers around [low, high], about `most` of them: multiples of 1, 2 or 5 times a power
    of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.8)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * n for n in range(first, last + 1)]


def _tick(value: float, step: float) -> str:
    """The value with enough digits to distinguish it from the next tick."""
    if abs(value) < step / 2:
        return "0"
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    size = math.floor(math.log10(abs(value)) + 1e-9)
    if -3 <= size < 5 and places <= 5:
        return f"{value:,.{places}f}".replace("-", "\N{MINUS SIGN}")
    return number(value, max(1, places + size + 1))


def _colour(line: Curve, index: int) -> int:
    return (index if line.colour is None else line.colour) % len(LINE_COLOURS)
