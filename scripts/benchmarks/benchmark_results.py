"""The cases of a benchmark, each a file once it is measured: see benchmark.py."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

NOT_ENDED = "did not end: killed, or the machine was taken away"
HEAD = (
    "model", "recipe", "way", "s an iteration", "x its network calls", "s a row, with backward",
    "peak GiB (estimated)",
)  # fmt: skip


class Case(NamedTuple):
    model: str
    recipe: str
    way: str


@dataclass(frozen=True)
class Results:
    folder: Path

    def path(self, case: Case) -> Path:
        return self.folder / f"{'-'.join(case)}.json"

    def left(self, cases: Sequence[Case]) -> list[Case]:
        return [case for case in cases if not self.path(case).exists()]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("*.json"))]

    def begin(self, case: Case) -> None:
        """Write a case's file as unfinished, before it runs."""
        self.save(case, {"error": NOT_ENDED})

    def save(self, case: Case, found: dict[str, Any]) -> dict[str, Any]:
        """Write a case atomically; returns its content."""
        self.folder.mkdir(parents=True, exist_ok=True)
        line = {**case._asdict(), **found}
        beside = self.path(case).with_suffix(".tmp")
        beside.write_text(json.dumps(line))
        beside.replace(self.path(case))
        return line

    def fits(self, case: Case, remaining: float, whole: float) -> bool:
        """Whether a case would end in the remaining seconds of a call.

        The first one of a model, whose time is unknown, may take most of a whole call.
        """
        known = [line["wall"] for line in self.lines()
                 if line["model"] == case.model and "wall" in line]  # fmt: skip
        return (max(known) if known else 0.7 * whole) < remaining

    def table(self) -> str:
        """The table of all cases, in Markdown."""
        rows = [HEAD, ("---",) * len(HEAD), *map(_cells, self.lines())]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    case = (line["model"], line["recipe"], line["way"])
    if "error" in line:
        return (*case, line["error"], "", "", "")
    sizes = (line["peak_bytes"], line["estimated_bytes"])
    peak, wanted = ("-" if size is None else f"{size / 2**30:.1f}" for size in sizes)
    rows = f"{line['row_frozen']:.3f}, {line['row_graded']:.3f}"
    return (*case, f"{line['seconds']:.2f}", f"{line['ratio']:.2f}", rows, f"{peak} ({wanted})")
