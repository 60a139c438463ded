"""Every preference data set that the pages name, in its own form: it reads, and the better wins."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowrl.errors import UserError
from flowrl.evaluation.measure import Gallery
from flowrl.evaluation.preferences import ReadOptions, load_preferences
from flowrl.evaluation.reward_evaluation import column_names
from tests.data_sets.preferences import BETTER, FORMS, GOOD, QUESTION, WORSE
from tests.support import runs

SHADES = {BETTER: 220, WORSE: 40}


def with_bytes(value: Any, folder: Path) -> Any:
    """The cell with the bytes of the files that it names, where a form stores bytes."""
    if isinstance(value, dict):
        return {
            key: (folder / inner).read_bytes() if key == "bytes" else with_bytes(inner, folder)
            for key, inner in value.items()
        }
    return [with_bytes(one, folder) for one in value] if isinstance(value, list) else value


def written(folder: Path, name: str) -> Path:
    form = FORMS[name]
    for file, shade in SHADES.items():
        Image.new("RGB", (8, 8), (shade,) * 3).save(folder / file)
    path = folder / f"table.{form.suffix}"
    if form.suffix == "parquet":
        from datasets import Dataset

        rows = with_bytes(form.rows, folder)
        if form.layout == "pickapic":
            rows = [
                row | {side: (folder / row[side]).read_bytes() for side in ("jpg_0", "jpg_1")}
                for row in rows
            ]
        Dataset.from_list(rows).to_parquet(path)
    elif form.suffix == "csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(form.rows[0]))
            table.writeheader()
            table.writerows(form.rows)
    elif form.suffix == "json":
        path.write_text(json.dumps(form.rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in form.rows))
    return path


def worth(media: Any) -> float:
    """A known reward: of an image its brightness, of an answer whether it is the right one."""
    return float(media == GOOD) if isinstance(media, str) else float(media.mean())


@pytest.mark.parametrize("name", FORMS)
def test_the_better_sample_wins_in_every_row(tmp_path, name):
    form = FORMS[name]
    found = load_preferences(written(tmp_path, name), ReadOptions(**form.options))
    assert found.layout == form.layout and found.unlabelled == 0
    assert len(found.label) == form.pairs and int((found.label == 0.5).sum()) == form.ties
    gallery = Gallery(found.items)
    scores = [worth(gallery.samples([row]).media[0]) for row in range(len(found.items))]
    assert gallery.broken == {}
    for a, b, label in zip(found.a, found.b, found.label, strict=True):
        assert (scores[a] > scores[b]) == (label > 0.5), "the order of the row"
        assert (scores[a] == scores[b]) == (label == 0.5)
    assert all(item.prompt.strip() for item in found.items)


def test_conversations_keep_what_was_said_before(tmp_path):
    found = load_preferences(written(tmp_path, "hh-rlhf"), ReadOptions())
    first, second = (found.items[i].prompt for i in (0, 2))
    assert first == QUESTION
    assert second == f"user: Hi\nassistant: Hello\nuser: {QUESTION}"
    samples = Gallery(found.items).samples([0, 1])
    assert samples.kind == "text" and samples.media[0] == GOOD


def test_texts_are_evaluated_from_the_command_line(tmp_path, capsys):
    path = written(tmp_path, "UltraFeedback, binarized")
    reward = "{name: length, most: 11, kind: near}"
    out = tmp_path / "out"
    assert runs.flowrl("evaluate-rewards", path, "--rewards", reward, "--out", out) == 0
    said = capsys.readouterr().out
    assert "(texts): 1 prompts, 2 samples, 1 pairs" in said
    tree = json.loads((out / "evaluation.json").read_text())
    assert tree["dataset"]["layout"] == "texts" and (out / "evaluation.html").is_file()


def test_columns_are_named_on_the_command_line(tmp_path, capsys):
    path = written(tmp_path, "own names")
    columns = "prompt=caption,chosen=pair.win,rejected=pair.lose"
    more = ("--rewards", "brightness", "--robust", "0", "--out", tmp_path / "out")
    assert runs.flowrl("evaluate-rewards", path, "--columns", columns, *more) == 0
    assert "(chosen): 1 prompts, 2 samples, 1 pairs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("caption", "'caption' is no NAME=COLUMN"),
        ("prompt=", "is no NAME=COLUMN"),
        ("prompt=a,prompt=b", "prompt is given twice"),
    ],
)
def test_wrong_names_of_columns_are_told(words, message):
    with pytest.raises(UserError, match=f"--columns: .*{message}"):
        column_names([words])


def test_a_column_that_is_not_there_is_told(tmp_path):
    path = written(tmp_path, "own names")
    with pytest.raises(UserError, match=r"no column 'titel' \(--columns\).*caption"):
        load_preferences(path, ReadOptions(columns={"prompt": "titel"}))


def test_responses_of_several_images_are_refused(tmp_path):
    row = {**FORMS["MMRB2"].rows["pairs"][0]}
    row["response_a"] = {"response_content": [["image", BETTER], ["image", WORSE]]}
    (tmp_path / "t.json").write_text(json.dumps({"pairs": [row]}))
    with pytest.raises(UserError, match="response_a has 2 images, and a sample is one"):
        load_preferences(tmp_path / "t.json", ReadOptions())


def test_conversations_without_a_common_prompt_are_left_out_and_told(tmp_path):
    rows = [*FORMS["hh-rlhf"].rows]
    other = "\n\nHuman: Other\n\nAssistant: Yes."
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [{**rows[0], "chosen": other}, *rows])
    )
    with pytest.warns(UserWarning, match=r"1 of 3 rows left out: .*last turn \(line 1\)"):
        found = load_preferences(tmp_path / "t.jsonl", ReadOptions())
    assert len(found.label) == 2
    (tmp_path / "t.jsonl").write_text(json.dumps({**rows[0], "chosen": other}) + "\n")
    with pytest.raises(UserError, match="in every row; add the column prompt"):
        load_preferences(tmp_path / "t.jsonl", ReadOptions())


def test_empty_ratings_are_left_out(tmp_path):
    rows = [{"prompt": "p", "sample": f"{i}.png", "rating": r} for i, r in enumerate((1, None, 3))]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_preferences(tmp_path / "t.jsonl", ReadOptions())
    assert found.label.tolist() == [0.0] and found.rank.tolist() == [2.0, 1.0]
    (tmp_path / "t.jsonl").write_text(json.dumps({**rows[0], "rating": "good"}) + "\n")
    with pytest.raises(UserError, match="'good' is no rank or rating"):
        load_preferences(tmp_path / "t.jsonl", ReadOptions())


SAID = {"role": "user", "content": "Is it?"}
ONE_WORD = {
    "texts": {"prompt": "Is it?", "chosen": "Yes", "rejected": "No"},
    "conversations": {
        side: [SAID, {"role": "assistant", "content": word}]
        for side, word in (("chosen", "Yes"), ("rejected", "No"))
    },
}


@pytest.mark.parametrize("form", ONE_WORD)
def test_an_answer_of_one_word_is_no_file(tmp_path: Path, form: str) -> None:
    table = tmp_path / "t.jsonl"
    table.write_text(json.dumps(ONE_WORD[form]) + "\n")
    found = load_preferences(table, ReadOptions())
    assert found.layout == "texts" and [item.prompt for item in found.items] == ["Is it?"] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_a_column_that_counts_sides_is_no_score(tmp_path: Path, first: int) -> None:
    """The place 0 is the first side; a label of 0 says that the second one is better."""
    row = {"prompt": "p", "response_0": "a b", "response_1": "c d", "better_response_id": first}
    table = tmp_path / "t.jsonl"
    table.write_text(json.dumps(row) + "\n")
    names = {"a_text": "response_0", "b_text": "response_1", "label": "better_response_id"}
    found = load_preferences(table, ReadOptions(columns=names))
    assert found.label.tolist() == [1.0 - first]
    table.write_text(json.dumps(row | {"better_response_id": 2}) + "\n")
    with pytest.raises(UserError, match=r"line 1: better_response_id counts sides from 0"):
        load_preferences(table, ReadOptions(columns=names))
