"""Pieces of a page as HTML text. All text from outside is escaped here."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from flowrl.pages.records import GivenImage, SampleRecord

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_PLAIN = 1e-3  # numbers from here to a million are written without an exponent


def number(x: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits; a dash for none."""
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


def duration_text(seconds: float) -> str:
    """Seconds in the two largest units that fit."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def count(n: int, unit: str) -> str:
    return f"{n:,} {unit}" if n == 1 else f"{n:,} {unit}s"


def page_section(anchor: str, title: str, note: str, body: str) -> str:
    """A section of the page. `note` and `body` are HTML."""
    lead = f'<p class="note">{note}</p>' if note else ""
    return (
        f'<section id="{anchor}" aria-labelledby="{anchor}-title">'
        f'<h2 id="{anchor}-title">{escape(title)}</h2>{lead}{body}</section>'
    )


def page_table(head: Sequence[str], rows: Iterable[Sequence[str]], label: str) -> str:
    """A table that scrolls by itself. Cells are HTML, the first of a row is its heading."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def media(sample: SampleRecord, about: str) -> str:
    """The image, video or text of a sample; `about` says in words which one it is."""
    if not sample.width:
        return f'<blockquote class="answer" dir="auto">{escape(sample.media)}</blockquote>'
    image = _image(sample, f"{about}: {sample.prompt}", sample.frames)
    if sample.frames == 1:
        return image
    style = f"--frames:{sample.frames};aspect-ratio:{sample.width}/{sample.height}"
    return f'<span class="clip" style="{style}">{image}</span>'


def given_images(sample: SampleRecord) -> str:
    """The images of the sample's row, such as the source of an edit, each with its column."""
    return "".join(
        f'<figure class="given">{_image(each, f"{each.name} of: {sample.prompt}")}'
        f"<figcaption><span>{escape(each.name)}</span></figcaption></figure>"
        for each in sample.given
    )


def _image(shown: SampleRecord | GivenImage, about: str, frames: int = 1) -> str:
    size = f'width="{shown.width * frames}" height="{shown.height}"'
    small = ' class="small"' if max(shown.width, shown.height) <= 96 else ""
    inside = shown.media.startswith("data:image/")  # a record may be anybody's
    source = escape(shown.media if inside else "data:,", quote=True)
    alt = escape(about, quote=True)
    return f'<img{small} {size} src="{source}" alt="{alt}" decoding="async">'


def scores_text(sample: SampleRecord) -> str:
    """The scores of a sample, each with its name."""
    return ", ".join(
        f"{escape(name)} {'unscored' if value is None else number(value)}"
        for name, value in sample.scores.items()
    )


def document(title: str, header: str, body: str) -> str:
    """A whole page with its style and its script inside."""
    here = Path(__file__).parent
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body>\n"
        f'<a class="skip" href="#main">Skip to the content</a>\n{header}\n'
        f'<main id="main">\n{body}\n</main>\n<script>\n{script}</script>\n</body></html>\n'
    )


def top(name: str, chips: Sequence[str], anchors: Sequence[tuple[str, str]]) -> str:
    """The header that stays in view: name, a few words of state, and links to the sections."""
    words = "".join(f'<span class="chip">{escape(chip)}</span>' for chip in chips)
    links = "".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title in anchors)
    return (
        f'<header class="top"><div><h1 dir="auto">{escape(name)}</h1>{words}</div>'
        f'<nav aria-label="Sections">{links}</nav></header>'
    )
