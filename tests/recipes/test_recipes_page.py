"""The page of recipes, and what the command line says of one."""

from typing import Literal

import pytest

from flowrl.cli.commands import in_yaml, readable, recipes
from flowrl.recipes import RECIPES
from scripts.generate.recipes_page import PAGE, page


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run: python scripts/generate/recipes_page.py"
    assert page().count("\n## ") == len(RECIPES)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (float, "float"),
        (int | None, "int or null"),
        (tuple[int, ...], "list of int"),
        (tuple[int, float, float], "[int, float, float]"),
        (Literal["group", "batch"], "group or batch"),
        (Literal["mean", "max", "path"] | None, "mean, max or path or null"),
    ],
)
def test_types_are_readable(kind, words):
    assert readable(kind) == words


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), ((0, 3), "[0, 3]"), (0.7, "0.7"), ("batch", "batch")],
)
def test_defaults_are_yaml(value, text):
    assert in_yaml(list(value) if isinstance(value, tuple) else value) == text


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_says_all_settings_dedented(name, capsys):
    assert recipes([name]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{name}: ") and "typing" not in said and "tuple" not in said
    words, settings = said.split("\n\n  ")
    below = [line for line in words.splitlines()[1:] if line]
    assert min((len(line) - len(line.lstrip()) for line in below), default=0) == 0
    assert "steps" in settings or "length" in settings
