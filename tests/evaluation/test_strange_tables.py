"""Tables of preferences that people and programs leave behind, at the doors of `evaluate-rewards`
and `fit-reward`: read in full, or refused in one sentence that names the file, the row and the way
out. No row is lost in silence, and nothing hangs."""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from flowrl.errors import UserError
from flowrl.evaluation.preferences import ReadOptions, load_preferences
from flowrl.evaluation.sources import read_media
from flowrl.prompts.files import read_rows
from flowrl.prompts.source import DataSource
from tests.evaluation.test_preferences import picture, write
from tests.support import fuzz
from tests.support.runs import flowrl

HUGE = 10**400
HALF = "\ud800"
Row = dict[str, Any]


def good(count: int = 4) -> list[Row]:
    return [
        {"prompt": f"p{i}", "a": f"a{i}.png", "b": f"b{i}.png", "label": i % 2}
        for i in range(count)
    ]


def with_files(folder: Path) -> Path:
    for i in range(4):
        (folder / f"a{i}.png").write_bytes(picture(10 + i))
        (folder / f"b{i}.png").write_bytes(picture(200 - i))
    return folder


def rows(*rows: Row) -> Callable[[Path], Path]:
    return text("t.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))


def changed(**cells: Any) -> Callable[[Path], Path]:
    """Good rows, of which the third has other cells."""
    return rows(*good()[:2], good()[2] | cells, good()[3])


def text(name: str, content: str, encoding: str = "utf-8") -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        (folder / name).write_bytes(content.encode(encoding))
        return folder / name

    return put


def column(values: Any) -> Callable[[Path], Path]:
    """A parquet file with one more column than the layout has."""

    def put(folder: Path) -> Path:
        images = {side: [picture(1), picture(2)] for side in "ab"}
        table = pyarrow.table({"prompt": ["p", "q"], **images, "label": [1, 0], "more": values})
        parquet.write_table(table, folder / "t.parquet")
        return folder / "t.parquet"

    return put


def two_files(folder: Path) -> Path:
    for name, label in (("0", "a"), ("1", "left-ish")):
        row = {"prompt": "p", "a": picture(1), "b": picture(2), "label": label}
        write(folder, f"{name}.parquet", [row])
    return folder


def empty_parquet(folder: Path) -> Path:
    texts = {name: pyarrow.array([], pyarrow.string()) for name in ("prompt", "a", "b", "label")}
    parquet.write_table(pyarrow.table(texts), folder / "t.parquet")
    return folder / "t.parquet"


def arrow(folder: Path) -> Path:
    table = pyarrow.Table.from_pylist(good())
    with (
        pyarrow.OSFile(str(folder / "t.arrow"), "wb") as file,
        ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    return folder / "t.arrow"


def saved_to_disk(folder: Path) -> Path:
    (folder / "state.json").write_text("{}")
    return folder


HPD = {"prompt": "p", "file_path": ["a0.png", "b0.png"]}
ANSWERS = {"prompt": "p", "chosen": "a good one", "rejected": "a bad one"}
ROW = "t.jsonl, line 3"
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a label is NaN": (changed(label=float("nan")), f"{ROW}: the label is nan"),
    "a label of 400 digits": (changed(label=HUGE), f"{ROW}: the label is 1000"),
    "no label": (changed(label=None), f"{ROW}: the label is None"),
    "a rank of 400 digits": (
        rows({"prompt": "p", "image": ["a0.png", "b0.png"], "rank": [1, HUGE]}),
        "line 1: 1000",
    ),
    "ranks of another number": (
        rows({"prompt": "p", "image": ["a0.png", "b0.png", "a1.png"], "human_preference": [1, 0]}),
        "line 1: 3 samples have the ranks",
    ),
    "votes above one": (rows(HPD | {"human_preference": [5, 0]}), "line 1: the label is 3.0"),
    "a vote is NaN": (rows(HPD | {"human_preference": [float("nan"), 0]}), "the label is nan"),
    "a vote on three": (
        rows(HPD | {"file_path": ["a0.png", "b0.png", "a1.png"], "human_preference": [1, 0]}),
        "a preference is of two samples, and it has 3",
    ),
    "samples are one text": (
        rows(HPD | {"file_path": "ab", "human_preference": [1, 0]}),
        "its samples are 'ab', not a list",
    ),
    "a negative share": (
        rows(
            {
                "prompt": "p",
                "image1": "a0.png",
                "image2": "b0.png",
                "weighted_results_image1_preference": -1.0,
                "weighted_results_image2_preference": 3.0,
            }
        ),
        "line 1: the label is -0.5",
    ),
    "a prompt is a number": (changed(prompt=7), f"{ROW}: the prompt is 7, not a text"),
    "a prompt shows nothing": (changed(prompt="\u200b"), f"{ROW}: the prompt is empty"),
    "a prompt has half a pair": (changed(prompt=HALF), f"{ROW}: the prompt contains half"),
    "an answer has half a pair": (
        rows(ANSWERS | {"chosen": f"a {HALF}"}),
        "line 1, chosen: the answer contains half",
    ),
    "a path has half a pair": (
        changed(a=f"{HALF}.png"),
        f"{ROW}, sample 1: the path '\\\\ud800.png'",
    ),
    "no path": (changed(b=None), f"{ROW}, sample 2: None is neither a path"),
    "bytes in a table of text": (
        changed(a={"bytes": "aGk=", "path": None}),
        f"{ROW}, sample 1: the bytes of a file are 'aGk=', which a table of text cannot hold",
    ),
    "bytes as a list": (changed(a={"bytes": [1], "path": None}), "the bytes of a file are"),
    "files among answers": (
        rows(ANSWERS, ANSWERS | {"rejected": "b1.png"}),
        "line 2: rejected is the file b1.png, and other cells are texts",
    ),
    "blank lines before": (
        text("t.jsonl", "\n\n" + json.dumps(good()[0] | {"label": "x"})),
        "t.jsonl, line 3: the label is 'x'",
    ),
    "cells of several lines": (
        text("t.csv", 'prompt,a,b,label\n"p\nq",a0.png,b0.png,1\nr,a1.png,b1.png,x\n'),
        "t.csv, line 4: the label is 'x'",
    ),
    "a line is a list": (text("t.jsonl", json.dumps(good()[0]) + "\n[1]\n"), "line 2: expected an"),
    "the second file": (two_files, "1.parquet, row 1: the label is 'left-ish'"),
    "no byte": (text("t.json", ""), "has no rows"),
    "only names": (text("t.csv", "prompt,a,b,label\n"), "has no rows"),
    "no row in parquet": (empty_parquet, "has no rows"),
    "UTF-16": (text("t.csv", "prompt,a,b,label\n", "utf-16"), "line 1 is not UTF-8"),
    "an Arrow file": (arrow, "cannot read .arrow; convert it to parquet"),
    "a folder of Arrow files": (saved_to_disk, "was written by save_to_disk"),
    "compressed": (text("t.jsonl.gz", ""), "cannot read .gz; unpack it"),
    "a date that Python lacks": (
        column(pyarrow.array([10**9, 1], pyarrow.date32())),
        "a column has dates or durations that Python cannot hold",
    ),
    "a time that Python lacks": (
        column(pyarrow.array([10**18, 1], pyarrow.timestamp("us"))),
        "a column has dates or durations that Python cannot hold",
    ),
    "a duration that Python lacks": (
        column(pyarrow.array([2**62, 1], pyarrow.duration("s"))),
        "a column has dates or durations that Python cannot hold",
    ),
    "a text that is not UTF-8": (
        column(
            pyarrow.Array.from_buffers(
                pyarrow.string(), 2, pyarrow.array([b"\xff", b"a"]).buffers()
            )
        ),
        "a column of texts is not UTF-8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_one_sentence_with_its_place(case: str, tmp_path: Path) -> None:
    put, says = REFUSED[case]
    source = put(with_files(tmp_path))
    with fuzz.watched(), pytest.raises(UserError, match=says.replace("[", r"\[")) as caught:
        load_preferences(source, ReadOptions())
    fuzz.one_sentence(str(caught.value))
    assert "UserError" not in str(caught.value), "said once"


def spoken(side: str) -> Callable[[Path], Path]:
    long = "\u597d" * 300 if side == "long" else "one\0two"
    return rows(*[ANSWERS | {"prompt": f"p{i}", "chosen": long, "rejected": "no"} for i in "ab"])


def as_object(folder: Path) -> Path:
    (folder / "t.json").write_text(json.dumps({"about": "x", "pairs": good()}))
    return folder / "t.json"


def as_columns(folder: Path) -> Path:
    columns = {name: [row[name] for row in good()] for name in good()[0]}
    (folder / "t.json").write_text(json.dumps(columns))
    return folder / "t.json"


CSV = "prompt,a,b,label\n" + "".join(",".join(map(str, row.values())) + "\n" for row in good())
READ: dict[str, tuple[Callable[[Path], Path], int]] = {
    "a byte order mark": (text("t.csv", CSV, "utf-8-sig"), 4),
    "lines of JSON named json": (
        text("t.json", "".join(f"{json.dumps(row)}\n" for row in good())),
        4,
    ),
    "a table in an object": (as_object, 4),
    "an object of columns": (as_columns, 4),
    "a million letters": (text("t.csv", CSV.replace("p2", "x" * 10**6)), 4),
    "places of better sides in CSV": (
        text("t.csv", "prompt,a_text,b_text,label_id\np,it is,it was,1\nq,we do,we did,0\n"),
        2,
    ),
    "a long answer without a space": (spoken("long"), 2),
    "an answer with NUL": (spoken("nul"), 2),
    "durations": (column([timedelta(days=1), timedelta(0)]), 2),
    "one Label Studio task": (
        text(
            "t.json",
            json.dumps(
                [
                    {
                        "data": {"prompt": "p", "a": "a0.png", "b": "b0.png"},
                        "annotations": [
                            {"result": [{"type": "pairwise", "value": {"selected": "left"}}]}
                        ],
                    }
                ]
            ),
        ),
        1,
    ),
}


@pytest.mark.parametrize("case", READ)
def test_what_can_be_read_is_read_in_full(case: str, tmp_path: Path) -> None:
    put, pairs = READ[case]
    named = {"label": "label_id"} if "places" in case else {}
    with fuzz.watched():
        preferences = load_preferences(put(with_files(tmp_path)), ReadOptions(columns=named))
    assert len(preferences.a) == pairs
    if named:
        assert preferences.label.tolist() == [0.0, 1.0]


def fifo(folder: Path) -> str:
    os.mkfifo(folder / "pipe.png")
    return "pipe.png"


def looped(folder: Path) -> str:
    (folder / "loop.png").symlink_to("loop.png")
    return "loop.png"


def garbage(folder: Path) -> str:
    (folder / "svg.png").write_text("<svg/>")
    return "svg.png"


UNREADABLE: dict[str, tuple[Callable[[Path], str], str]] = {
    "a pipe": (fifo, "a pipe or a device, not a file"),
    "a device": (lambda _: "/dev/zero", "a pipe or a device, not a file"),
    "a link to itself": (looped, "Too many levels of symbolic links"),
    "a name of 5000 letters": (lambda _: "x" * 5000 + ".png", "File name too long"),
    "a part of 5000 digits": (lambda _: f"a0.png#xywh=0,0,{'9' * 5000},1", "File name too long"),
    "a name with NUL": (lambda _: "a\0.png", "embedded null byte"),
    "a folder": (lambda _: "..", "Is a directory"),
    "no image": (garbage, "no image, video or sound of a known form"),
    "an address": (lambda _: "https://example.org/a.png", "an address, and images are read from"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_sample_that_cannot_be_read_is_named_and_the_others_stay(
    case: str, tmp_path: Path
) -> None:
    make, says = UNREADABLE[case]
    name = make(with_files(tmp_path))
    source = changed(a=name)(tmp_path)
    preferences = load_preferences(source, ReadOptions())
    with fuzz.watched():
        read = read_media([item.source for item in preferences.items])
    assert sum(media is None for media in read.media) == 1
    (sentence,) = read.broken.values()
    assert says in sentence and "0x" not in sentence
    fuzz.one_sentence(sentence, most=6000)


@pytest.mark.parametrize("command", ["evaluate-rewards", "fit-reward"])
def test_the_commands_say_it_and_leave_no_folder(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--rewards", "brightness", "--robust", "0"]
    if command == "fit-reward":
        words = ["--features", "{name: clip, model: flowrl/demo/shapes-clip}"]
    for cells, says in (({"label": HUGE}, "line 3: the label"), ({}, "no sample can be read")):
        assert flowrl(command, changed(**cells)(tmp_path), *words, "--out", out) == 2
        said = capsys.readouterr().err
        assert says in said and "Traceback" not in said
        assert not out.exists()


def test_prompts_of_a_csv_may_have_long_cells(tmp_path: Path) -> None:
    """Tests of programs in a cell are longer than csv's own limit of 131072 letters."""
    (tmp_path / "p.csv").write_text(f"prompt,tests\nadd,{'1' * 10**6}\n")
    table = read_rows(DataSource(str(tmp_path / "p.csv")), "prompts.train")
    assert len(str(table.rows[0]["tests"])) == 10**6


def test_a_table_with_other_separators_is_named_before_the_layouts(tmp_path):
    (tmp_path / "votes.csv").write_text("prompt;a;b;label\na cat;1.png;2.png;1\n")
    with pytest.raises(UserError, match=r"votes\.csv: its cells are not separated by commas; save"):
        load_preferences(tmp_path / "votes.csv", ReadOptions())
