"""Samples are saved whatever their rewards do."""

import json
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.warm import small

OWN = """
def sided(samples):
    return [float(row["side"] == "left") for row in samples.meta]
"""


@pytest.fixture(scope="module")
def run(pipeline, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("sided")
    (place / "own.py").write_text(OWN)
    tree = small(pipeline, place) | {"rewards": [{"name": f"{place / 'own.py'}:sided"}]}
    rows = [{"prompt": f"a {c} ball", "side": s} for c, s in (("red", "left"), ("blue", "right"))]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree["train"]["iterations"] = 1
    assert runs.flowrl("train", runs.write(tree, place), "--folder", place / "run") == 0
    return place / "run"


def test_a_reward_that_reads_a_column_scores_the_prompts_of_the_files(run, tmp_path, capsys):
    words = ("--count", "1", "--out", tmp_path / "out")
    assert runs.flowrl("sample", run, "a red ball", "a blue ball", *words) == 0
    said = capsys.readouterr()
    assert "unscored" not in said.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "000.png",
        "001.png",
        "grid.png",
    }


def test_other_prompts_are_saved_and_unscored_with_the_reason(run, tmp_path, capsys):
    words = ("--count", "1", "--out", tmp_path / "out")
    assert runs.flowrl("sample", run, "a green cube", *words) == 0
    said = capsys.readouterr()
    assert "unscored: sided raised KeyError: 'side'" in said.err
    assert "in no prompt file of the run have no columns" in said.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"000.png", "grid.png"}
