"""Pages of texts, read as a browser reads them, and as programs read their lines."""

import json
from html.parser import HTMLParser

import pytest
import torch

from flowrl.errors import UserError
from flowrl.pages.sample_files import Page
from rewards import Samples

PROMPTS = ["2+2=", "a <b>bold</b> & long\nquestion", "say nothing"]
BEFORE = ["5", "<script>alert(1)</script>", ""]
AFTER = ["4", "  two\n\n  lines ü", "&amp;"]


class Cells(HTMLParser):
    """The text of each cell and its score, by row; tags that a page has no use for."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[list[str]]] = []
        self.kinds: list[str | None] = []
        self.tags: set[str] = set()
        self.title = self.head = self.said = ""
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self._open = tag
        if tag == "tr":
            self.rows.append([])
            self.kinds.append(dict(attrs).get("class"))
        if tag == "td":
            self.rows[-1].append(["", ""])

    def handle_endtag(self, tag):
        self._open = "td" if tag == "b" else ""

    def handle_data(self, data):
        if self._open in ("td", "b"):
            self.rows[-1][-1][self._open == "td"] += data
        elif self._open == "h1":
            self.head += data
        elif self._open == "p":
            self.said += data


def page(media, scores, title="run <1>"):
    samples = Samples(media, PROMPTS, torch.arange(3))
    return Page(samples, scores, title)


def test_a_page_shows_what_was_written_to_the_letter(tmp_path):
    given = page(BEFORE, [0.0, None, 0.25])
    out = given.save(tmp_path / "new", "before")
    assert out == tmp_path / "new" / "before.html"
    read = Cells(out.read_text(encoding="utf-8"))
    assert read.head == "run <1>" and "script" not in read.tags
    assert read.rows[1:] == [
        [["", p], [s, t]]
        for p, s, t in zip(PROMPTS, ["0.00", "unscored", "0.25"], BEFORE, strict=True)
    ]
    lines = [json.loads(line) for line in (tmp_path / "new" / "before.jsonl").open()]
    assert lines[1] == {"prompt": PROMPTS[1], "text": BEFORE[1], "score": None}


def test_before_and_after_stand_side_by_side(tmp_path):
    page(BEFORE, [0.0, None, 0.5]).save(tmp_path, "before")
    page(AFTER, [1.0, 0.5, 0.25]).save_beside(tmp_path, "before", "both")
    read = Cells((tmp_path / "both.html").read_text(encoding="utf-8"))
    assert read.rows[0] == [] and read.kinds[1:] == ["better", "unscored", "worse"]
    assert [[text for _, text in row] for row in read.rows[1:]] == [
        list(texts) for texts in zip(PROMPTS, BEFORE, AFTER, strict=True)
    ]
    assert [row[1][0] for row in read.rows[1:]] == ["0.00", "unscored", "0.50"]
    assert [row[2][0] for row in read.rows[1:]] == ["1.00", "0.50", "0.25"]
    assert read.said == "1 better, 1 worse, 0 same"
    both = [json.loads(line) for line in (tmp_path / "both.jsonl").open()]
    assert both[1]["score_before"] is None and both[1]["score_after"] == 0.5
    assert [line["after"] for line in both] == AFTER


def test_lines_without_a_readable_partner_are_left_out(tmp_path):
    """A resume may show another number of samples, and files of a run may be damaged."""
    page(BEFORE, [0.0, None, 0.5]).save(tmp_path, "before")
    file = tmp_path / "before.jsonl"
    first, _, last = file.read_bytes().splitlines()
    damaged = [
        b"\xff",
        b"[1]",
        b"[" * 100_000,
        b'{"prompt": [], "text": 1, "score": 0.5}',
        b'{"pro',
    ]
    file.write_bytes(b"\n".join([last, *damaged, first]))
    page(AFTER, [1.0, 0.5, 0.25]).save_beside(tmp_path, "before", "both")
    both = [json.loads(line) for line in (tmp_path / "both.jsonl").open()]
    assert [(line["before"], line["after"]) for line in both] == [("5", "4"), ("", "&amp;")]


def test_nothing_to_stand_beside_is_no_page(tmp_path):
    with pytest.raises(FileNotFoundError):
        (tmp_path / "both.html").stat()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the samples"):
        page(AFTER, [1.0, 0.5, 0.25]).save(tmp_path / "file", "after")
