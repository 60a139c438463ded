"""Contributed recipes: found by name as the others are, and by nothing else."""

import inspect
import json
import re
import subprocess
import sys
from importlib import import_module

import pytest

import samplers
from flowrl.contributed import contributed_modules, contributed_names, contributed_part
from flowrl.paths import PROJECT
from flowrl.recipes import IMAGE_RECIPES, RECIPES, TEXT_RECIPES
from flowrl.recipes.table import OWN_RECIPES
from flowrl.settings.parts.names import (
    contributed_classes,
    part_classes,
    part_name,
    parts_named,
)
from samplers import Kernel
from tests.support import runs

NAMES = contributed_names()
SCRIPT = """
import json, sys
from pathlib import Path
import flowrl.contributed
if "without" in sys.argv:
    flowrl.contributed.CONTRIB = Path("nowhere")
from flowrl.errors import UserError
from flowrl.settings import recipe_kind

def loaded():
    return sorted(each for each in sys.modules if each.startswith("flowrl.contrib."))

found = []
for recipe in json.loads(sys.argv[1]):
    try:
        recipe_kind(recipe["name"]).model_validate(recipe).algorithm()
        found.append([loaded(), ""])
    except UserError as error:
        found.append([loaded(), str(error)])
print(json.dumps(found))
"""


def asked(*recipes: dict[str, object], words: tuple[str, ...] = ()) -> list[tuple[list[str], str]]:
    """Which contributed files are loaded after each of these recipes, and its refusal."""
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(recipes), *words],
        cwd=PROJECT, env=runs.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    return [(*each,) for each in json.loads(made.stdout.splitlines()[-1])]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_the_recipe_of_its_name(name: str) -> None:
    module = import_module(f"flowrl.contrib.{name}")
    recipe = RECIPES[name]
    assert recipe is vars(module)[name] and recipe.__module__ == module.__name__
    assert name not in OWN_RECIPES and (name in TEXT_RECIPES) != (name in IMAGE_RECIPES)
    assert recipe().text == (name in TEXT_RECIPES)


def test_nothing_but_the_lookup_names_the_folder() -> None:
    named = []
    for package in ("flowrl", "samplers", "rewards"):
        for path in (PROJECT / package).rglob("*.py"):
            if re.search(r"flowrl[./]contrib\b(?!uted)[\w.{]*[\w{]", _code(path.read_text())):
                named.append(path.relative_to(PROJECT).as_posix())
    others = [each for each in named if not each.startswith("flowrl/contrib/")]
    assert others == ["flowrl/contributed.py"]


def _code(text: str) -> str:
    """Lines that import."""
    return "\n".join(line for line in text.splitlines() if "import" in line)


def test_parts_are_found_by_name_and_hide_no_other() -> None:
    own = {part_name(kind) for kind in part_classes()}
    contributed = [part_name(kind) for kind in contributed_classes()]
    assert len({*contributed}) == len(contributed) > 10 and not own & {*contributed}
    kernels = parts_named(Kernel)
    assert kernels["churn"] is contributed_part("Churn") and "churn" in [*kernels]
    assert len(kernels) == len([*kernels]) and "no_such_kernel" not in kernels


@pytest.mark.parametrize("name", samplers.CONTRIBUTED)
def test_a_public_name_of_samplers_is_found_where_it_was(name: str) -> None:
    part = getattr(samplers, name)
    assert part is contributed_part(name) and inspect.isclass(part)
    assert any(vars(module).get(name) is part for module in contributed_modules())
    assert name not in samplers.__all__


def test_an_unknown_name_of_samplers_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Chrun'"):
        samplers.Chrun  # noqa: B018


@pytest.mark.slow
@pytest.mark.long
def test_a_run_imports_the_file_of_its_recipe_alone() -> None:
    plain, part, named = asked(
        {"name": "flow_grpo", "advantage": {"name": "leave_one_out"}, "loss": {"low": 0.2}},
        {"name": "loop"},
        {"name": "flow_grpo", "kernel": {"name": "churn", "gamma": 0.1}},
    )
    assert plain == ([], "")
    assert part == (["flowrl.contrib.loop"], "")
    assert named == (sorted(f"flowrl.contrib.{name}" for name in NAMES), "")


@pytest.mark.long
def test_without_the_folder_a_run_that_names_it_gets_one_sentence() -> None:
    plain, named = asked({"name": "flow_grpo"}, {"name": "fdfo"}, words=("without",))
    assert plain == ([], "")
    assert named[0] == [] and "recipe" in named[1] and "fdfo" in named[1]
    assert len(named[1].splitlines()) == 1
