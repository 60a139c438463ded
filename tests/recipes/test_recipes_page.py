"""The page of recipes, and what the command line says of one."""

import re
from typing import Literal

import pytest

from flowrl.api.commands import recipes_command
from flowrl.cli.recipe_text import in_yaml, readable
from flowrl.recipes import RECIPES
from scripts.generate.recipes_page import PAGE, page, section


@pytest.mark.slow
@pytest.mark.long
def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run: python scripts/generate/recipes_page.py"
    assert page().count("\n## ") == len(RECIPES)


def test_a_section_names_every_part_with_its_formula_and_place():
    rows = [line for line in section("nft").splitlines() if "../" in line]
    text = "\n".join(rows)
    assert "`DPM2M()`" in text and "(x0 - x0_before) / (2 r)" in text
    assert "`Standardize(scale='batch')`" in text and "(value - mean) / (std + eps)" in text
    assert "r \\|x0_good - x0\\|^2" in text and "| behaviour | `trailing`" in section("nft")
    assert "g = eta sqrt(sigma / (1 - sigma))" in section("grpo_guard")
    assert "`ScaleSteps(by='1/h')`" in section("grpo_guard")
    assert "PromptValues(0.9, uncertain=True)" in section("text_stream")


@pytest.mark.parametrize("name", RECIPES)
def test_a_link_leads_to_the_file_of_its_part(name):
    found = re.findall(r"`(\w+)\(.*\(\.\./(.+?)\)", section(name))
    assert found
    for cell, path in found:
        text = (PAGE.parents[1] / path).read_text()
        assert re.search(rf"^(class|def) {cell}\b", text, re.MULTILINE), (cell, path)


@pytest.mark.slow
@pytest.mark.long
def test_the_page_holds_no_place_that_another_change_moves():
    assert not re.search(r"\.py(:|#L)\d", page())
    sections = re.split(r"(?m)^(?=## )", page())[1:]
    for name, text in zip(RECIPES, sections, strict=True):  # a recipe is in its own block alone
        assert text.strip() == section(name).strip()


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
    assert recipes_command([name]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{name}: ") and "typing" not in said and "tuple" not in said
    words, settings, parts = said.rsplit("\n\n  ", 2)
    assert "plan: " in parts and "likelihood: " in parts
    settings = settings.split("\n\n")[0]
    below = [line for line in words.splitlines()[1:] if line]
    assert min((len(line) - len(line.lstrip()) for line in below), default=0) == 0
    assert "steps" in settings or "length" in settings
