"""The tutorials: their columns, the files that they name, and their commands as they stand."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.paths import PROJECT, run_path
from tests.support import page_blocks
from tests.support.page_blocks import smaller
from tests.support.runs import environment

FOLDER = PROJECT / "docs" / "tutorials"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")
NAMED = re.compile(r"`(?:flowrl (?:train|plan) )?((?:models|papers)/\w+|demo\w*|text_demo)`")
RESULTS = ("report.html", "evaluation.html")


def commands(page: Path) -> Iterator[str]:
    """The lines of a page's shell blocks, in their order."""
    for block in page_blocks.of_page(page):
        if block.language == "bash":
            yield from block.text.strip().splitlines()


def test_the_index_and_the_menu_name_every_tutorial() -> None:
    index, menu = (FOLDER / "index.md").read_text(), (PROJECT / "mkdocs.yml").read_text()
    assert len(PAGES) == 6
    for page in PAGES:
        assert f"({page.name})" in index and f"tutorials/{page.name}" in menu


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_real_model_stands_beside_the_stand_in_and_is_marked(page: Path) -> None:
    text = page.read_text()
    assert "| here, a stand-in | a real model (planned, not run) |" in text
    assert text.count("![") >= 1, "from a problem to a picture"
    assert "**The problem.**" in text
    assert "## What to look at" in text or "## Read the page" in text
    missing = [name for name in NAMED.findall(text) if run_path(name) is None]
    assert not missing and list(commands(page))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_run_on_stand_ins_and_end_with_a_page(page: Path, tmp_path: Path) -> None:
    """In their order, with fewer iterations and samples, as a reader runs them."""
    program = [sys.executable, "-m", "flowrl"]
    env = environment() | {"PYTHONPATH": str(PROJECT)}
    if page.stem == "text_in_images":  # which compares with the demo's own run
        begin = shlex.split(smaller("flowrl train demo --folder runs/demo-0001"))
        subprocess.run([*program, *begin[1:]], cwd=tmp_path, env=env, check=True)
    for line in commands(page):
        words = shlex.split(smaller(line), comments=True)
        done = subprocess.run(
            [*program, *words[1:]], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert [path for name in RESULTS for path in tmp_path.rglob(name)]
