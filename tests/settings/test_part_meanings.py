"""Each setting of each part is described: its meaning, and a range that is the one enforced."""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from flowrl.api.commands import recipes_command
from flowrl.cli.schema import read_schema
from flowrl.errors import UserError
from flowrl.recipes import RECIPES
from flowrl.settings import recipe_kind
from flowrl.settings.parts.meanings import SHARED_MEANINGS, part_meanings
from flowrl.settings.parts.names import part_name
from flowrl.settings.parts.own_parts import parts_of_recipes
from rewards.checks.settings import function_parameters
from tests.recipes.test_setting_meanings import outside_of

KINDS = parts_of_recipes()
NUMBERS = (int, float, int | None, float | None)
AT_THE_PLAN = {  # refused where the steps or the group are known, which tests of planners hold
    *((name, "group") for name in ("Scattered", "Ode", "Chain", "Window", "LastSteps")),
    *((name, "group") for name in ("OneOfSteps", "TwoLeaps", "SomeSteps", "Completions")),
    *((name, "roots") for name in ("Fork", "Tree", "Segments", "Forks")),
    *(("Scattered", name) for name in ("count", "share")),
    ("Chain", "fraction"),
    ("Window", "size"),
    ("Fork", "branch"),
    ("Segments", "branch"),
    ("Tree", "split"),
    ("LastSteps", "last"),
    ("TwoLeaps", "order"),
    ("TwoLeaps", "reach"),
    ("SomeSteps", "active"),
    ("Looking", "steps"),
    *((name, setting) for name in ("Completions", "Segments", "Forks")
      for setting in ("temperature", "top_p", "top_k", "min_p")),
}  # fmt: skip


def instances() -> dict[type, Any]:
    """A part of each class: with its defaults, or as a recipe has it."""
    parts_made = dict[type, Any]()
    for name in RECIPES:
        for part in _inside(recipe_kind(name)(name=name).algorithm()):
            parts_made.setdefault(type(part), part)
    for kind in KINDS:
        parameters = function_parameters(kind).values()
        if kind not in parts_made and all(p.default is not p.empty for p in parameters):
            parts_made[kind] = kind()
    return parts_made


def _inside(part: Any) -> Iterator[Any]:
    if isinstance(part, tuple):
        for entry in part:
            yield from _inside(entry)
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        yield part
        for field in dataclasses.fields(part):
            yield from _inside(getattr(part, field.name))


@pytest.mark.parametrize("kind", KINDS, ids=part_name)
def test_each_setting_has_a_meaning(kind: type) -> None:
    missing = [name for name in function_parameters(kind) if name not in part_meanings(kind)]
    assert not missing, f"{kind.__name__}: write lines of the name and two spaces: {missing}"


def test_each_shared_meaning_is_read() -> None:
    shown = {meaning for kind in KINDS for meaning in part_meanings(kind).values()}
    assert [name for name, meaning in SHARED_MEANINGS.items() if meaning not in shown] == []


def test_a_number_outside_of_its_stated_range_is_refused() -> None:
    parts_made, tried = instances(), 0
    for kind in KINDS:
        for name, parameter in function_parameters(kind).items():
            if parameter.annotation not in NUMBERS or (kind.__name__, name) in AT_THE_PLAN:
                continue
            meaning, whole = part_meanings(kind)[name], "int" in str(parameter.annotation)
            numbers = outside_of(meaning, whole)
            stated = numbers or re.search(
                r"any number|whole number|above `low`|above 1 \+ high", meaning
            )
            assert stated, f"{kind.__name__}.{name}: say its range: {meaning}"
            for number in numbers if kind in parts_made else []:
                value = int(number) if whole else number
                with pytest.raises(ValueError):
                    dataclasses.replace(parts_made[kind], **{name: value})
                    pytest.fail(f"{kind.__name__}({name}={value}) is taken: {meaning}")
                tried += 1
    assert tried > 80


def test_the_command_and_editors_say_the_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes_command(["pass_at_k"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    meaning = "samples of which one has to succeed, at least 1"
    assert f"k required (int) {meaning}" in said and "eps 1.0e-06 (float)" in said
    rows = {row[0]: row for row in read_schema()["parts"]["pass_at_k"]["settings"]}
    assert rows["k"] == ["k", "int", "required", meaning]
    assert "`flowrl recipes PART`" in recipe_page("text_grpo", capsys)


def test_an_editor_explains_the_settings_of_the_part_that_a_file_names() -> None:
    definitions = read_schema()["run"]["$defs"]
    for place, part, setting in (
        ("loss", "surrogate", "dual"),
        ("advantage", "standardize", "trim"),
        ("likelihood", "matching", "paired"),
        ("plan", "window", "position"),
        ("tracker", "prompt_values", "keep"),
        ("kernel", "flow_sde", "eta"),
        ("solver", "sa", "noise"),
    ):
        recipe = "nft" if place == "solver" else "flow_grpo"
        assert f"#/$defs/part of {place}" in json.dumps(definitions[recipe]["properties"][place])
        rules = definitions[f"part of {place}"]["allOf"]
        chosen = [r["then"] for r in rules if r["if"]["properties"]["name"]["const"] == part]
        kind = parts_named_at(part)
        assert chosen[0]["properties"][setting]["description"] == part_meanings(kind)[setting]


def test_all_parts_are_listed_and_a_misspelt_one_is_suggested(capsys) -> None:
    listed = recipe_page("parts", capsys)
    names = [part_name(kind) for kind in KINDS]
    assert [name for name in names if f"  {name} " not in listed] == []
    with pytest.raises(UserError, match="'standardiz' is no recipe and no part; did you mean 'st"):
        recipes_command(["standardiz"])


def parts_named_at(name: str) -> type:
    return next(kind for kind in KINDS if part_name(kind) == name)


def recipe_page(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert recipes_command([name]) == 0
    return capsys.readouterr().out


def test_a_part_of_your_own_is_described_in_the_same_way() -> None:
    @dataclasses.dataclass(frozen=True)
    class Pull:
        """A transform of a reader.

        pull  strength of the pull, above 0;
              larger pulls more
        """

        pull: float = 0.5

    assert part_meanings(Pull) == {"pull": "strength of the pull, above 0; larger pulls more"}
    assert inspect.getdoc(Pull)
