"""The schema: what the types say, renewed where the code has changed, and read without torch."""

import json
from pathlib import Path

import pytest

from flowrl.cli import make_schema as maker
from flowrl.cli import schema
from flowrl.cli.command_table import COMMANDS
from flowrl.recipes import RECIPES
from rewards.load import names


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
    for name in ("flowrl/algorithm.py", "flowrl/settings/sections/run.py", "flowrl/run/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1\n")
    before = schema._digest()
    (tmp_path / "flowrl/run/train.py").write_text("a = 2\n")
    assert schema._digest() == before  # training has no words of its own
    (tmp_path / "flowrl/settings/sections/run.py").write_text("a = 2\n")
    changed = schema._digest()
    (tmp_path / "flowrl/settings/sections/run.py").rename(tmp_path / "flowrl/settings/other.py")
    assert len({before, changed, schema._digest()}) == 3
