"""What the messages of `score`, `evaluate-rewards` and their tables advise is done, and helps."""

import os
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl.evaluation.folders import find_items
from flowrl.evaluation.outputs import check_output_file, make_output_folder
from flowrl.evaluation.preferences import ReadOptions, load_preferences
from flowrl.evaluation.reward_evaluation import EvaluateRewards, column_names, measure_rewards
from flowrl.evaluation.scoring import ScoreArguments, score_folder
from flowrl.evaluation.sources import Source, read_media
from flowrl.evaluation.tables import rows_of
from rewards import Samples
from tests.evaluation.test_preferences import picture, write
from tests.support import media_forms
from tests.support.advice import advice

PLAIN = {"prompt": "p", "a": "a.png", "b": "b.png", "label": "a"}
TEXTS = {"prompt": "p", "chosen": "yes, it is", "rejected": "no, it is not"}
PLACES = {"prompt": "p", "first": "a b", "second": "c d", "better_id": 1}
PLACE_COLUMNS = {"a_text": "first", "b_text": "second", "label": "better_id"}


def shades(rewarded: Samples) -> list[float]:
    return [float(media.mean()) for media in rewarded.media]


def pictures(folder: Path) -> Path:
    for shade, name in ((50, "a.png"), (200, "b.png")):
        (folder / name).write_bytes(picture(shade))
    return folder


def test_a_folder_without_a_table_takes_one_of_another_place(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    pictures(folder)
    table = write(tmp_path, "mine.jsonl", [{"file": "a.png", "prompt": "a cat"}])
    items = advice(
        "{} has no prompts.jsonl; give a table with --prompts FILE",
        lambda: find_items(folder, None, "table"),
        lambda: find_items(folder, table, "table"),
    )
    assert [item.prompt for item in items.items] == ["a cat"]


def test_files_without_a_prompt_in_them_take_it_from_their_names(tmp_path: Path) -> None:
    items = advice(
        "{} has no prompt in its metadata; try --prompts-from names",
        lambda: find_items(pictures(tmp_path), None, "metadata"),
        lambda: find_items(tmp_path, None, "names"),
    )
    assert [item.prompt for item in items.items] == ["a", "b"]


def test_a_file_whose_name_is_no_text_is_renamed(tmp_path: Path) -> None:
    strange = tmp_path / "d\udcff.png"
    strange.write_bytes(picture(9))

    def rename() -> int:
        os.rename(strange, tmp_path / "d.png")
        return len(find_items(tmp_path, None, "names").items)

    assert (
        advice(
            "{}: the name of this file is not UTF-8: rename it",
            lambda: find_items(tmp_path, None, "names"),
            rename,
        )
        == 1
    )


def test_an_output_is_a_file_or_a_folder(tmp_path: Path) -> None:
    advice(
        "{}: {} is a folder; give a file in it",
        lambda: check_output_file(tmp_path),
        lambda: check_output_file(tmp_path / "out.html"),
    )
    file = write(tmp_path, "file.jsonl", [PLAIN])
    advice(
        "{}: {} is a file; give a folder instead",
        lambda: make_output_folder(file),
        lambda: make_output_folder(tmp_path / "folder"),
    )
    assert (tmp_path / "folder").is_dir()


@pytest.mark.parametrize("missing", ["prompt", "a", "b"])
@pytest.mark.parametrize("tool", ["argilla", "label studio"])
def test_the_fields_of_a_labelling_tool_have_their_names(
    tmp_path: Path, tool: str, missing: str
) -> None:
    """A record without a prompt was told to name its samples, which it had named."""
    fields = {"prompt": "p", "a": "a b", "b": "c d"}

    def records(named: dict[str, str]) -> Path:
        if tool == "argilla":
            row: dict[str, Any] = {
                "fields": named,
                "responses": {"preference": [{"value": "a"}]},
            }
        else:
            result = {"type": "pairwise", "value": {"selected": "left"}}
            row = {"data": named | {"kind": "text"}, "annotations": [{"result": [result]}]}
        return write(tmp_path, "tool.json", [row])

    strange = {name if name != missing else "other": text for name, text in fields.items()}
    found = advice(
        "{}: there is no {}: name the prompt `prompt` and the two samples `a` and `b`, each a text",
        lambda: load_preferences(records(strange), ReadOptions()),
        lambda: load_preferences(records(fields), ReadOptions()),
    )
    assert found.label.tolist() == [1.0] and [item.prompt for item in found.items] == ["p", "p"]


def test_columns_of_other_names_are_named(tmp_path: Path) -> None:
    rows = [{"caption": "p", "best": "a.png", "other": "b.png"}]
    path = write(pictures(tmp_path), "odd.jsonl", rows)
    columns = column_names(["prompt=caption,chosen=best,rejected=other"])
    found = advice(
        "{}: the columns {} match no known layout ({}); name them with --columns, such as "
        "prompt=caption,chosen=best,rejected=other",
        lambda: load_preferences(path, ReadOptions()),
        lambda: load_preferences(path, ReadOptions(columns=columns)),
    )
    assert found.layout == "chosen" and found.label.tolist() == [1.0]


WRONG_ROWS = {
    "label": (PLAIN, {"label": "left-ish"}, {}),
    "answer": (TEXTS, {"rejected": [{"role": "user", "content": "is it?"}]}, {}),
    "place": (PLACES, {"better_id": 2}, PLACE_COLUMNS),
}


@pytest.mark.parametrize("way", ["correct", "remove"])
@pytest.mark.parametrize("kind", WRONG_ROWS)
def test_a_wrong_row_is_corrected_or_removed(tmp_path: Path, kind: str, way: str) -> None:
    row, change, columns = WRONG_ROWS[kind]
    wrong = write(tmp_path, "wrong.jsonl", [row, row | change])
    mended = write(tmp_path, "mended.jsonl", [row, row] if way == "correct" else [row])
    choice = ReadOptions(columns=columns)

    def refused() -> object:
        return load_preferences(wrong, choice)

    def follow() -> int:
        return len(load_preferences(mended, choice).label)

    match kind:
        case "label":
            pairs = advice(
                "{}: the label is {}, but must be a, b, tie or a number in 0..1: correct or remove "
                "the row",
                refused,
                follow,
            )
        case "answer":
            pairs = advice(
                "{}: {} is no text, and no message of the assistant: correct or remove the row",
                refused,
                follow,
            )
        case _:
            pairs = advice(
                "{} counts sides from 0, so it must be 0 or 1, not {}: correct or remove the row",
                refused,
                follow,
            )
    assert pairs == (2 if way == "correct" else 1)


def small(folder: Path) -> Path:
    """Two pairs of two pictures, the second time the other way round."""
    rows = [PLAIN, PLAIN | {"prompt": "q", "a": "b.png", "b": "a.png", "label": "b"}]
    return write(pictures(folder), "pairs.jsonl", rows)


def test_rewards_are_named(tmp_path: Path) -> None:
    """To `evaluate-rewards` and to `score`, as the message spells them."""
    pairs = small(tmp_path)
    quick = EvaluateRewards(pairs, resamples=20, robust=0, examples=0, out=tmp_path / "report")
    results = advice(
        "evaluate-rewards: no rewards; name some with --rewards, such as shapes,brightness",
        lambda: measure_rewards(quick, {}),
        lambda: measure_rewards(replace(quick, rewards=("shapes,brightness",)), {}),
    )
    assert results
    images = ScoreArguments(tmp_path, (), out=tmp_path / "scores", sheet=0)
    folder = advice(
        "score: no rewards; name some with --rewards, such as shapes,brightness",
        lambda: score_folder(images),
        lambda: score_folder(replace(images, rewards=("shapes,brightness",))),
    )
    assert (folder / "scores.csv").is_file()


@pytest.mark.parametrize("changed", ["object", "name"])
def test_an_object_and_a_name_have_labels_of_their_own(tmp_path: Path, changed: str) -> None:
    """Either of the two may get another label."""
    pairs = small(tmp_path)
    shared = {"name": shades, "label": "brightness"}
    mended: dict[str, list[Any]] = {
        "object": ["brightness", {"name": shades, "label": "mine"}],
        "name": [{"name": "brightness", "label": "bright"}, shared],
    }

    def evaluate(rewards: list[Any]) -> set[str]:
        quick = {"resamples": 20, "robust": 0, "examples": 0, "out": tmp_path / "report"}
        return set(flowrl.evaluate_rewards(pairs, rewards, options=quick).results["rewards"])

    labels = advice(
        "rewards: {} is also the label of an object; change one",
        lambda: evaluate(["brightness", shared]),
        lambda: evaluate(mended[changed]),
    )
    assert len(labels) == 2


def test_a_column_that_is_named_twice_is_named_once() -> None:
    names = advice(
        "--columns: {} is given twice; keep one",
        lambda: column_names(["a=left,a=right"]),
        lambda: column_names(["a=left"]),
    )
    assert names == {"a": "left"}


def test_a_path_with_half_a_pair_is_corrected(tmp_path: Path) -> None:
    source = advice(
        "{}: the path {} contains half a surrogate pair: correct it",
        lambda: Source.of("\ud800.png", tmp_path, "line 1"),
        lambda: Source.of("a.png", pictures(tmp_path), "line 1"),
    )
    assert not read_media([source]).broken


def test_a_video_is_named_whole(tmp_path: Path) -> None:
    """A source that cannot be read is named with its reason, and is no error by itself."""
    pytest.importorskip("av")
    (tmp_path / "a.mp4").write_bytes(media_forms.video(media_forms.video_pictures(3)))

    def frames(cell: str) -> int:
        read = read_media([Source.of(cell, tmp_path, "line 1")])
        for said in read.broken.values():
            raise ValueError(said)
        (video,) = read.media
        assert isinstance(video, torch.Tensor)
        return len(video)

    assert (
        advice(
            "a part of a video cannot be read: name the whole file",
            lambda: frames("a.mp4#xywh=0,0,4,4"),
            lambda: frames("a.mp4"),
        )
        == 3
    )


@pytest.mark.parametrize("way", ["parquet", "path"])
def test_bytes_are_saved_in_parquet_or_as_a_file(tmp_path: Path, way: str) -> None:
    data = (pictures(tmp_path) / "a.png").read_bytes()
    coded = {"bytes": b64encode(data).decode(), "path": None}
    table = write(tmp_path, "coded.jsonl", [PLAIN | {"a": coded}])
    mended = {
        "parquet": lambda: write(
            tmp_path, "mended.parquet", [PLAIN | {"a": {"bytes": data, "path": None}}]
        ),
        "path": lambda: write(tmp_path, "mended.jsonl", [PLAIN]),
    }
    found = advice(
        "{}: the bytes of a file are {}, which a table of text cannot hold: save the table as "
        "parquet, or give a path",
        lambda: load_preferences(table, ReadOptions()),
        lambda: load_preferences(mended[way](), ReadOptions()),
    )
    assert not read_media([item.source for item in found.items]).broken


def test_one_of_several_tables_is_named(tmp_path: Path) -> None:
    first = write(tmp_path, "1.jsonl", [{"prompt": "p"}])
    write(tmp_path, "2.csv", [{"prompt": "q"}])
    rows = advice(
        "{}: several tables ({}): name one, such as {}",
        lambda: rows_of(tmp_path),
        lambda: rows_of(first),
    )
    assert rows[0] == [{"prompt": "p"}]
