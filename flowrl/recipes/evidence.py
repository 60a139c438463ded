"""Evidence for a recipe: its sources, and what has been seen of it here.

Each recipe says what it was written from (`rests_on`). Gains and runs on a GPU are read from
seen.json, which scripts/generate/recipes_seen.py writes from the pages of results.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

SEEN = Path(__file__).with_name("seen.json")
BasisKind = Literal["arrays", "code", "paper", "summary", "ours"]
SOURCE_KINDS: dict[BasisKind, str] = {
    "arrays": "tests hold it against arrays of the authors' functions, or of a library's",
    "code": "the published code was read",
    "paper": "the paper was read",
    "summary": "an abstract, reviews or a summary were read",
    "ours": "no method of others",
}
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Sources:
    """The sources of a recipe, and the files tests/golden/NAME.npz that it is held against."""

    kind: BasisKind
    arrays: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """Knowledge about a recipe.

    gain      in a held-out score of a small world, from before training to after; None: unmeasured
    interval  half of the gain's 95 % interval over seeds; None: of one seed
    on_gpu    whether an iteration on a GPU had the numbers of a CPU
    """

    sources: Sources
    gain: float | None
    interval: float | None
    on_gpu: bool

    @property
    def learned(self) -> str:
        """The gain and its interval, such as "+0.111 +- 0.037"; "-" if it was not measured."""
        if self.gain is None:
            return "-"
        return f"{self.gain:+.3f}" + (
            ", one seed" if self.interval is None else f" +- {self.interval:.3f}"
        )


def rests_on(kind: BasisKind, *arrays: str) -> Callable[[F], F]:
    """Say what a recipe was written from, and which arrays of authors tests hold it against."""

    def decorate(recipe: F) -> F:
        recipe.__dict__["sources"] = Sources(kind, arrays)
        return recipe

    return decorate


def evidence_of(recipe: Callable[..., Any]) -> Evidence:
    """The evidence for a recipe of flowrl."""
    record = _seen().get(recipe.__name__, {})
    sources: Sources = recipe.__dict__["sources"]
    return Evidence(sources, record.get("gain"), record.get("interval"), bool(record.get("gpu")))


@cache
def _seen() -> dict[str, dict[str, Any]]:
    return json.loads(SEEN.read_text(encoding="utf-8"))
