"""The schema: what the types say, renewed where the code has changed, and read without torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from flowrl.cli import make_schema as maker
from flowrl.cli import schema
from flowrl.cli.command_table import COMMANDS
from flowrl.paths import PROJECT, own_runs
from flowrl.recipes import RECIPES
from flowrl.settings.read import run_from
from rewards.load import names
from tests.support import page_blocks
from tests.support.page_blocks import Block

RUN_FILES = [
    *(file for _, file in own_runs()),
    *sorted((PROJECT / "examples").rglob("*.yaml")),
]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A file and a cache of its own; one entry for each time that the schema was made."""
    times: list[int] = []
    monkeypatch.setattr(schema, "BUILT", tmp_path / "package" / "schema.json")
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(maker, "make_schema", lambda: times.append(1) or {"n": len(times)})
    return times


def read() -> dict[str, object]:
    schema.read_schema.cache_clear()
    try:
        return schema.read_schema()
    finally:
        schema.read_schema.cache_clear()


@pytest.mark.slow
def test_the_file_is_what_the_types_say() -> None:
    found = dict(schema.read_schema())
    assert json.loads(json.dumps(maker.make_schema())) == {k: found[k] for k in found if k != "of"}
    assert list(found["recipes"]) == list(RECIPES) and list(found["rewards"]) == names()
    assert all(each["about"] for part in ("recipes", "rewards") for each in found[part].values())
    assert {name for name, each in COMMANDS.items() if each.words} == set(found["commands"])
    lr = next(each for each in found["settings"] if each["name"] == "--train.lr")
    assert lr["default"] == "0.0003" and lr["about"].startswith("Learning rate")
    of_editors = found["run"]["$defs"]["Train"]["properties"]["lr"]
    assert of_editors["description"].startswith("Learning rate")


@pytest.fixture(scope="module")
def editor() -> Draft202012Validator:
    """What an editor marks in a run file."""
    found = maker.run_schema()
    Draft202012Validator.check_schema(found)
    return Draft202012Validator(found)


def marks(editor: Draft202012Validator, tree: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message[:200]}" for error in editor.iter_errors(tree)]


@pytest.mark.parametrize("block", page_blocks.blocks("yaml"), ids=str)
def test_an_editor_marks_no_block_of_a_page(block: Block, editor: Draft202012Validator) -> None:
    """A block is a part of a file, as one with a base is."""
    assert not marks(editor, {"base": "rest.yaml", **yaml.safe_load(block.text)})


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: file.stem)
def test_an_editor_marks_no_run_file(file: Path, editor: Draft202012Validator) -> None:
    assert not marks(editor, yaml.safe_load(file.read_text()))


WHOLE: dict[str, Any] = {
    "recipe": {"name": "nft"},
    "model": {"pipeline": "flowrl/demo/shapes-sd3"},
    "prompts": {"train": "prompts.txt"},
    "rewards": [{"name": "shapes"}],
}
SHORT = (  # what may stand for a section or a setting, and a mistake of the same form
    ("recipe", "nft", 3),
    ("model", "flowrl/demo/shapes-sd3", ["flowrl/demo/shapes-sd3"]),
    ("model", {"own": "mine.py:MyFlow"}, {"own": ["mine.py:MyFlow"]}),
    ("model", {"pipeline": "p", "lora": 16}, {"pipeline": "p", "lora": [16]}),
    ("model", {"pipeline": "p", "lora": True}, {"pipeline": "p", "lora": {"rnk": 4}}),
    ("model", {"pipeline": "p", "guidance": 4.5}, {"pipeline": "p", "guidance": [4.5]}),
    ("prompts", "prompts.txt", 16),
    ("prompts", ["a.txt", {"source": "b.jsonl", "name": "b"}], ["a.txt", {"name": "b"}]),
    ("prompts", {"source": "openai/gsm8k", "config": "main"}, {"config": "main"}),
    ("rewards", "shapes", 3),
    ("rewards", ["shapes", {"name": "hps"}], [3]),
    ("rewards", {"shapes": 1.0, "hps": None}, {"shapes": [1.0]}),
    ("rewards", {"shapes": {"weight": 2.0}}, [["shapes"]]),
    ("held_out_rewards", {"name": "hps", "sets": "a"}, {"name": "hps", "sets": 3}),
)


@pytest.mark.parametrize(("section", "short", "wrong"), SHORT)
def test_short_forms_are_in_the_schema(
    section: str, short: Any, wrong: Any, editor: Draft202012Validator
) -> None:
    assert not marks(editor, WHOLE | {section: short})
    assert marks(editor, WHOLE | {section: wrong})
    if section != "held_out_rewards" and "own" not in short:
        run_from(WHOLE | {section: short}, "here")  # and the reader takes what the editor does


def test_it_is_made_once_and_again_after_a_change(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read()["n"] == read()["n"] == 1
    monkeypatch.setattr(schema, "_digest", lambda: "changed")
    assert read()["n"] == read()["n"] == 2
    schema.BUILT.write_text("{")  # damaged
    assert read()["n"] == 3 and len(made) == 3


def test_a_folder_that_cannot_be_written_leaves_it_in_the_cache(
    made: list[int], tmp_path: Path
) -> None:
    (tmp_path / "package").write_text("a file where the folder should be")
    assert read()["n"] == read()["n"] == 1
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.name.startswith("schema-")
    kept.unlink()
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_text("")
    assert read()["n"] == 2 and read()["n"] == 3  # nowhere to keep it, and still an answer


def test_an_installed_package_reads_no_code(
    made: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema.BUILT.parent.mkdir()
    schema.BUILT.write_text('{"of": "the build", "n": "built"}')
    monkeypatch.setattr(schema, "PROJECT", tmp_path)  # no pyproject.toml beside the packages
    monkeypatch.setattr(schema, "_digest", lambda: pytest.fail("read the code"))
    assert read()["n"] == "built" and not made


def test_the_digest_follows_the_code_and_its_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "PROJECT", tmp_path)
    code = ("flowrl/algorithm.py", "flowrl/settings/sections/run.py", "flowrl/run/train.py")
    for name in (*code, "flowrl/cli/make_schema.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1\n")
    before = schema._digest()
    (tmp_path / "flowrl/run/train.py").write_text("a = 2\n")
    assert schema._digest() == before  # training has no words of its own
    (tmp_path / "flowrl/settings/sections/run.py").write_text("a = 2\n")
    changed = schema._digest()
    (tmp_path / "flowrl/settings/sections/run.py").rename(tmp_path / "flowrl/settings/other.py")
    assert len({before, changed, schema._digest()}) == 3
