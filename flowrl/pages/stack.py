"""Shared code of pages: Jinja2 templates that escape every value, and number formats."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from flowrl.settings.words.scores import shown_score

# Obeyed by a terminal or an editor in the place of being shown. Characters that turn the direction
# of writing stay, as the text has them: page.css keeps them within their element.
_CONTROLS = re.compile("[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f-\\x9f]")
_PLAIN = 1e-3  # numbers from here to a million are written without an exponent
_MARKS = re.compile(r"([\\`*\[\]<>|~&]|:(?=//))")  # what Markdown may interpret inside a line


def number(x: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits; a dash for None."""
    if x is None or not math.isfinite(x):
        return "\N{EN DASH}"
    if x == int(x) and abs(x) < 1e9:
        text = f"{int(x):,}"
    elif _PLAIN <= abs(x) < 1e6:
        places = max(0, digits - 1 - math.floor(math.log10(abs(x))))
        text = f"{x:,.{places}f}"
    else:
        text = f"{x:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e")
    return text.replace("-", "\N{MINUS SIGN}")


def signed(x: float, digits: int = 3) -> str:
    return f"+{number(x, digits)}" if x > 0 else number(x, digits)


def sign(x: float | None) -> str:
    """CSS class for the sign of a number."""
    return "up" if (x or 0) > 0 else "down" if (x or 0) < 0 else "none"


def fixed(x: float, digits: int = 1, scale: float = 100.0) -> str:
    """A share in percent (or `scale` times a number) with `digits` decimals; a dash for NaN."""
    return f"{scale * x:.{digits}f}" if math.isfinite(x) else "\N{EN DASH}"


def duration_text(seconds: float) -> str:
    """Seconds in the two largest units that fit."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def code_span(value: object) -> Markup:
    """A value as code in Markdown, in which links, images and HTML have no effect."""
    text = " ".join(str(value).split())
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    inner = f" {text} " if text[:1] == "`" or text[-1:] == "`" else text
    return Markup(f"{fence}{inner}{fence}" if text else "")


def table_cell(value: Any) -> Markup:
    """A cell of a Markdown table; escapes bars, which end a cell even inside code."""
    text = str(value) if isinstance(value, Markup) else str(_markdown(str(value)))
    return Markup(re.sub(r"(?<!\\)\|", r"\\|", text))


def _markdown(value: Any) -> Any:
    """The value with its punctuation escaped, unless it already is Markdown."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return Markup(_MARKS.sub(r"\\\1", " ".join(value.split())))


def _engine(**more: Any) -> Environment:
    engine = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=select_autoescape(("html", "md", "svg")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **more,
    )
    filters = (
        number,
        shown_score,
        signed,
        sign,
        fixed,
        duration_text,
        count,
        code_span,
        table_cell,
    )
    engine.filters |= {function.__name__: function for function in filters}
    return engine


_PAGES, _CARDS = _engine(), _engine(finalize=_markdown)


def from_template(template: str, values: Mapping[str, object]) -> Markup:
    """Fill in a template of `templates/`. HTML, Markdown and control characters in values are
    escaped."""
    engine = _CARDS if template.endswith(".md") else _PAGES
    page = engine.get_template(template).render(values)
    return Markup(_CONTROLS.sub(lambda match: repr(match[0])[1:-1], page))


def varying(
    head: list[str], rows: list[list[Any]]
) -> tuple[list[str], list[list[Any]], list[tuple[str, Any]]]:
    """Head and rows of a table without constant columns (if there are several rows), and the
    constant columns as (name, value). The first column always stays."""
    same = [k for k in range(1, len(head)) if len(rows) > 1 and len({str(r[k]) for r in rows}) == 1]
    columns = [k for k in range(len(head)) if k not in same]
    return (
        [head[k] for k in columns],
        [[row[k] for k in columns] for row in rows],
        [(head[k], rows[0][k]) for k in same],
    )
