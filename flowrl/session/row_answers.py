"""Whether rows can be won, asked of what knows; and draws without rows that nothing can win."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState

from flowrl.bounded_files import bounded_lines, json_object
from flowrl.errors import UserError
from flowrl.json_text import json_text
from flowrl.processes.meeting import agreed
from flowrl.prompts import Draws, PromptSet
from flowrl.prompts.prompt_set import PromptRow
from flowrl.session.atomic import reason
from flowrl.whole_file import flushed
from rewards import Reward
from rewards.checks.winnable import KnowsSlowly, KnowsWinnable, Winnable
from rewards.rules import RULES_VERSION
from rewards.types import parts_of
from samplers.noise import generator

ANSWERS_FILE = "row_answers.jsonl"  # in flowrl's cache
_MOST_ANSWERS = 2**28  # bytes of a file of answers
RANK = {"unknown": 0, "yes": 1, "no": 2}  # of answers, when several rewards have one
SHOWN = 10  # rows that a message names
TRAINING_ROWS = "prompts.train"


class Asker(NamedTuple):
    """Something that knows whether rows can be won; `label` is the reward's."""

    label: str
    knows: KnowsWinnable


def askers_of(rewards: Mapping[str, Reward]) -> list[Asker]:
    """The rewards, and members of rewards, that know."""
    return [
        Asker(label, part)
        for label, reward in rewards.items()
        for part in parts_of(reward, KnowsWinnable)
    ]


@dataclass
class KeptAnswers:
    """Answers by key, from files of JSON lines that they are appended to. A line that is cut short
    is left out: its answer is asked for again."""

    files: Sequence[Path]
    known: dict[str, Winnable] = field(default_factory=dict)

    def read(self) -> None:
        for file in reversed(self.files):  # the first one has the last word
            for line in read_lines(file):
                if isinstance(line.get("key"), str) and line.get("answer") in ("yes", "no"):
                    self.known[line["key"]] = Winnable(line["answer"], str(line.get("why", "")))

    def add(self, key: str, answer: Winnable) -> None:
        self.known[key] = answer
        line = {"key": key, "answer": answer.answer, "why": answer.why}
        for file in self.files:
            append(file, line)


def read_lines(file: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a file of JSON lines; lines that are none are left out."""
    if not file.is_file():
        return
    try:
        for text in bounded_lines(file, _MOST_ANSWERS):
            if (line := json_object(text)) is not None:
                yield line
    except OSError as error:
        raise UserError(f"{file} cannot be read ({reason(error)}): move it away") from error


def append(file: Path, line: Mapping[str, Any]) -> None:
    """Add a line to a file that others may append to; it begins on a line of its own."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as out:
        cut = file.stat().st_size and not _ends_whole(file)
        out.write(b"\n" * bool(cut) + json_text(line).encode() + b"\n")
        flushed(out)


def _ends_whole(file: Path) -> bool:
    with file.open("rb") as opened:
        opened.seek(-1, 2)
        return opened.read() == b"\n"


@dataclass(frozen=True)
class RowAnswers:
    """Whether a prompt set's rows can be won. `kept`: answers of slow askers."""

    prompts: PromptSet
    askers: Sequence[Asker]
    kept: KeptAnswers

    def at_once(self) -> dict[int, Winnable]:
        """All rows' answers that take no work."""
        return self._asked(range(len(self.prompts)), slowly=False)

    def every(self, rows: Iterable[int]) -> dict[int, Winnable]:
        """All answers of these rows."""
        return self._asked(list(rows), slowly=True)

    def _asked(self, rows: Sequence[int], slowly: bool) -> dict[int, Winnable]:
        """The answer of each row: no with the first reason, if a reward says so; else yes, if one
        does."""
        worst: dict[int, Winnable] = dict.fromkeys(rows, Winnable("unknown"))
        for asker in self.askers if rows else ():
            try:
                answers = self._answers_of(asker, rows, slowly)
            except ValueError as error:
                raise UserError(f"reward {asker.label}: {error}") from error
            for row, one in answers.items():
                said = replace(one, why=f"{asker.label}: {one.why}") if one.why else one
                if RANK[said.answer] > RANK[worst[row].answer]:
                    worst[row] = said
        return worst

    def _answers_of(self, asker: Asker, rows: Sequence[int], slowly: bool) -> dict[int, Winnable]:
        keys = dict(zip(rows, self._keys(asker, rows), strict=True))
        quick = [row for row, key in keys.items() if key is None]
        answers = dict(zip(quick, self._answers(asker, quick), strict=True))
        return answers | self._kept_or_asked(asker, keys) if slowly else answers

    def _keys(self, asker: Asker, rows: Sequence[int]) -> list[str | None]:
        if not isinstance(asker.knows, KnowsSlowly):
            return [None] * len(rows)
        keys = asker.knows.answer_keys(*self.prompts.take(rows))
        return [None if key is None else f"{RULES_VERSION}:{key}" for key in keys]

    def _kept_or_asked(self, asker: Asker, keys: Mapping[int, str | None]) -> dict[int, Winnable]:
        slow = {row: key for row, key in keys.items() if key is not None}
        new = {key: row for row, key in slow.items() if key not in self.kept.known}
        for key, answer in zip(new, self._answers(asker, list(new.values())), strict=True):
            self.kept.add(key, answer)
        return {row: self.kept.known[key] for row, key in slow.items()}

    def _answers(self, asker: Asker, rows: Sequence[int]) -> list[Winnable]:
        return asker.knows.winnable(*self.prompts.take(rows)) if rows else []


def lost_of(answers: Mapping[int, Winnable]) -> dict[int, str]:
    """The rows that nothing can win, with the reasons."""
    return {row: one.why for row, one in answers.items() if one.answer == "no"}


@dataclass
class WinnableDraws:
    """Draws other rows in place of lost ones.

    seed     of the order in which other rows are drawn
    state    of the processes: the main one asks
    say      prints a warning on the main process
    place    where the rows are from
    lost     rows that nothing can win, with the reason
    asked    rows whose answers are known
    """

    answers: RowAnswers
    seed: int
    state: PartialState
    say: Callable[[str], None]
    place: str = TRAINING_ROWS
    lost: dict[int, str] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)

    def winnable(self, iteration: int, draws: Draws) -> Draws:
        """The draws of an iteration with other rows in place of lost ones. Collective.

        A row's place is taken by the same row in all of its draws: the first one, in an order that
        the iteration's key shuffles, that can be won and is not drawn yet. If there is none, the
        row stays."""
        self._know(iteration, draws.rows)
        taken, instead = set(draws.rows), dict[int, int]()
        for row in dict.fromkeys(draws.rows):
            other = self._instead_of(row, iteration, taken) if row in self.lost else None
            if other is not None:
                instead[row] = other
                taken.add(other)
        return draws._replace(rows=tuple(instead.get(row, row) for row in draws.rows))

    def _instead_of(self, row: int, iteration: int, taken: set[int]) -> int | None:
        """Another row of the same data set."""
        prompts = self.answers.prompts
        part = prompts.part_of(row)
        order = torch.randperm(len(part), generator=generator(self.seed, "instead", iteration, row))
        for index in order.tolist():
            other = part[index]
            if other not in taken and other not in prompts.left_out:
                self._know(iteration, [other])
                if other not in self.lost:
                    return other
        return None

    def _know(self, iteration: int, rows: Iterable[int]) -> None:
        """Have the answers of these rows on all processes."""
        new = [row for row in dict.fromkeys(rows) if row not in self.asked]
        if not new:
            return
        lost = agreed(self.state, lambda: lost_of(self.answers.every(new)))
        self.asked |= set(new)
        self.lost |= lost
        if lost:
            these_rows = "this row" if len(lost) == 1 else "these rows"
            shown = rows_named(self.answers.prompts, lost)
            self.say(
                f"{self.place}, iteration {iteration + 1}: {shown}; nothing can win {these_rows}, "
                "and other rows are drawn instead"
            )


def rows_named(prompts: PromptSet, rows: Mapping[int, str], most: int = SHOWN) -> str:
    """The first rows with their places and what is said of them, and the number of the others."""
    shown = sorted(rows)[:most]
    rest = f"; and {len(rows) - len(shown)} more" if len(rows) > len(shown) else ""
    return "; ".join(f"{row_place(prompts, row)}: {rows[row]}" for row in shown) + rest


def row_place(prompts: PromptSet, row: int) -> str:
    """A row's file and line, and how its prompt begins."""
    meta = prompts.meta[row]
    place = meta.place if isinstance(meta, PromptRow) else f"row {row + 1}"
    text = " ".join(prompts.texts[row].split())
    for prefix in (TRAINING_ROWS, "prompts.held_out"):
        place = place.removeprefix(f"{prefix}: ")
    return f"{place} ({text[:40]!r})"
