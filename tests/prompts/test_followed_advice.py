"""Advice of messages about prompts: each table is refused, and what the message says is done with
it; the table is read then, with the rows that it has."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow
import pytest
from datasets.exceptions import DatasetNotFoundError
from pyarrow import parquet

from flowrl.errors import UserError
from flowrl.prompts import DataSource, PromptSet, files, table_limits
from flowrl.prompts.files import read_rows
from flowrl.prompts.row_sizes import RowSize, row_sizes
from tests.support.advice import advice

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "1 + 1?"}


def read(file: Path, column: str = "prompt") -> PromptSet:
    return PromptSet.read(str(file), column, "prompts.train")


def rows(folder: Path, *values: Any, name: str = "a.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(value) + "\n" for value in values))
    return folder / name


def text(folder: Path, content: str, name: str) -> Path:
    (folder / name).write_text(content)
    return folder / name


def test_a_chat_gets_its_user_message(tmp_path: Path) -> None:
    found = advice(
        "{}: the chat only has a system message; add a user message",
        lambda: read(rows(tmp_path, {"prompt": [SYSTEM]})),
        lambda: read(rows(tmp_path, {"prompt": [SYSTEM, USER]})),
    )
    assert found.texts == ("1 + 1?",)


def test_answers_of_alpacas_form(tmp_path: Path) -> None:
    asked = {"instruction": "add", "input": ""}
    file = rows(tmp_path, asked | {"output": {"sum": 3}})

    def followed() -> list[tuple[str, ...]]:
        written = rows(tmp_path, asked | {"output": "3"}, name="b.jsonl")
        return [read(written).texts, read(file, "instruction").texts]

    assert advice(
        "{}: write the answers as texts, or read the prompts alone, by column: instruction",
        lambda: read(file),
        followed,
    ) == [("add",), ("add",)]


def test_pairs_without_a_common_beginning_get_a_prompt(tmp_path: Path) -> None:
    pair = {
        "chosen": "\n\nHuman: a\n\nAssistant: yes",
        "rejected": "\n\nHuman: b\n\nAssistant: no",
    }
    found = advice(
        "{} in every row; add the column prompt",
        lambda: read(rows(tmp_path, pair)),
        lambda: read(rows(tmp_path, pair | {"prompt": "a"})),
    )
    assert found.texts == ("a",)


def test_one_value_per_key(tmp_path: Path) -> None:
    twice = '{"prompt": "a", "prompt": "b"}\n'
    found = advice(
        "{} is given twice: keep one of them",
        lambda: read(text(tmp_path, twice, "a.jsonl")),
        lambda: read(text(tmp_path, '{"prompt": "b"}\n', "a.jsonl")),
    )
    assert found.texts == ("b",)


def test_a_list_is_renamed(tmp_path: Path) -> None:
    file = text(tmp_path, json.dumps([{"prompt": "a"}, {"prompt": "b"}]), "a.jsonl")
    found = advice(
        "it is one list, not an object per line: name it .json",
        lambda: read(file),
        lambda: read(file.rename(tmp_path / "a.json")),
    )
    assert found.texts == ("a", "b")


@pytest.mark.parametrize(
    ("splits", "asked", "named"),
    [
        ([], None, "train"),
        (["train", "test"], None, "train"),
        (["train", "test"], "test", "test"),
        (["test", "more"], None, "more"),
    ],
)
def test_the_call_that_makes_a_parquet_file_of_a_saved_data_set(
    splits: list[str],
    asked: str | None,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call stands in the message, and is made as it stands there: it names a split that the
    folder has, and the one that was asked for if it is there."""
    folder = tmp_path / "saved"
    saved = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in splits or ["train"]}
    (datasets.DatasetDict(**saved) if splits else saved["train"]).save_to_disk(folder)
    monkeypatch.chdir(tmp_path)

    def refused() -> None:
        read_rows(DataSource(str(folder), split=asked), "prompts.train")

    def followed() -> tuple[str, ...]:
        with pytest.raises(UserError) as told:
            refused()
        call = str(told.value).split("`")[1]
        exec(call.replace("FOLDER", repr(str(folder))), {"datasets": datasets})
        return read(tmp_path / f"{named}.parquet").texts

    assert advice(
        "was written by save_to_disk, as Arrow files: make a parquet file of", refused, followed
    ) == (named,)


def test_a_text_of_an_older_windows_program(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("caf\xe9\n".encode("cp1252"))

    def followed() -> PromptSet:
        content = (tmp_path / "a.txt").read_text(encoding="cp1252")
        (tmp_path / "a.txt").write_text(content, encoding="utf-8")
        return read(tmp_path / "a.txt")

    prompts = advice(
        "line {} is not UTF-8; save the file as UTF-8",
        lambda: read(tmp_path / "a.txt"),
        followed,
    )
    assert prompts.texts == ("caf\xe9",)


def test_the_file_in_place_of_a_large_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST_FILES", 3)
    file = rows(tmp_path, {"prompt": "a"})
    for name in "bcd":
        text(tmp_path, "no table", f"{name}.log")
    found = advice(
        "{} has more than {} files: give the prompt file itself",
        lambda: read(tmp_path),
        lambda: read(file),
    )
    assert found.texts == ("a",)


def test_decimal_commas_are_saved_with_commas_or_as_jsonl(tmp_path: Path) -> None:
    def followed() -> list[PromptSet]:
        saved = text(tmp_path, 'prompt,answer\na,"0,5"\nb,"1,5"\n', "b.csv")
        lines = rows(tmp_path, {"prompt": "a", "answer": "0,5"}, {"prompt": "b", "answer": "1,5"})
        return [read(saved), read(lines)]

    for found in advice(
        "its cells are separated by {}: save it with commas, or as jsonl",
        lambda: read(text(tmp_path, "prompt;answer\na;0,5\nb;1,5\n", "a.csv")),
        followed,
    ):
        assert found.texts == ("a", "b")
        assert [row["answer"] for row in found.meta] == ["0,5", "1,5"]


def test_a_data_set_that_does_not_exist_or_is_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in knows one name, and one that it only shows to those who are logged in."""
    tokens = set[str]()

    def builder(name: str, *_: Any, **__: Any) -> SimpleNamespace:
        if name == "owner/right" or (name == "owner/gated" and tokens):
            config = SimpleNamespace(data_files={})
            return SimpleNamespace(config=config, cache_dir=".")
        raise DatasetNotFoundError(f"Dataset '{name}' doesn't exist")

    def load(*_: Any, **__: Any) -> datasets.Dataset:
        return datasets.Dataset.from_list([{"prompt": "a"}])

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(datasets, "load_dataset", load)

    def logged_in() -> Any:
        tokens.add("hf_a")
        return read_rows(DataSource("owner/gated"), "prompts.train").rows

    for wrong, follow in (
        ("owner/wrong", lambda: read_rows(DataSource("owner/right"), "prompts.train").rows),
        ("owner/gated", logged_in),
    ):
        assert advice(
            "{} cannot be read: {}: check the name, or accept its licence on the hub and log in",
            lambda wrong=wrong: read_rows(DataSource(wrong), "prompts.train"),
            follow,
        ) == [{"prompt": "a"}]


def test_a_column_of_texts_is_written_again_or_as_bytes(tmp_path: Path) -> None:
    def written(column: pyarrow.Array, name: str) -> Path:
        table = pyarrow.table({"prompt": ["a", "b"], "note": column})
        parquet.write_table(table, tmp_path / name)
        return tmp_path / name

    bytes_alone = pyarrow.array([b"caf\xe9", b"tea"])
    wrong = pyarrow.Array.from_buffers(pyarrow.string(), 2, bytes_alone.buffers())

    def followed() -> list[PromptSet]:
        again = pyarrow.array([cell.as_py().decode("latin-1") for cell in bytes_alone])
        return [read(written(again, "b.parquet")), read(written(bytes_alone, "c.parquet"))]

    again, as_bytes = advice(
        "a column of texts is not UTF-8 ({}): write it again, or as a column of bytes",
        lambda: read(written(wrong, "a.parquet")),
        followed,
    )
    assert again.texts == as_bytes.texts == ("a", "b")
    assert again.meta[0]["note"] == "caf\xe9" and as_bytes.meta[0]["note"] == b"caf\xe9"


@pytest.mark.parametrize("kept", ["num_frames", "frames"])
def test_one_column_of_frames_is_kept(kept: str, tmp_path: Path) -> None:
    row = {"prompt": "a", "num_frames": 5, "frames": 9}
    both = rows(tmp_path, row)
    one = rows(tmp_path, {name: row[name] for name in ("prompt", kept)}, name="b.jsonl")
    sizes = advice(
        "{}: num_frames is {} but {} is {}: keep one of the two columns",
        lambda: row_sizes(read(both).meta),
        lambda: row_sizes(read(one).meta),
    )
    assert sizes == [RowSize(num_frames=row[kept])]


def test_a_smaller_table_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_limits, "_SMALL", 1000)
    free = SimpleNamespace(available=100_000)
    monkeypatch.setattr(table_limits.psutil, "virtual_memory", lambda: free)
    table = [{"prompt": f"prompt {i}"} for i in range(1000)]
    found = advice(
        "{} GiB of free memory: make a smaller table of them",
        lambda: read(rows(tmp_path, *table)),
        lambda: read(rows(tmp_path, *table[:100])),
    )
    assert len(found.texts) == 100
