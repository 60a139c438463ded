"""Whether a row can be won at all: the protocol by which a reward says so before a run.

A row that no answer can win teaches nothing, whatever the model writes. `winnable(prompts, meta)`
returns one `Winnable` per row, by the reward's own judge and the row's own reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable


@dataclass(frozen=True)
class Winnable:
    """answer  yes: the row's reference wins, or the right answer itself would; no: nothing can;
               unknown: there is no reference
    why       for `no`, what stands in the way
    """

    answer: Literal["yes", "no", "unknown"]
    why: str = ""


@runtime_checkable
class KnowsWinnable(Protocol):
    """A reward that can tell, without a completion, whether rows can be won."""

    def winnable(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]
    ) -> list[Winnable]: ...


@runtime_checkable
class KnowsSlowly(KnowsWinnable, Protocol):
    """One that has to work for some answers, as to run a program: these are asked for before the
    row is drawn, and kept."""

    def answer_keys(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]
    ) -> list[str | None]:
        """A hash of everything that each row's answer depends on; None where it takes no work."""
        ...
