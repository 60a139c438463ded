"""What a run accepts reads back from its run.yaml, and values of unlike types are not compared."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.errors import UserError
from flowrl.run.watch.start_check import refusals
from flowrl.settings.file import inherit
from flowrl.settings.file.strict_yaml import parse_yaml
from flowrl.settings.read import dump, run_from, run_yaml_text
from tests.support.runs import flowrl

HUGE = 2**70


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a ball", "n": 1}) + "\n")
    return {
        "recipe": {"name": "nft", "steps": 4}, "model": {"pipeline": "flowrl/demo/shapes-sd3"},
        "prompts": {"train": str(tmp_path / "p.jsonl")}, "rewards": [{"name": "brightness"}],
    }  # fmt: skip


# settings of any type at any depth, and the place that is named
NUMBERS: dict[str, dict[str, Any]] = {
    "train.seed": {"train": {"seed": HUGE}},
    "model.call.max_sequence_length": {"model": {"call": {"max_sequence_length": -HUGE}}},
    "rewards.0.settings.k": {"rewards": [{"name": "brightness", "settings": {"k": HUGE}}]},
    "rewards.0.settings.k.1": {"rewards": [{"name": "brightness", "k": [1, HUGE]}]},
    "prompts.train.shuffle": {"prompts": {"train": {"source": "p.jsonl", "shuffle": HUGE}}},
}


@pytest.mark.parametrize("place", NUMBERS)
def test_an_integer_that_run_yaml_cannot_hold_is_refused(tree, place) -> None:
    merged = inherit.merged(tree, NUMBERS[place])
    with pytest.raises(UserError, match=f"{place}: .* is too large: use an integer from -2"):
        run_from(merged, "x")


def test_the_largest_integers_read_back(tree) -> None:
    for seed in (2**63, -(2**63)):
        run = run_from(tree | {"train": {"seed": seed}}, "x")
        assert run_from(parse_yaml(run_yaml_text(run), "x"), "x") == run


LONG = "a" * 2**18
DEEP: list[Any] = []
for _ in range(50):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "words"),
    [  # words: of the refusal; empty: what is written means the same
        (LONG, "characters"),
        (DEEP, "nested more than"),
        ([0] * 21_000, "values"),
        (np.float32(1), "cannot be written"),
        ({1, 2}, ""),
    ],
    ids=["long", "deep", "many", "numpy", "set"],
)
def test_settings_that_cannot_be_read_again_are_refused_by_plan(tree, value, words) -> None:
    """And no folder is left, as its run.yaml is read before it appears."""
    rewards = [{"name": "brightness", "settings": {"k": value}}]
    if words == "cannot be written":
        with pytest.raises(UserError, match=words):
            run_from(tree | {"rewards": rewards}, "x")
        return
    run = run_from(tree | {"rewards": rewards}, "x")
    try:
        again = run_from(parse_yaml(run_yaml_text(run), "x"), "x")
    except UserError as error:
        assert words and words in str(error)
        assert str(error) in list(refusals(run))
    else:
        assert not words and dump(again) == dump(run)


def test_a_seed_beyond_the_range_leaves_no_folder(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert flowrl("train", "demo", f"--train.seed={HUGE}", "--folder", "run") == 2
    assert "train.seed" in capsys.readouterr().err and not Path("run").exists()


@pytest.mark.parametrize("bound", ["a", True, "2020-01-01"])
@pytest.mark.parametrize("side", ["min", "max"])
def test_bounds_of_a_column_are_numbers(tree, side, bound) -> None:
    source = {"source": tree["prompts"]["train"], "where": {"n": {side: bound}}}
    with pytest.raises(UserError, match=f"n.{side} must be a number, not"):
        run_from(tree | {"prompts": {"train": source}}, "x")


@pytest.mark.parametrize("cell", [None, "b", [1], {"a": 1}, True, 2])
@pytest.mark.parametrize("wanted", [{"min": 1}, "b", 1, None, True])
def test_cells_of_any_type_are_compared_without_a_trace(tree, tmp_path, cell, wanted) -> None:
    fits = 3 if isinstance(wanted, dict) else wanted
    rows = [{"prompt": "a", "n": cell}, {"prompt": "b", "n": fits}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"source": tree["prompts"]["train"], "where": {"n": wanted}}
    read = run_from(tree | {"prompts": {"train": source}}, "x").prompts.read("train")
    assert "b" in read.texts


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "is empty"), ("# only a comment\n", "is empty"), ("a:\n\tb: 1\n", "spaces")],
)
def test_an_empty_file_and_a_tab_are_named(tmp_path, capsys, text, words) -> None:
    (tmp_path / "r.yaml").write_text(text)
    (tmp_path / "over.yaml").write_text("base: r.yaml\n")
    for name in ("r.yaml", "over.yaml"):
        assert flowrl("plan", tmp_path / name) == 2
        assert words in capsys.readouterr().err
