"""docs/api.md and the notebooks of examples/: every example runs."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl.paths import PROJECT
from scripts.generate.notebooks import RECORD, code_digest
from tests.support.notebooks import code_cells, last_output

PAGE = PROJECT / "docs" / "api.md"
NOTEBOOKS = sorted((PROJECT / "examples").glob("*.ipynb"))
FENCE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def programs() -> dict[str, list[str]]:
    blocks = FENCE.findall(PAGE.read_text())
    return {PAGE.name: blocks} | {path.name: code_cells(path) for path in NOTEBOOKS}


def test_the_notebooks_have_no_outputs_or_those_of_their_code() -> None:
    """`python scripts/generate/notebooks.py` writes them; outputs of older code would mislead."""
    assert [path.stem for path in NOTEBOOKS] == ["image", "rewards", "text"]
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        book = json.loads(text)
        assert book["nbformat"] == 4 and "/tmp/" not in text and str(PROJECT) not in text
        if any(cell.get("outputs") for cell in book["cells"]):
            assert book["metadata"][RECORD] == code_digest(book["cells"]), f"{path.name} is older"


@pytest.mark.parametrize("name", programs())
def test_an_example_names_what_there_is(name: str) -> None:
    """Syntax, and every `flowrl.name` with its keywords, without running anything."""
    for text in programs()[name]:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "flowrl":
                assert node.attr in (*flowrl.__all__, "__file__"), node.attr


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the demo's models and nothing else."""
    (tmp_path / "flowrl").mkdir()
    (tmp_path / "flowrl" / "demo").symlink_to(PROJECT / "flowrl" / "demo")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_pages_examples_run(elsewhere: Path) -> None:
    """In the page's order and in one namespace, as a reader types them."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(programs()[PAGE.name], 1):
        exec(compile(block, f"{PAGE.name}, example {number}", "exec"), space)
    assert len(space["run"].metrics) > 2


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, elsewhere: Path) -> None:
    found = last_output(path)
    print(found)
    if path.stem == "rewards":
        assert next(iter(found)) == "shapes" and found["shapes"] > 0.85 > found["brightness"]
    else:
        assert found["after"] > found["before"] + 0.02
