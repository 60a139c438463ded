"""Check that the tree is the release that a tag names, and print its notes.

    python scripts/release.py v0.1.0 > notes.md

The version must stand in pyproject.toml and CITATION.cff, and as the newest section of
CHANGELOG.md, `## 0.1.0 - YYYY-MM-DD`, with the date of CITATION.cff. The notes are that section.
Exit code 1, with a line for each difference, otherwise. Needs no package.
"""

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)


def main(words: Sequence[str] | None = None, project: Path = PROJECT) -> int:
    given = sys.argv[1:] if words is None else words
    if len(given) != 1 or not re.fullmatch(r"v\d+\.\d+\.\d+", given[0]):
        print("name one tag, such as v0.1.0", file=sys.stderr)
        return 1
    notes, faults = release(given[0].removeprefix("v"), project)
    for fault in faults:
        print(fault, file=sys.stderr)
    print(notes, end="")
    return int(bool(faults))


def release(version: str, project: Path) -> tuple[str, list[str]]:
    """The notes of a version, and the differences of the tree from it."""
    own = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    citation = (project / "CITATION.cff").read_text(encoding="utf-8")
    cited = dict(re.findall(r"^(version|date-released): (\S+)$", citation, re.MULTILINE))
    changes = (project / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = list(SECTION.finditer(changes))
    newest = heads[0][1] if heads else "none"
    faults = list[str]()
    if own["project"]["version"] != version:
        faults.append(f"pyproject.toml: version is {own['project']['version']}, not {version}")
    if cited.get("version") != version:
        faults.append(f"CITATION.cff: version is {cited.get('version')}, not {version}")
    wanted = f"{version} - {cited.get('date-released')}"
    if newest != wanted:
        faults.append(f"CHANGELOG.md: its newest section is {newest!r}; name it {wanted!r}")
        return "", faults
    end = heads[1].start() if len(heads) > 1 else len(changes)
    return changes[heads[0].end() : end].strip() + "\n", faults


if __name__ == "__main__":
    sys.exit(main())
