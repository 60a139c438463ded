"""What is said of recipes as evidence, held against the files that it comes from."""

import re
import subprocess

import pytest

from flowrl.api.commands import recipes_command
from flowrl.paths import PROJECT
from flowrl.recipes import RECIPES
from flowrl.recipes.evidence import SEEN, SOURCE_KINDS, evidence_of
from flowrl.recipes.table import CONTRIBUTED_RECIPES, OWN_RECIPES
from scripts.generate.recipes_seen import cells, measured, seen

GOLDEN = PROJECT / "tests" / "golden"


def test_what_was_seen_is_up_to_date() -> None:
    assert SEEN.read_text() == seen(), "run: python scripts/generate/recipes_seen.py"


def test_gains_are_those_of_the_page_of_results() -> None:
    found = dict(measured())
    page = (PROJECT / "docs" / "results" / "methods.md").read_text()
    assert "| crd | 0.896 | +0.138 +- 0.054 |" in page and found["crd"] == (0.138, 0.054)
    assert "| nft | 0.908 | 0.030 |" in page  # of a base of 0.758, in the first table of the page
    nft = evidence_of(RECIPES["nft"])
    assert (nft.gain, nft.interval, nft.learned) == (0.15, 0.03, "+0.150 +- 0.030")
    assert evidence_of(RECIPES["text_gmpo"]).learned.endswith(", one seed")
    assert evidence_of(RECIPES["text"]).learned == "-"  # a starting point, not a method
    rows = [cells(line)[0] for line in page.splitlines() if line.startswith("| ")]
    assert {*found} <= {*rows} & {*RECIPES}


@pytest.mark.parametrize("name", RECIPES)
def test_arrays_are_there_and_read_by_a_test(name: str) -> None:
    sources = evidence_of(RECIPES[name]).sources
    assert sources.kind in SOURCE_KINDS and (sources.kind == "arrays") == bool(sources.arrays)
    for array in sources.arrays:
        assert (GOLDEN / f"{array}.npz").is_file(), array
        words = ["git", "grep", "-l", "-w", array, "--", "tests/*.py"]
        readers = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, check=False)
        assert readers.stdout, array


def test_the_list_has_the_contributed_recipes_on_demand(capsys) -> None:
    def listed(*words: str) -> list[str]:
        assert recipes_command([*words]) == 0
        return re.findall(r"^  (\w+)", capsys.readouterr().out, re.MULTILINE)

    assert {*listed()} == {*OWN_RECIPES, "joint"}
    assert {*listed("--all")} == {*RECIPES, "joint"}
    assert len(listed("--all")) == len(RECIPES) + 1 and CONTRIBUTED_RECIPES
