"""Each setting of each recipe is described: its meaning, and a range that is the one enforced."""

import re
from typing import Any

import pytest

from flowrl.api.commands import recipes_command
from flowrl.cli.make_schema import run_schema
from flowrl.cli.recipe_text import recipe_rows
from flowrl.recipes import RECIPES
from flowrl.recipes.meanings import _SHARED, recipe_words, setting_meanings
from flowrl.settings import recipe_kind
from scripts.generate.recipes_page import section

INTERVAL = re.compile(r"\bin ([\[(])(-?[\d.]+), (-?[\d.]+)([\])])")
HALF_LINE = re.compile(r"\b(at least|above) ([\d.]+)\b")
READ_WITH: dict[
    tuple[str, str], dict[str, Any]
] = {  # settings that need another one to have an effect
    ("branch_grpo", "keep"): {"prune": "branch"},
    ("branch_grpo", "fusion_beta"): {"fusion": "likely_paths"},
    ("draft", "spread"): {"cut": "normal"},
    ("turning_point", "bonus"): {"form": "released"},
    ("euphonium", "outcome"): {"process": 1.0},
}
OF_ANOTHER = {  # settings whose range is a relation to another setting
    ("refl", "first"),
    ("refl", "stop"),
    ("text_pass_at_k", "group"),
    ("pro_grpo", "start"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_each_setting_has_a_meaning(name: str) -> None:
    missing = [row.name for row in recipe_rows(name, parts=True) if not row.meaning]
    assert not missing, f"{name}: write lines that begin with the name and two spaces: {missing}"


@pytest.mark.parametrize("name", RECIPES)
def test_no_line_describes_what_is_no_setting(name: str) -> None:
    """A misspelt name, or a line between the descriptions, would leave its paragraph as prose."""
    lines = recipe_words(RECIPES[name]).splitlines()
    assert not [line for line in lines if re.match(r"\w+  +\S", line)]


def test_each_shared_meaning_is_read() -> None:
    shown = {meaning for name in RECIPES for meaning in setting_meanings(RECIPES[name]).values()}
    assert [name for name, _, meaning in _SHARED if meaning not in shown] == []


def outside_of(meaning: str, whole: bool) -> list[float]:
    """Numbers just outside of the range that a description states first; none without one."""
    interval, half_line = INTERVAL.search(meaning), HALF_LINE.search(meaning)
    step = 1.0 if whole else 0.01
    if half_line and not (interval and interval.start() < half_line.start()):
        least = float(half_line[2])
        return [least if half_line[1] == "above" else least - step]
    if interval is None:
        return []
    low, high = float(interval[2]), float(interval[3])
    return [
        low if interval[1] == "(" else low - step,
        high if interval[4] == ")" else high + step,
    ]


def refused(name: str, settings: dict[str, Any]) -> bool:
    """Whether a recipe, the plan of its first iteration or its tracker refuses settings."""
    try:
        algorithm = recipe_kind(name)(name=name, **settings).algorithm()
        algorithm.tracker()
        steps = algorithm.steps
        algorithm.plan([1 - i / steps for i in range(steps + 1)], 0, 0)
    except ValueError:
        return True
    return False


NUMBERS = ("int", "float", "int or null", "float or null")


@pytest.mark.parametrize("name", RECIPES)
def test_a_number_outside_of_its_stated_range_is_refused(name: str) -> None:
    assert not refused(name, {})
    for row in recipe_rows(name):
        if row.kind not in NUMBERS or (name, row.name) in OF_ANOTHER:
            continue
        whole = row.kind.startswith("int")
        wrong = outside_of(row.meaning, whole)
        assert wrong or "any number" in row.meaning, f"{name}: {row.name}: say its range"
        for number in wrong:
            value = int(number) if whole else number
            settings = {**READ_WITH.get((name, row.name), {}), row.name: value}
            assert refused(name, settings), (name, settings, row.meaning)


def test_the_command_the_page_and_editors_say_the_meaning(capsys: pytest.CaptureFixture[str]):
    meaning = setting_meanings(RECIPES["dpo"])["beta"]
    assert meaning.startswith("inverse temperature of the preference, above 0; ")
    assert recipes_command(["dpo"]) == 0
    said = capsys.readouterr().out
    assert meaning in " ".join(said.split())
    assert said.count("inverse temperature") == 1
    assert f"| `beta` | float | `100.0` | {meaning} |" in section("dpo")
    assert run_schema()["$defs"]["dpo"]["properties"]["beta"]["description"] == meaning


def own_recipe(*, steps: int = 10, pull: float = 0.5, rank: int = 2) -> None:
    """A recipe of a reader.

    pull  strength of the pull, above 0;
          larger pulls more
    """


def test_a_recipe_of_your_own_is_described_in_the_same_way():
    meanings = setting_meanings(own_recipe)  # its docstring alone says what its settings mean
    assert meanings == {"pull": "strength of the pull, above 0; larger pulls more"}
    assert recipe_words(own_recipe) == "A recipe of a reader."
