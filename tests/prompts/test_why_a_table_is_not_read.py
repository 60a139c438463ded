"""A table that has no prompts says what it is instead: the cause, and the way out."""

import json
import warnings
from pathlib import Path

import pytest

from flowrl.errors import UserError
from flowrl.prompts import PromptSet
from flowrl.settings import RunSettings
from flowrl.settings.read import run_from

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
ASKED = {"instruction": "add", "input": ""}
SPOKEN = [{"role": "user", "content": "add 1 and 2"}]
CASES = {
    "decimal commas, as a European spreadsheet saves them": (
        "rows.csv",
        "prompt;answer\na;0,5\nb;1,5\n",
        "its cells are separated by ';': save it with commas, or as jsonl",
    ),
    "tabs beside commas": (
        "rows.csv",
        "prompt\tanswer\na, b\t1\n",
        "its cells are separated by '\\t'",
    ),
    "really too many cells": ("rows.csv", "prompt,answer\na,1,2\n", "line 2: more cells than"),
    "too many cells between tabs": ("rows.tsv", "prompt\tanswer\na\t1\t2\n", "line 2: more cells"),
    "one list": ("rows.jsonl", json.dumps(ROWS), "it is one list, not an object per line: name it"),
    "rows inside of an object": (
        "rows.json",
        json.dumps({"version": 1, "data": ROWS}),
        "its rows are inside of 'data': save that list as a file of its own",
    ),
    "messages without an answer": (
        "rows.jsonl",
        json.dumps({"messages": SPOKEN, "ground_truth": "3"}),
        ": set column: messages",
    ),
    "one row of messages in json": (
        "rows.json",
        json.dumps({"messages": [*SPOKEN, *SPOKEN], "ground_truth": "3"}),
        ": set column: messages",
    ),
    "answers that are no texts": (
        "rows.jsonl",
        json.dumps({**ASKED, "output": {"sum": 3}}),
        "line 1: output is {'sum': 3}, not a text: write the answers as texts, or read the prompts",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_and_the_way_out(case: str, tmp_path: Path) -> None:
    name, content, says = CASES[case]
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as refused:
        PromptSet.read(str(tmp_path / name), "prompt", "prompts.train")
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_the_advice_for_messages_reads_them(tmp_path: Path) -> None:
    _, content, _ = CASES["messages without an answer"]
    (tmp_path / "rows.jsonl").write_text(content)
    read = PromptSet.read(str(tmp_path / "rows.jsonl"), "messages", "prompts.train")
    assert [str(text) for text in read.texts] == ["add 1 and 2"]


@pytest.mark.parametrize("output", ["", None, {"sum": 3}, 3])
def test_one_row_without_an_answer_leaves_the_others_what_they_are(output, tmp_path: Path) -> None:
    """Alpaca's own file has some such rows; they are left out and counted."""
    rows = [{**ASKED, "output": answer} for answer in ("1", output, "2")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        read = PromptSet.read(str(tmp_path / "rows.jsonl"), "prompt", "given.file")
    assert [row["completion"] for row in read.meta] == ["1", "2"]
    (warning,) = said
    assert f"1 of 3 rows left out: output is {output!r}, not a text (line 2)" in str(
        warning.message
    )


def given(file: Path) -> RunSettings:
    tree = {
        "recipe": {"name": "text", "loss": "reinforce", "length": 8},
        "model": {"language": "flowrl/demo/sums-lm", "lora": None},
        "given": {"file": str(file), "kind": "texts"},
        "rewards": ["exact_answer"],
    }
    return run_from(tree, "run.yaml")


def test_a_file_of_given_samples_is_named_by_its_own_setting(tmp_path: Path) -> None:
    """It is the file of the training prompts too, which the user has not set."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1="}))
    with pytest.raises(UserError, match=r"^given\.file: .*rows\.jsonl has no column 'prompt'"):
        given(tmp_path / "rows.jsonl").prompts.read("train")
