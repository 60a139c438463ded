"""Write the parts of README.md that follow from the code: the table of recipes and the file tree.

    python scripts/generate/readme.py

A test compares README.md with this, so no new file or recipe can be forgotten.
"""

import ast
import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
FOLDERS = (
    *("samplers", "rewards", "rewards/perception", "rewards/judging", "rewards/serving"),
    *("rewards/sandbox", "flowrl", "flowrl/recipes", "flowrl/credit", "flowrl/likelihoods"),
    *("flowrl/losses", "flowrl/models", "flowrl/models/diffusers", "flowrl/models/language"),
    *("flowrl/settings", "flowrl/budget", "flowrl/processes", "flowrl/run", "flowrl/media"),
    *("flowrl/evaluation", "flowrl/cli", "flowrl/demo"),
    *("scripts", "scripts/demo_models", "scripts/benchmarks", "scripts/generate"),
    *("scripts/mutants", "scripts/launch"),
)


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def tree() -> str:
    """Every source file with the first sentence of its docstring."""
    lines = ["```text"]
    for folder in FOLDERS:
        lines.append(f"{folder}/")
        for path in sorted((PROJECT / folder).glob("*.py")):
            paragraph = " ".join(docstring(path).split("\n\n")[0].split())
            said = re.split(r"(?<=[a-z`)])\.(?:\s|$)", paragraph, maxsplit=1)[0]
            if said:
                lines.append(f"  {path.name:<20} {said}")
    return "\n".join([*lines, "```"])


def table() -> str:
    lines = docstring(PROJECT / "flowrl" / "recipes" / "table.py").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def written(readme: str) -> str:
    for name, text in (("table", table()), ("tree", tree())):
        start, end = (
            f"<!-- {name}, written by scripts/generate/readme.py -->",
            f"<!-- end of {name} -->",
        )
        before, rest = readme.split(start)
        readme = f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}"
    return readme


if __name__ == "__main__":
    page = PROJECT / "README.md"
    page.write_text(written(page.read_text()))
