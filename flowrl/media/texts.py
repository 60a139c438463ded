"""Texts as files: an HTML page, and the same as JSON lines."""

import html
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl.errors import UserError

Line = dict[str, Any]
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em;
  color: #1e1e1e; background: #fafaf8; }
h1 { font-size: 1.15em; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
th, td { text-align: left; vertical-align: top; padding: 0.5em 0.8em;
  border-top: 1px solid #ddd; }
td { white-space: pre-wrap; overflow-wrap: anywhere; }
td:first-child { color: #6e6e6e; }
b { display: block; }
.better td:last-child b { color: #2ea043; }
.worse td:last-child b { color: #cf3c32; }
"""


def save_texts(lines: Sequence[Line], title: str, folder: Path, name: str) -> Path:
    """Write `prompt`, `text` and `score` to `folder/name.jsonl` and `.html`; returns the latter."""
    rows = [("", [line["prompt"], (line["score"], line["text"])]) for line in lines]
    page = _page(title, "", ("prompt", "text"), rows)
    return _written(lines, page, folder, name)


def save_beside(lines: Sequence[Line], title: str, folder: Path, earlier: str, name: str) -> Path:
    """Write these lines beside the saved lines `earlier` of the same prompts, side by side.

    Lines whose prompt the other page does not show are left out: a resume may show another number.
    """
    old, both, rows = _saved(folder / f"{earlier}.jsonl"), [], []
    for after in lines:
        if not old[after["prompt"]]:
            continue
        before = old[after["prompt"]].popleft()
        scores = before["score"], after["score"]
        texts = before["text"], after["text"]
        both.append(
            {
                "prompt": after["prompt"], "before": texts[0], "after": texts[1],
                "score_before": scores[0], "score_after": scores[1],
            }
        )  # fmt: skip
        cells = [after["prompt"], *zip(scores, texts, strict=True)]
        rows.append((_change(*scores), cells))
    changes = [change for change, _ in rows]
    kinds = ("better", "worse", "same")
    summary = ", ".join(f"{changes.count(kind)} {kind}" for kind in kinds)
    return _written(both, _page(title, summary, ("prompt", "before", "after"), rows), folder, name)


def _saved(path: Path) -> defaultdict[str, deque[Line]]:
    """Read saved lines, by prompt; those that cannot be read are left out."""
    found: defaultdict[str, deque[Line]] = defaultdict(deque)
    for text in path.read_bytes().splitlines():
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            line = json.loads(text)
            kept = {"text": str(line["text"]), "score": line["score"]}
            if kept["score"] is None or isinstance(kept["score"], float):
                found[line["prompt"]].append(kept)
    return found


def _change(before: float | None, after: float | None) -> str:
    """The change of a score; without one of the two it is neither better nor worse."""
    if before is None or after is None:
        return "unscored"
    return "same" if before == after else "better" if after > before else "worse"


def _page(
    title: str, summary: str, heads: Sequence[str], rows: Iterable[tuple[str, Sequence[Any]]]
) -> str:
    """A table; a cell is a text, or a score and a text. Models may write anything, so all text is
    escaped, and the page has no scripts."""
    body = [
        f'<tr class="{change}">{"".join(f"<td>{_cell(cell)}</td>" for cell in cells)}</tr>'
        for change, cells in rows
    ]
    head = "".join(f"<th>{name}</th>" for name in heads)
    return "\n".join(
        [
            '<!doctype html><meta charset="utf-8">',
            f"<title>{html.escape(title)}</title><style>{STYLE}</style>",
            f"<h1>{html.escape(title)}</h1><p>{summary}</p>",
            f"<table><tr>{head}</tr>",
            *body,
            "</table>\n",
        ]
    )


def _cell(cell: str | tuple[float | None, str]) -> str:
    if isinstance(cell, str):
        return html.escape(cell)
    score, text = cell
    return f"<b>{'unscored' if score is None else f'{score:.2f}'}</b>{html.escape(text)}"


def _written(lines: Sequence[Line], page: str, folder: Path, name: str) -> Path:
    path = folder / f"{name}.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rows = (json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the samples: {error}") from error
    return path
