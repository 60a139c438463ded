"""Pages that hold: the examples run on public names, and every relative link leads to a file."""

import ast
import builtins
import dis
import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import CodeType

import pytest
import torch

import flowrl
import flowrl.laws
import flowrl.models.engine
import flowrl.parts
import samplers
from flowrl.paths import PROJECT
from rewards import Samples

PAGES = [*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")]
FENCE = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def examples() -> dict[str, str]:
    """The blocks of Python on the page of extensions, by their headings."""
    sections = re.split("\n##+ ", (PROJECT / "docs" / "extending.md").read_text())[1:]
    return {s.splitlines()[0]: block for s in sections for block in FENCE.findall(s)}


@pytest.mark.parametrize("name", examples())
def test_an_example_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    space: dict[str, object] = {"__name__": "example"}
    module = type(torch)("example")
    monkeypatch.setitem(__import__("sys").modules, "example", module)
    exec(compile(examples()[name], name, "exec"), space)
    if name == "A reward":
        media = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]]).view(2, 3, 1, 1).expand(2, 3, 4, 4)
        samples = Samples(media, ["warm"] * 2, torch.zeros(2, dtype=torch.long))
        assert space["warmth"](samples).tolist() == [1.0, -1.0]  # type: ignore[operator]


# docs/architecture.md, "What you may import"
PUBLIC = {
    "flowrl": {*flowrl.__all__},
    "flowrl.api": {*flowrl.__all__},
    "flowrl.laws": {*flowrl.laws.__all__},
    "flowrl.models.engine": {*flowrl.models.engine.__all__},
    "flowrl.parts": {*flowrl.parts.__all__},
    "flowrl.recipes": {"RECIPES"},
    "rewards": {"load"},
    "rewards.types": {"Judge", "Reward", "RewardScores", "Samples", "Scores"},
    "samplers": {*samplers.__all__, *samplers.CONTRIBUTED},
}


def programs() -> Iterator[tuple[str, str]]:
    """What readers copy: blocks of pages, programs and notebooks."""
    for page in PAGES:
        for block in FENCE.findall(page.read_text()):
            yield page.name, dedent(block)
    for path in sorted((PROJECT / "examples").rglob("*.py")):
        yield path.name, path.read_text()
    for path in sorted((PROJECT / "examples").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            lines = "".join(cell["source"]) if cell["cell_type"] == "code" else ""
            yield path.name, re.sub(r"^[%!].*", "", lines, flags=re.MULTILINE)


def private_names(program: str) -> Iterator[str]:
    """Names that a program takes from this project and that may move in any version."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            yield from (
                alias.name
                for alias in node.names
                if alias.name.partition(".")[0] in {"flowrl", "rewards", "samplers"}
                and alias.name not in PUBLIC
            )
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.partition(".")[0] in {"flowrl", "rewards", "samplers"}:
                allowed = PUBLIC.get(node.module, set())
                names = [alias.name for alias in node.names if alias.name not in allowed]
                yield from (f"{node.module}.{name}" for name in names)


def test_what_readers_copy_imports_public_names() -> None:
    found = [(where, name) for where, program in programs() for name in private_names(program)]
    assert not found
    assert len([*programs()]) > 40
    page = (PROJECT / "docs/architecture.md").read_text().partition("## What you may import")[2]
    assert all(f"`{module}" in page for module in PUBLIC)


def undefined(code: CodeType) -> set[str]:
    """Names that a program's functions read and that it nowhere defines."""
    inner, reads, writes = [code], set[str](), {*vars(builtins), "__annotations__", "__file__"}
    while inner:
        part = inner.pop()
        inner += [each for each in part.co_consts if isinstance(each, CodeType)]
        for step in dis.get_instructions(part):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                reads.add(step.argval)
            elif step.opname in ("STORE_GLOBAL", "STORE_NAME"):
                writes.add(step.argval)
    return reads - writes


@pytest.mark.parametrize("file", sorted((PROJECT / "examples").rglob("*.py")), ids=lambda p: p.name)
def test_a_program_defines_what_it_uses(file: Path) -> None:
    assert not undefined(compile(file.read_text(), file.name, "exec"))


def test_the_public_names_of_parts_are_there_once() -> None:
    names = flowrl.parts.__all__
    assert all(hasattr(flowrl.parts, name) for name in names) and len({*names}) == len(names)
    assert {*names} == {name for name in vars(flowrl.parts) if not name.startswith("_")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        target
        for target in LINK.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken
