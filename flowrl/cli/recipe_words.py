"""Names and settings of recipes, read from their sources without importing them."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "recipes"


def recipe_names() -> Iterator[str]:
    """All recipes, in the order of `flowrl recipes`."""
    yield from (each.id for each in _table("IMAGE_FUNCTIONS") if isinstance(each, ast.Name))
    yield from _presets()


def recipe_options(recipe: str) -> Iterator[str]:
    """`--recipe.steps` and the other settings of a recipe; none for a name that is not known."""
    own = [_keywords(n) for n in _nodes() if isinstance(n, ast.FunctionDef) and n.name == recipe]
    names = _presets().get(recipe) or next(iter(own), [])
    yield from (f"--recipe.{name.replace('_', '-')}" for name in names)


def _presets() -> Mapping[str, list[str]]:
    """Text recipes with their settings."""
    always = _keys(_assigned("_ALWAYS"))
    every = next(n for n in _nodes() if isinstance(n, ast.ClassDef) and n.name == "TextMixture")
    fields = [n.target.id for n in every.body if isinstance(n, ast.AnnAssign)]  # type: ignore[union-attr]
    found: dict[str, list[str]] = {}
    for call in _table("TEXT_FUNCTIONS"):
        if isinstance(call, ast.Call) and isinstance(call.args[0], ast.Constant):
            own = call.args[2]
            names = _keys(own) if isinstance(own, ast.Dict) else fields
            found[str(call.args[0].value)] = list(dict.fromkeys([*names, *always]))
    return found


def _keys(value: ast.expr) -> list[str]:
    keys = value.keys if isinstance(value, ast.Dict) else []
    return [str(key.value) for key in keys if isinstance(key, ast.Constant)]


def _table(name: str) -> list[ast.expr]:
    value = _assigned(name)
    return value.elts if isinstance(value, ast.Tuple) else []


def _assigned(name: str) -> ast.expr:
    """The value of a constant of the recipes' files."""
    return next(
        n.value for n in _nodes() if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name
    )


def _keywords(function: ast.FunctionDef) -> list[str]:
    return [arg.arg for arg in function.args.kwonlyargs]


@cache
def _nodes() -> list[ast.stmt]:
    files = sorted(_FOLDER.glob("*.py"))
    return [node for path in files for node in ast.parse(path.read_text(encoding="utf-8")).body]
