"""Write the parts of pages that follow from the code: the tables of words, imports and rights.

    python scripts/generate/readme.py

A test compares the page with this, so no new word can be forgotten. The list
of files is a page of the site alone (scripts/generate/site.py).
"""

import ast
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("samplers", "rewards", "flowrl", "scripts")


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def summary(path: Path) -> str:
    """The first sentence of a file's docstring."""
    paragraph = " ".join(docstring(path).split("\n\n")[0].split())
    return re.split(r"(?<=[a-z`)])\.(?:\s|$)", paragraph, maxsplit=1)[0]


def folders() -> list[Path]:
    """All folders with Python files, parents first."""
    found = {path.parent for package in PACKAGES for path in (PROJECT / package).rglob("*.py")}
    return sorted(
        found, key=lambda path: (PACKAGES.index(path.relative_to(PROJECT).parts[0]), path)
    )


def tree() -> str:
    """Every source file with the first sentence of its docstring."""
    lines = ["```text"]
    for folder in folders():
        own = folder / "__init__.py"
        about = summary(own) if own.is_file() else ""
        lines.append(f"{folder.relative_to(PROJECT)}/".ljust(25) + about)
        files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        lines += [f"  {path.name:<22} {text}" for path in files if (text := summary(path))]
    return "\n".join([*(line.rstrip() for line in lines), "```"])


def words() -> str:
    from flowrl.settings.words.names import words_table

    return words_table()


def meanings() -> str:
    from flowrl.importing.known_words import meanings_table

    return meanings_table()


def means() -> str:
    from flowrl.importing.known_words import means_table

    return means_table()


def releases() -> str:
    from flowrl.importing.known_words import releases_table

    return releases_table()


def rights() -> str:
    from scripts.generate.rights import table

    return table()


PARTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "docs/coming_from.md": {
        "releases": releases,
        "meanings": meanings,
        "means": means,
        "words": words,
    },
    "SECURITY.md": {"rights": rights},
}


def written(page: str, text: str) -> str:
    """The page with its generated parts as the code has them now."""
    for name, make in PARTS[page].items():
        start = f"<!-- {name}, written by scripts/generate/readme.py -->"
        end = f"<!-- end of {name} -->"
        before, rest = text.split(start)
        text = f"{before}{start}\n{make()}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    sys.path.insert(0, str(PROJECT))
    for name in PARTS:
        page = PROJECT / name
        page.write_text(written(name, page.read_text()))
