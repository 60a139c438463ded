"""Run files with a base: what merges, what replaces, and every way in which a base can be wrong."""

import json
from pathlib import Path

import pytest
import yaml

from flowrl.cli.make_schema import run_schema
from flowrl.errors import UserError
from flowrl.paths import CONFIGS_FOLDER
from flowrl.settings.file.inherit import read_tree
from flowrl.settings.read import dump, override, read_run, run_from

DEMO = "base: configs/demo.yaml\n"


def put(folder: Path, **files: str) -> Path:
    """Write the files; returns the first."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read_run(path)
    return str(error.value)


def test_mappings_merge_lists_replace_and_null_counts(tmp_path):
    put(tmp_path / "deep", c="recipe: nft\nmodel: {lora: {rank: 4}, call: {a: [1, 2], b: 1}}\nx: 1")
    put(tmp_path, b="base: deep/c.yaml\nrecipe: {steps: 3}\nmodel: {call: {a: [3]}}")
    tree, names = read_tree(put(tmp_path, a="base: b.yaml\nmodel: {lora: null, call: {c: {}}}"))
    assert tree == {
        "recipe": {"name": "nft", "steps": 3},
        "model": {"lora": None, "call": {"a": [3], "b": 1, "c": {}}},
        "x": 1,
    }
    assert names == f"{tmp_path}/a.yaml over {tmp_path}/b.yaml over {tmp_path}/deep/c.yaml"
    tree, _ = read_tree(put(tmp_path, a="base: b.yaml\nrecipe: dpo"))
    assert tree["recipe"] == {"name": "dpo"}  # the base's settings are those of another recipe
    tree, _ = read_tree(put(tmp_path, a="base: b.yaml\nrecipe: {name: nft, group: 2}"))
    assert tree["recipe"] == {"name": "nft", "steps": 3, "group": 2}


def test_a_run_with_a_base_is_the_whole_run(tmp_path, monkeypatch):
    """What run.yaml will hold: every setting and no base; options lie over both."""
    path = put(tmp_path, mine=DEMO + "train: {iterations: 7}\n")
    run, demo = read_run(path), read_run(CONFIGS_FOLDER / "demo.yaml")
    assert run == demo.model_copy(update={"train": demo.train.model_copy(update={"iterations": 7})})
    assert "base" not in dump(run) and run_from(dump(run), "run.yaml") == run
    assert override(run, ["--train.iterations", "3"]).train.iterations == 3
    # other paths do not move with the file: a base's prompts are where they were
    near = tmp_path / "there"
    put(near, base=yaml.safe_dump(dump(demo) | {"prompts": {"train": "own.txt"}}))
    (tmp_path / "own.txt").write_text("a red ball\n")
    monkeypatch.chdir(tmp_path)
    run = read_run(put(tmp_path / "else", mine="base: ../there/base.yaml\n"))
    assert run.prompts.read("train").texts == ("a red ball",)


def test_what_is_wrong_is_one_sentence_with_both_names(tmp_path):
    a = put(tmp_path, a="base: b.yaml\n", b="base: a.yaml\n")
    said = refused(a)
    assert "a.yaml: base: " in said and "in a circle" in said
    assert f"{tmp_path}/a.yaml -> {tmp_path}/b.yaml -> {tmp_path}/a.yaml" in said
    assert "in a circle" in refused(put(tmp_path, own="base: own.yaml\n"))
    damaged = refused(put(tmp_path, a="base: b.yaml\n", b="model: [1\n"))
    assert "a.yaml: base: " in damaged and "b.yaml: not valid YAML: line 2" in damaged
    words = refused(put(tmp_path, a="base: b.yaml\n", b="just words\n"))
    assert "b.yaml: expected settings, not 'just words'" in words
    missing = refused(put(tmp_path, a="base: none.yaml\n"))
    assert "a.yaml: base: there is no file" in missing and "none.yaml" in missing
    assert "did you mean configs/demo.yaml?" in refused(put(tmp_path, a="base: demo\n"))
    assert "did you mean configs/demo.yaml?" in refused(put(tmp_path, a="base: config/demo.yaml\n"))
    near = refused(put(tmp_path, a="base: mine.yml\n", mine="just words\n"))
    assert near.endswith("did you mean mine.yaml?")
    assert "expected a file such as" in refused(put(tmp_path, a="base: [demo.yaml]\n"))
    wrong = refused(put(tmp_path, a=DEMO + "train: {lrr: 1}\n"))
    assert "a.yaml over " in wrong and "demo.yaml: train.lrr" in wrong and "did you mean" in wrong
    assert "did you mean 'base'?" in refused(put(tmp_path, a="bases: demo.yaml\n"))
    with pytest.raises(UserError, match="only a run file can have a base"):
        run_from({"base": "demo.yaml"}, "settings")


def test_the_schema_knows_the_base():
    """Without one a file needs all its sections; with one it may change a single setting."""
    schema = run_schema()
    assert schema["properties"]["base"]["type"] == "string" and "required" not in schema
    assert schema["if"] == {"not": {"required": ["base"]}}
    assert schema["then"]["required"] == ["recipe", "model", "prompts", "rewards"]
    text = json.dumps(schema["properties"]["recipe"])
    assert "discriminator" not in text and "oneOf" not in text and "#/$defs/nft" in text
