"""HPDv3 and the sets of edits: tiny files in the published layouts, and a known truth."""

import json
from pathlib import Path

import pytest
import torch

from flowrl.errors import UserError
from flowrl.evaluation.edit_preferences import EDIT_LAYOUTS, ranks_in
from flowrl.evaluation.measure import Gallery
from flowrl.evaluation.preferences import ReadOptions, load_preferences
from flowrl.paths import PROJECT
from rewards import Samples
from rewards.perception.references import column_images
from tests.evaluation.test_preferences import picture, told, write
from tests.support import runs

ANY = ReadOptions()
PAIRS = PROJECT / "configs" / "preferences" / "pairs.jsonl"


def test_hpdv3_prefers_the_first_path(tmp_path):
    row = {"prompt": "p", "path1": "images/a.png", "path2": "images/b.png", "model1": "flux"}
    rows = [row | {"model2": "kolors", "confidence": None}, row | {"path1": "images/c.png"}]
    found = load_preferences(write(tmp_path, "test.json", rows), ANY)
    assert found.layout == "hpdv3" and found.clusters == 1
    assert told(found) == [
        ("images/a.png", "images/b.png", 1.0),
        ("images/c.png", "images/b.png", 1.0),
    ]
    assert found.items[0].meta["model1"] == "flux"


def test_editscores_bench_prefers_the_first_output_and_keeps_the_source(tmp_path):
    row = {
        "key": ["1", "2"],
        "instruction": "make it red",
        "input_image": {"bytes": picture(77), "path": None},
        "output_images": [{"bytes": picture(s), "path": None} for s in (10, 200)],
        "task_type": "color_alter",
    }
    rows = [row | {"dimension": d} for d in ("prompt_following", "overall")]
    found = load_preferences(write(tmp_path, "bench.parquet", rows), ANY)
    assert found.layout == "editscore_bench" and len(found.items) == 2
    assert found.label.tolist() == [1, 1] and found.category == ("prompt_following", "overall")
    samples = Gallery(found.items).samples([0, 1])
    assert samples.media.mean((1, 2, 3)).mul(255).round().tolist() == [10.0, 200.0]
    source, again = column_images("editreward", samples, "source")
    assert round(255 * float(source.mean())) == 77 and (source == again).all()
    assert not any(name in samples.meta[0] for name in ("input_image", "output_images"))


def test_editreward_bench_of_the_hub_and_of_its_files(tmp_path):
    row = {
        "id": "x",
        "instruction": "make it red",
        "source_image": {"bytes": picture(5), "path": None},
        "candidate_1": {"bytes": picture(10), "path": None},
        "candidate_2": {"bytes": picture(20), "path": None},
        "dataset": "3pair",
    }
    votes = {"A>C": 1.0, "C>A": 0.0, "B > C": 1.0, "A<B": 0.0, "A=B": 0.5, "A=B=Bad": 0.5}
    rows = [row | {"ranking": vote} for vote in votes]
    found = load_preferences(write(tmp_path, "bench.parquet", rows), ANY)
    assert found.layout == "editreward_bench" and found.label.tolist() == [*votes.values()]
    assert set(found.category) == {"3pair"}
    edits = {"prompt": "p", "path_src": "s.png", "paths_generated": ["x", "y", "z"]}
    rows = [
        edits | {"human_vote": {"ranking": "C>A>B"}},
        edits | {"paths_generated": ["x", "y"], "human_vote": {"ranking": "A=B=Good"}},
        edits | {"human_vote": {"preference": "?"}},
        edits | {"path_src": "", "human_vote": {"ranking": "C>A>B"}},
    ]
    found = load_preferences(write(tmp_path, "EditReward_Bench.json", rows), ANY)
    assert found.layout == "editreward_files" and found.unlabelled == 2
    assert told(found) == [("x", "y", 1), ("x", "z", 0), ("y", "z", 0), ("x", "y", 0.5)]
    assert found.rank.tolist() == [2, 3, 1, 1, 1]
    assert found.items[0].meta["source"] == str(tmp_path / "s.png")


def test_genai_benchs_edits_keep_their_source(tmp_path):
    sides = {"instruct_prompt": "p", "left_output_image": "l", "right_output_image": "r"}
    row = sides | {"vote_type": "leftvote", "source_image": "s.png"}
    found = load_preferences(write(tmp_path, "edit.jsonl", [row]), ANY)
    assert found.items[0].meta["source"] == str(tmp_path / "s.png")


def test_rankings():
    assert ranks_in("B>A>C", "here") == {"B": 1, "A": 2, "C": 3}
    assert ranks_in("A<B", "here") == {"A": 1, "B": 0}  # lower is better; the numbers only order
    assert ranks_in("D > A = B > C", "here") == {"D": 1, "A": 2, "B": 2, "C": 3}
    for bad in ("", "A", "A>", "A>A", "A>B<C", "A>E", "AB", "A>>B", None):
        with pytest.raises(UserError, match="here: the ranking is"):
            ranks_in(bad, "here")


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("editscore_bench", {"output_images": ["x"]}, "line 1: output_images must hold two"),
        ("editreward_bench", {"ranking": "A>B>C"}, "the ranking is 'A>B>C', but must rank two"),
        ("editreward_bench", {"source_image": 7}, "line 1, the source: 7 is neither"),
        ("editreward_files", {"human_vote": {"ranking": "A>B"}}, "does not match the 3 edits"),
        ("hpdv3", {"prompt": ""}, "line 1: the prompt is empty"),
    ],
)
def test_what_is_wrong_is_named_with_its_row(tmp_path, name, row, said):
    good = {column: column for column in EDIT_LAYOUTS[name].columns} | {
        "output_images": ["x", "y"],
        "ranking": "A>B",
        "paths_generated": ["x", "y", "z"],
        "human_vote": {"ranking": "A>B>C"},
    }
    columns = EDIT_LAYOUTS[name].columns
    rows = [{column: value for column, value in (good | row).items() if column in columns}]
    with pytest.raises(UserError, match=said):
        load_preferences(write(tmp_path, "bad.jsonl", rows), ANY)


def test_a_known_truth_lies_in_its_interval_in_hpdv3s_layout(tmp_path):
    """The pairs of configs/preferences as HPDv3's test.json: one in ten labels is wrong."""
    rows = []
    for line in PAIRS.read_text().splitlines():
        pair = json.loads(line)
        if pair["label"] != 0.5:
            first, second = ("a", "b") if pair["label"] == 1 else ("b", "a")
            rows.append({"prompt": pair["prompt"], "path1": pair[first], "path2": pair[second]})
    path = write(tmp_path, "test.json", rows)
    words = ["--images", PAIRS.parent, "--robust", 0, "--examples", 0, "--resamples", 500]
    out = tmp_path / "out"
    assert runs.flowrl("evaluate-rewards", path, "--rewards", "shapes", *words, "--out", out) == 0
    found = json.loads((Path(out) / "evaluation.json").read_text())
    accuracy = found["rewards"]["shapes"]["accuracy"]["excluded"]
    assert found["dataset"]["layout"] == "hpdv3" and found["ties"] == "excluded"
    assert accuracy["n"] == 390 and accuracy["value"] == pytest.approx(0.9)
    assert accuracy["low"] < 0.9 < accuracy["high"] and accuracy["high"] - accuracy["low"] < 0.12


def test_samples_without_any_columns_have_no_source():
    """One None for each sample, as for rows that lack the column."""
    bare = Samples(torch.zeros(3, 3, 2, 2), ["a", "b", "c"], torch.zeros(3, dtype=torch.long))
    assert column_images("editreward", bare, "source") == [None] * 3
