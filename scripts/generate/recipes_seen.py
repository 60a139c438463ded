"""Write flowrl/recipes/seen.json from the results: what each recipe gained here, and on which it
ran on a GPU.

    python scripts/generate/recipes_seen.py

Gains with an interval come from the tables of docs/results/methods.md, the first one of a recipe;
others, of one seed, from docs/curves.json. `tests/recipes/test_evidence.py` compares the file with
what this writes.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrl.json_text import json_text
from flowrl.recipes import RECIPES
from flowrl.recipes.evidence import SEEN

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
METHODS, CURVES = RESULTS / "methods.md", RESULTS.parent / "curves.json"
DEVICE = RESULTS / "gpu_recipes.json"
BASES = {  # of a section, how its text names the score before training
    "": r"one base \((0\.\d+) strict",
    "The newer methods": r"strict",  # its table has gains
    "Reward gradients": r"rule checker",
    "Texts": r"text demo's model \((0\.\d+) of held-out",
}


def seen() -> str:
    found: dict[str, dict[str, Any]] = {name: {} for name in RECIPES}
    for name, curve in json.loads(CURVES.read_text()).items():
        points = curve["points"]
        found[name]["gain"] = round(points[-1][1] - points[0][1], 3)
    for name, (gain, interval) in dict(reversed([*measured()])).items():
        found[name] |= {"gain": gain, "interval": interval}
    for name in json.loads(DEVICE.read_text())["same_numbers_as_the_cpu"]:
        found[name]["gpu"] = True
    rows = ",\n".join(f"{json_text(name)}: {json_text(found[name])}" for name in found)
    return f"{{\n{rows}\n}}\n"


def measured() -> Iterator[tuple[str, tuple[float, float]]]:
    """(recipe, (gain, half of its 95 % interval)) of the rows of the page, in their order."""
    for part in re.split(r"^## ", "\n" + METHODS.read_text(), flags=re.MULTILINE):
        title, _, text = part.partition("\n")
        title = "" if title.startswith("#") or not title else title
        if title not in BASES:
            continue
        lines = [line for line in text.splitlines() if line.startswith("|")]
        base = re.search(BASES[title], text)
        head = cells(lines[0])
        for line in lines[2:]:
            row = dict(zip(head, cells(line), strict=True))
            if row["method"] not in RECIPES:
                continue
            if "gain +- 95 % over seeds" in row:
                gain, interval = map(float, row["gain +- 95 % over seeds"].split(" +- "))
            else:
                assert base is not None, title
                gain = round(float(row["accuracy"]) - float(base[1]), 3)
                interval = float(row["+- over seeds"])
            yield row["method"], (gain, interval)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


if __name__ == "__main__":
    SEEN.write_text(seen())
