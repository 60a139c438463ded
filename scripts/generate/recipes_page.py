"""Write docs/recipes.md from the recipes themselves: name, docstring, settings.

    python scripts/generate/recipes_page.py

`tests/recipes/test_recipes_page.py` fails until the page is what this writes.
"""

import inspect
from pathlib import Path

from flowrl.cli.commands import recipe_rows
from flowrl.recipes import RECIPES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
HEAD = """# Recipes

Written by `scripts/generate/recipes_page.py` from the code: change the docstrings, not this file.
`flowrl recipes NAME` says the same. Defaults are published numbers; `configs/papers` has whole
configurations.

"""


def page() -> str:
    return HEAD + index() + "".join(section(name) for name in RECIPES)


def index() -> str:
    return "".join(f"- [{name}](#{name})\n" for name in RECIPES)


def section(name: str) -> str:
    rows = "".join(
        f"| `{key}` | {kind} | `{default}` |\n" for key, kind, default in recipe_rows(name)
    )
    words = inspect.cleandoc(RECIPES[name].__doc__ or "")
    table = f"| setting | type | default |\n|---|---|---|\n{rows}"
    return f"\n## {name}\n\n```text\n{words}\n```\n\n{table}"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
