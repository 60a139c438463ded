"""The watch that the processes of a run keep over each other while they wait.

A process that hangs keeps the others waiting in their next exchange, and torch waits for it in
silence. So every second each process says, through the store in which they have met, what its main
thread does. One that waits tells after a minute for whom, in which phase that process is, and its
stack. A process is ended only after a limit without any progress of its own, and then the others
end too; one that works, however slowly, is never ended.
"""

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType

import psutil
from torch._C._distributed_c10d import Store

from flowrl.errors import UserError
from flowrl.processes.at_work import times_gone_on

HANG_VARIABLE = "FLOWRL_HANG_SECONDS"
HANG_SECONDS = 1800.0  # a reward's server, or a first compilation, may take many minutes
PATIENCE = 60.0  # seconds of waiting until the first sentence; the next ones come at twice the time
PULSE = 1.0  # seconds between two signs of life
WAITING_SECONDS = 3.0  # seconds inside one exchange that count as waiting for others
BUSY = 0.05  # of a core: what a process uses at least while it computes; this thread uses less
EXCHANGES = os.path.join("torch", "distributed")  # where the files of torch's exchanges are
ENDED_BY_WATCH = 3  # the exit code
# phases of a run by the modules that they are; the innermost one counts
WATCHED_PHASES = {
    "flowrl.iteration.draw": "drawing prompts",
    "flowrl.iteration.sample": "sampling",
    "flowrl.iteration.score": "scoring",
    "flowrl.iteration.credit": "credit",
    "flowrl.iteration.rows": "rows",
    "flowrl.iteration.update": "the update",
    "flowrl.run.evaluate": "evaluation",
    "flowrl.run.save": "saving",
    "flowrl.run.show": "reports",
    "flowrl.run.model_proof": "the proof of the model",
    "flowrl.run.call_search": "the search of rows per call",
    "flowrl.session": "the opening of the run",
}
OUTER = {"flowrl.iteration": "an iteration", "flowrl.run": "the run's own loop"}


def seconds_of(variable: str, default: float) -> float:
    """A number of seconds that a variable may give. UserError if it is not a positive number."""
    text = os.environ.get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"{variable} must be a number of seconds above 0, not {text!r}")
    return seconds


def hang_seconds() -> float:
    """Seconds without progress after which a process that others wait for is ended."""
    return seconds_of(HANG_VARIABLE, HANG_SECONDS)


@dataclass(frozen=True)
class SignOfLife:
    """A sign of life of a process.

    number  counts them
    waits   seconds that its main thread has been inside one exchange with the others
    idle    seconds since its last progress: its processor worked, its main thread moved on, or a
            thread of its work had waited for something and went on
    """

    number: int
    host: str
    pid: int
    phase: str
    waits: float
    idle: float


@dataclass
class MainThread:
    """Watches this process's main thread from another one."""

    place: tuple[object, ...] = ()
    moved: float = 0.0  # when its place last changed
    worked: float = 0.0  # when the process last used its processor, or a thread went on
    used: float = 0.0  # processor seconds until then
    gone_on: int = 0  # times that its threads had gone on until then
    at: float = 0.0
    waiting: bool = False
    phase: str = ""
    frames: Callable[[], FrameType | None] = field(
        default=lambda: sys._current_frames().get(threading.main_thread().ident or 0)
    )
    counted: Callable[[], int] = times_gone_on

    def look(self, now: float, used: float) -> None:
        """`used`: processor seconds of all threads but the one that looks."""
        frame = self.frames()
        stack = list(_outwards(frame))
        place = tuple((id(frame.f_code), frame.f_lasti) for frame in stack)
        if place != self.place or not self.at:
            self.place, self.moved = place, now
        gone_on = self.counted()
        busy = used - self.used > BUSY * (now - self.at)
        if busy or gone_on != self.gone_on or not self.at:
            self.worked = now
        self.used, self.gone_on, self.at = used, gone_on, now
        self.waiting = any(EXCHANGES in frame.f_code.co_filename for frame in stack[:3])
        self.phase = _phase(stack)

    def waits(self) -> float:
        return self.at - self.moved if self.waiting else 0.0

    def idle(self) -> float:
        return self.at - max(self.moved, self.worked)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _phase(stack: list[FrameType]) -> str:
    """The phase of a stack, innermost frame first."""
    names = [str(frame.f_globals.get("__name__", "")) for frame in stack]
    for table in (WATCHED_PHASES, OUTER):
        for name in names:
            for module, phase in table.items():
                if name == module or name.startswith(f"{module}."):
                    return phase
    return "the start"


class Board:
    """The signs that the processes give each other through the store, in a thread of its own: if
    the process that keeps the store is stopped, every reading of it blocks.

    own      this process's newest sign of life
    signs    of all processes, read while this one waits, or has hung
    seen     when each process's newest sign was first read
    read     when the signs were last read
    asked    processes whose stacks are wanted, and a word for each question
    stacks   the answers
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.own: SignOfLife | None = None
        self.curious = False
        self.signs: dict[int, SignOfLife] = {}
        self.seen: dict[int, float] = {}
        self.read = 0.0
        self.asked: dict[int, str] = {}
        self.stacks: dict[int, str] = {}
        self._answered = ""

    def exchange(self, now: float) -> None:
        """Give the own sign, read the others', ask for stacks and answer. The store's errors pass
        in silence: a process that has ended has closed it, and the main thread will learn that."""
        try:
            if self.own is not None:
                sign = json.dumps(asdict(self.own), allow_nan=False)
                self.store.set(f"sign/{self.rank}", sign)
            self._answer()
            if self.curious:
                self._read(now)
            self._ask()
        except (RuntimeError, OSError):  # torch's errors of a store are RuntimeErrors
            return

    def _read(self, now: float) -> None:
        for rank in range(self.size):
            self.seen.setdefault(rank, now)
            if self.store.check([f"sign/{rank}"]):
                sign = SignOfLife(**json.loads(self.store.get(f"sign/{rank}")))
                if rank not in self.signs or sign.number != self.signs[rank].number:
                    self.signs[rank], self.seen[rank] = sign, now
        self.read = now

    def _ask(self) -> None:
        for rank, word in self.asked.items():
            self.store.set(f"ask/{rank}", word)
            if rank not in self.stacks and self.store.check([f"stack/{rank}/{word}"]):
                self.stacks[rank] = self.store.get(f"stack/{rank}/{word}").decode()

    def _answer(self) -> None:
        if self.store.check([f"ask/{self.rank}"]):
            word = self.store.get(f"ask/{self.rank}").decode()
            if word != self._answered:
                self.store.set(f"stack/{self.rank}/{word}", stack_text())
                self._answered = word

    def silent(self, rank: int) -> float:
        """Seconds between a process's last sign and the last look at it."""
        return max(self.read - self.seen.get(rank, self.read), 0.0)

    def forget(self) -> None:
        """Drop what was read: before the next wait, signs are not looked at."""
        self.seen, self.asked, self.stacks = {}, {}, {}


@dataclass
class Watch:
    """Decides what is said and ended. `end` ends this process with a text for its user.

    keeper   the process that keeps the store, None if the launcher does
    """

    board: Board
    keeper: int | None
    limit: float
    patience: float = PATIENCE
    say: Callable[[str], None] = field(default=lambda text: _print(text))
    end: Callable[[str], None] = field(default=lambda text: _end(text))

    def __post_init__(self) -> None:
        self.main, self.number, self.next, self.due = MainThread(), 0, self.patience, 0.0
        self.host, self.pid = socket.gethostname(), os.getpid()

    def beat(self, now: float, used: float) -> None:
        """Look at the main thread, renew this process's sign, and say or end what is due."""
        main, board = self.main, self.board
        main.look(now, used)
        waits, idle = main.waits(), main.idle()
        self.number += 1
        board.own = SignOfLife(self.number, self.host, self.pid, main.phase, waits, idle)
        curious = waits >= WAITING_SECONDS or idle >= self.limit
        if curious and not board.curious:
            board.forget()
            board.read = now
        board.curious = curious
        if waits >= WAITING_SECONDS:
            self._waiting(waits, idle, now)
            return
        self.next = self.patience
        if idle >= self.limit and any(
            board.signs[rank].waits >= WAITING_SECONDS
            for rank in self._others()
            if rank in board.signs
        ):
            self.end(
                "this process has kept the others waiting and made no progress for "
                f"{idle:.0f} s in {main.phase} ({HANG_VARIABLE} is {self.limit:g}), so it ends. "
                f"Its stack:\n{stack_text()}"
            )

    def _waiting(self, waits: float, idle: float, now: float) -> None:
        lost = now - self.board.read  # since the store has last answered
        late = [rank for rank in self._others() if self._late(rank)]
        if lost > WAITING_SECONDS and self.keeper is not None:
            late = [self.keeper]
        for rank in late:
            if (rests := self._idle(rank) + max(lost - WAITING_SECONDS, 0.0)) >= self.limit:
                self.end(
                    f"process {rank} has kept the others waiting and made no progress for "
                    f"{rests:.0f} s ({HANG_VARIABLE} is {self.limit:g}): "
                    f"{self._state(rank, lost)}; this process ends too"
                )
                return
        signs = [self.board.signs[rank] for rank in self._others() if self._known(rank)]
        if not late and len(signs) == self.board.size - 1:
            # one that goes from one exchange to the next is at the same place for every look
            resting = [min(sign.waits, sign.idle) for sign in signs]
            if min([waits, idle, *resting]) >= self.limit:
                self.end(
                    f"all processes have waited for each other for {self.limit:g} s "
                    f"({HANG_VARIABLE}), so this one ends. Its stack:\n{stack_text()}"
                )
            return
        if late and waits >= self.next and self._speaks(late):
            self._tell(late, waits, lost, now)

    def _tell(self, late: list[int], waits: float, lost: float, now: float) -> None:
        """Say for whom this process waits, once the stacks are there or do not come."""
        board = self.board
        answer = [
            rank
            for rank in late
            if lost <= WAITING_SECONDS and board.silent(rank) <= WAITING_SECONDS
        ]
        if not board.asked:
            board.asked = dict.fromkeys(answer, f"{board.rank} {self.number}")
            self.due = now + 3 * PULSE
        if not all(rank in board.stacks for rank in answer) and now < self.due:
            return
        for rank in late:
            stack = f". Its stack:\n{board.stacks[rank]}" if rank in board.stacks else ""
            self.say(
                f"process {board.rank} has waited {waits:.0f} s for process {rank}: "
                f"{self._state(rank, lost)}{stack}"
            )
        self.next = 2 * waits
        board.asked, board.stacks = {}, {}

    def _others(self) -> list[int]:
        return [rank for rank in range(self.board.size) if rank != self.board.rank]

    def _known(self, rank: int) -> bool:
        return rank in self.board.signs

    def _late(self, rank: int) -> bool:
        waiting = self._known(rank) and self.board.signs[rank].waits > 0
        return self.board.silent(rank) > WAITING_SECONDS or (self._known(rank) and not waiting)

    def _idle(self, rank: int) -> float:
        sign, silent = self.board.signs.get(rank), self.board.silent(rank)
        return silent if sign is None or sign.waits > 0 else silent + sign.idle

    def _speaks(self, late: list[int]) -> bool:
        """Whether this process is the one that tells: the first that waits."""
        return self.board.rank == min({*range(self.board.size)} - {*late})

    def _state(self, rank: int, lost: float) -> str:
        """The state of a late process, as far as this one can know it."""
        sign, silent = self.board.signs.get(rank), self.board.silent(rank) + lost
        if sign is None:
            return f"it has given no sign of life for {silent:.0f} s"
        where = f"process id {sign.pid} on {sign.host}"
        if silent <= 2 * WAITING_SECONDS:
            quiet = (
                f", without progress for {sign.idle:.0f} s" if sign.idle > WAITING_SECONDS else ""
            )
            return f"it is in {sign.phase}{quiet} ({where})"
        state = _state_here(sign.pid) if sign.host == self.host else None
        if state == psutil.STATUS_STOPPED:
            return (
                f"it is stopped (SIGSTOP), in {sign.phase}; `kill -CONT {sign.pid}` on "
                f"{sign.host} lets it go on"
            )
        said = "" if state is None else f", its state is {state!r}"
        return f"it has given no sign of life for {silent:.0f} s{said}, in {sign.phase} ({where})"


def _state_here(pid: int) -> str | None:
    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return None


def stack_text() -> str:
    """The stacks of all threads of this process, the main one first.

    Not by `faulthandler`, which begins with the newest thread and stops after a hundred, nor with
    lines of the source, since a file system that hangs may be what keeps the process."""
    main, frames = threading.main_thread().ident, sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines: list[str] = []
    for ident in sorted(frames, key=lambda number: number != main):
        lines.append(f"Thread {names.get(ident, ident)} (most recent call first):")
        for frame in _outwards(frames[ident]):
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
    return "".join(f"{line}\n" for line in lines)


def _print(text: str) -> None:
    print(f"flowrl: {text}", file=sys.stderr, flush=True)


_before_end: list[Callable[[str], None]] = []


@contextmanager
def before_end(call: Callable[[str], None]) -> Iterator[None]:
    """Have this called with the reason, in bounded time, where a thread ends this process at once
    inside the body."""
    _before_end.append(call)
    try:
        yield
    finally:
        _before_end.remove(call)


def end_process(text: str, code: int) -> None:
    """End this process at once: its main thread is inside a call that nothing can interrupt. What
    it has saved is whole."""
    try:
        _print(text)
        for call in _before_end:
            call(text)
    finally:
        os._exit(code)


def _end(text: str) -> None:
    end_process(text, ENDED_BY_WATCH)


class AwakeClock:
    """A clock that stands still while this process is stopped, or its machine sleeps: what others
    did meanwhile is unknown."""

    def __init__(self) -> None:
        self.now, self._last = 0.0, time.monotonic()

    def tick(self, at: float) -> float:
        self.now += min(at - self._last, WAITING_SECONDS)
        self._last = at
        return self.now


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Let this process be watched, and watch the others, in two threads."""
    over, board, clock = threading.Event(), watch.board, AwakeClock()
    of_board = [0.0]  # processor seconds of its thread

    def exchange() -> None:
        while not over.wait(PULSE):
            board.exchange(clock.now)
            of_board[0] = time.thread_time()

    def look() -> None:
        while not over.wait(PULSE):
            used = time.process_time() - time.thread_time() - of_board[0]
            watch.beat(clock.tick(time.monotonic()), used)

    threads = [
        threading.Thread(target=loop, name="watch", daemon=True) for loop in (exchange, look)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(10 * PULSE)  # a reading blocks while the store's keeper is stopped
