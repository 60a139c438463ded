"""Pages that hold: the examples run, and every relative link leads to a file."""

import re
from pathlib import Path

import pytest
import torch

from flowrl.paths import PROJECT
from rewards import Samples

PAGES = [*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")]
FENCE = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def examples() -> dict[str, str]:
    """The blocks of Python on the page of extensions, by their headings."""
    sections = (PROJECT / "docs" / "extending.md").read_text().split("\n## ")[1:]
    return {s.splitlines()[0]: FENCE.search(s)[1] for s in sections}  # type: ignore[index]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        target
        for target in LINK.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken
