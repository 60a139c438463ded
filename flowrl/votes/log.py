"""The log of votes: lines that are appended and synced before anybody is answered.

    {"event": "shown", "id": ..., "rater": ..., "turn": 3}       a pair is on somebody's page
    {"event": "vote", "id": ..., "verdict": "left", "seconds": 2.1}
    {"event": "skip", "id": ..., "seconds": 9.0}
    {"event": "undo", "id": ...}                                 takes a vote or a skip back

A vote carries the id that the server gave its showing, so one that arrives twice, from a second
tab or after a restart counts once. `at` is the wall clock, on which nothing depends.
"""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flowrl.bounded_files import bounded_bytes, bounded_text, parsed_json
from flowrl.errors import UserError
from flowrl.evaluation.labelling_tools import EXPORTS
from flowrl.json_text import json_text
from flowrl.prompts.files import EVENTS
from flowrl.session.atomic import NO_LOCKS, to_disk
from flowrl.votes.plan import VotePlan, way_back
from flowrl.whole_file import write_whole

MOST_EVENTS = 2**27  # bytes: half a million votes
GivenVerdict = Literal["left", "right", "equal", "both_bad"]
VERDICTS: tuple[GivenVerdict, ...] = get_args(GivenVerdict)
SKIP = "skip"
LONGEST_VOTE = 86_400.0  # seconds of a vote; longer ones are a page that was left open


class NotShown(Exception):
    """A vote that does not belong to what is shown; the page asks for the present pair."""


class GivenVote(NamedTuple):
    """A rater's answer at a turn; `verdict` is None for a skip."""

    id: str
    turn: int
    verdict: GivenVerdict | None
    seconds: float


@dataclass
class RaterVotes:
    """The answers of one rater, and what is on their page.

    given   of the turns so far, in order
    shown   every id that was given out for this rater, with its turn
    open    the id of the present showing; None before it is shown
    undone  ids whose vote was taken back
    """

    given: list[GivenVote] = field(default_factory=list)
    shown: dict[str, int] = field(default_factory=dict)
    open: str | None = None
    undone: set[str] = field(default_factory=set)

    def has_given(self, showing: str) -> bool:
        return any(vote.id == showing for vote in self.given)


@dataclass
class VoteLog:
    """The votes of all raters, as the log says; every change is on disk before it is here."""

    plan: VotePlan
    raters: dict[str, RaterVotes]
    _file: int = -1
    _size: int = 0

    @classmethod
    def read(cls, folder: Path, plan: VotePlan) -> "VoteLog":
        """Read a log without changing it. UserError for a line that is no event, unless it is
        the last and has no end: such a line was never answered for."""
        log = cls(plan, {rater: RaterVotes() for rater in plan.turns})
        path = folder / EVENTS
        data = bounded_bytes(path, MOST_EVENTS) if path.is_file() else b""
        whole, _, _ = data.rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
            try:
                log._apply(parsed_json(line))
            except (ValueError, LookupError, TypeError, NotShown) as error:
                raise UserError(
                    f"{path}, line {number}: not an event of these votes: {way_back(folder)}"
                ) from error
        log._size = len(whole) + 1 if whole else 0
        return log

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, plan: VotePlan) -> "Iterator[VoteLog]":
        """Open a log to append to. UserError if another process has it open."""
        path = folder / EVENTS
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        log = None
        try:
            _lock(file, path)
            log = cls.read(folder, plan)
            os.ftruncate(file, log._size)  # a line that was cut off by a kill
            os.fsync(file)
            to_disk(folder)
            log._file = file
            yield log
        finally:
            if log is not None:
                log._file = -1  # another file may have the number of a closed one
            os.close(file)

    def show(self, rater: str) -> str | None:
        """The id of the rater's present showing, which is logged when it is first shown; None after
        the last turn."""
        votes = self.raters[rater]
        if votes.open is None and len(votes.given) < len(self.plan.turns[rater]):
            showing = secrets.token_hex(12)
            turn = len(votes.given)
            self._append({"event": "shown", "id": showing, "rater": rater, "turn": turn})
        return votes.open

    def vote(self, rater: str, showing: str, verdict: GivenVerdict | None, seconds: float) -> bool:
        """Record a verdict, or a skip if it is None; False if this showing already has one.
        NotShown for an id that is not on the rater's page."""
        votes = self.raters[rater]
        if votes.has_given(showing):
            return False
        if showing != votes.open:
            raise NotShown("this pair is no longer shown")
        said: dict[str, Any] = {"event": "vote", "verdict": verdict} if verdict else {"event": SKIP}
        seconds = round(min(max(seconds, 0.0), LONGEST_VOTE), 3)
        self._append({**said, "id": showing, "seconds": seconds, "rater": rater})
        return True

    def undo(self, rater: str, showing: str) -> bool:
        """Take the rater's last vote or skip back; False if it has been. NotShown for another
        id."""
        votes = self.raters[rater]
        if showing in votes.undone:
            return False
        if not votes.given or votes.given[-1].id != showing:
            raise NotShown("only the last vote can be undone")
        self._append({"event": "undo", "id": showing, "rater": rater})
        return True

    def done(self, rater: str) -> bool:
        return len(self.raters[rater].given) >= len(self.plan.turns[rater])

    @property
    def finished(self) -> bool:
        """Whether every rater has voted on, or skipped, every pair."""
        return all(self.done(rater) for rater in self.raters)

    def _append(self, event: Mapping[str, Any]) -> None:
        """Write an event to disk, then apply it. OSError, with the file as it was, if that fails,
        such as on a full disk, and for a log that is closed."""
        if self._file < 0:
            raise OSError(errno.EBADF, "the log of votes is closed")
        line = (json_text({**event, "at": round(time.time(), 3)}) + "\n").encode()
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(self._file, line[written:], self._size + written)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)
        self._apply(event)

    def _apply(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        votes, showing = self.raters[event["rater"]], event["id"]
        if not isinstance(showing, str):
            raise ValueError("an id is a text")
        if kind == "shown":
            turn, turns = event["turn"], len(self.plan.turns[event["rater"]])
            if turn != len(votes.given) or turn >= turns or showing in votes.shown:
                raise ValueError("a pair out of turn")
            votes.shown[showing], votes.open = len(votes.given), showing
        elif kind in ("vote", SKIP):
            if showing != votes.open:
                raise NotShown("not what was shown")
            verdict = event["verdict"] if kind == "vote" else None
            if verdict is not None and verdict not in VERDICTS:
                raise ValueError("an unknown verdict")
            votes.given.append(
                GivenVote(showing, len(votes.given), verdict, float(event["seconds"]))
            )
            votes.open = None
        elif kind == "undo":
            if votes.given[-1].id != showing:
                raise NotShown("not the last vote")
            votes.given.pop()
            votes.undone.add(showing)
            votes.open = None
        else:
            raise ValueError("an unknown event")


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"{path.parent} is open in another `flowrl vote`: use its page, or stop it first"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def forget_rater(folder: Path, rater: str) -> VotePlan:
    """Delete all that is kept of a rater: events, turns in the plan, which is returned, and files
    that were exported with their votes. UserError for an unknown rater, and for the only one."""
    plan = VotePlan.read(folder)
    if rater not in plan.turns:
        raise UserError(f"vote: there is no {rater!r:.50}; the raters are {', '.join(plan.turns)}")
    if len(plan.turns) == 1:
        raise UserError(f"vote: {rater} is the only rater: remove {folder} instead")
    with VoteLog.opened(folder, plan):
        for name, _ in EXPORTS.values():
            (folder / name).unlink(missing_ok=True)
        lines = bounded_text(folder / EVENTS, MOST_EVENTS).splitlines(keepends=True)
        lines_kept = [line for line in lines if parsed_json(line.encode())["rater"] != rater]
        # the events first: a rater without events is one who has not begun
        write_whole(folder / EVENTS, "".join(lines_kept))
        turns = {name: order for name, order in plan.turns.items() if name != rater}
        plan = replace(plan, turns=turns)
        plan.write(folder)
    return plan
