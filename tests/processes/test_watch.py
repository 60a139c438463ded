"""A process that others wait for is told, and ended only without any progress of its own."""

import os
import re
import sched
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import FrameType

import psutil
import pytest
from torch._C._distributed_c10d import HashStore

from flowrl.errors import UserError
from flowrl.processes import watch
from flowrl.processes.at_work import times_gone_on
from flowrl.processes.watch import HANG_VARIABLE, Board, Watch, hang_seconds

LIMIT, CORE = 100.0, 0.8


def exchange(frames):
    """A frame of torch's exchanges, as the innermost one."""
    code = compile(
        "frames.append(__import__('sys')._getframe())", watch.EXCHANGES + "/x.py", "exec"
    )
    exec(code, {"frames": frames, "__name__": "torch.distributed.x"})


def scoring(frames, lines: int = 1):
    code = "\n" * lines + "frames.append(__import__('sys')._getframe())"
    exec(
        compile(code, "score.py", "exec"), {"frames": frames, "__name__": "flowrl.iteration.score"}
    )


def frame(make, **how) -> FrameType:
    """Of a thread of its own: the frames outside must not move on with the test."""
    frames: list[FrameType] = []
    thread = threading.Thread(target=make, args=(frames,), kwargs=how)
    thread.start()
    thread.join()
    return frames[0]


class Processes:
    """Watches of several processes on one store and one clock; frames and processor seconds are
    set by the test."""

    def __init__(self, *frames: FrameType | None, keeper: int | None = None) -> None:
        self.store, self.now, self.size = HashStore(), 1000.0, len(frames)
        self.frames, self.used, self.gone_on = (
            list(frames),
            [0.0] * self.size,
            [0] * self.size,
        )
        self.quiet = set[int]()  # stopped processes
        self.said: list[tuple[int, str]] = []
        self.ended: dict[int, str] = {}
        self.watches = [self._watch(rank, keeper) for rank in range(self.size)]

    def _watch(self, rank: int, keeper: int | None) -> Watch:
        made = Watch(
            Board(self.store, rank, self.size),
            keeper,
            LIMIT,
            say=lambda text: self.said.append((rank, text)),
            end=lambda text: self.ended.setdefault(rank, text),
        )
        made.main.frames = lambda: self.frames[rank]
        made.main.counted = lambda: self.gone_on[rank]
        return made

    def run(self, seconds: int, *computing: int, store: bool = True) -> None:
        for _ in range(seconds):
            self.now += 1
            for rank in {*range(self.size)} - self.quiet - self.ended.keys():
                self.used[rank] += CORE * (rank in computing)
                self.watches[rank].beat(self.now, self.used[rank])
                if store:
                    self.watches[rank].board.exchange(self.now)


def test_one_that_works_is_told_with_its_phase_and_stack_and_never_ended():
    """For twenty times the limit, in one long call that uses its processor."""
    them = Processes(frame(exchange), frame(scoring), frame(exchange))
    them.run(50, 1)
    assert not them.said
    them.run(2000, 1)
    assert not them.ended and {rank for rank, _ in them.said} == {0}  # one tells for all
    first = them.said[0][1]
    assert first.startswith("process 0 has waited 6") and "for process 1: it is in scoring" in first
    assert f"process id {os.getpid()}" in first and "Its stack:\n" in first
    assert "test_watch.py" in first and "without progress" not in first
    waited = [int(text.split("waited ")[1].split()[0]) for _, text in them.said]
    assert len(waited) == 6 and all(after >= 2 * before for before, after in pairwise(waited))


def test_one_that_moves_on_is_never_ended_though_its_processor_rests():
    """A reward that asks a slow server row by row."""
    places = [frame(scoring, lines=lines) for lines in (1, 2)]
    them = Processes(frame(exchange), places[0])
    for turn in range(10):
        them.frames[1] = places[turn % 2]
        them.run(int(LIMIT) - 10)
    assert not them.ended and "without progress for" in "".join(text for _, text in them.said)


@pytest.mark.parametrize("waits_for", ["rows of a server", "one exchange after the other"])
def test_one_that_goes_on_at_the_same_place_is_never_ended(waits_for):
    """Each look finds it inside the same call, as in a loop of calls that wait."""
    at = frame(scoring) if waits_for == "rows of a server" else frame(exchange)
    them = Processes(frame(exchange), at)
    for _ in range(10):
        them.gone_on[1] += 1
        them.run(int(LIMIT) - 10)
    assert not them.ended
    them.run(20)
    assert them.ended.keys() == {0, 1}


def test_one_that_hangs_is_ended_after_the_limit_and_the_others_with_it():
    them = Processes(frame(exchange), frame(scoring), frame(exchange))
    them.run(int(LIMIT) - 2)
    assert not them.ended
    them.run(8)
    assert them.ended.keys() == {0, 1, 2}
    assert "in scoring" in them.ended[1] and "Its stack:\n" in them.ended[1]
    assert "process 1 has kept the others waiting and made no progress for 10" in them.ended[0]
    assert f"{HANG_VARIABLE} is 100" in them.ended[2]


def test_nobody_is_ended_that_keeps_nobody_waiting():
    them = Processes(frame(scoring), frame(scoring))
    them.run(10 * int(LIMIT))
    assert not them.ended and not them.said


def test_one_that_is_stopped_is_told_by_its_state(monkeypatch):
    monkeypatch.setattr(watch, "_state_here", lambda pid: psutil.STATUS_STOPPED)
    them = Processes(frame(exchange), frame(scoring))
    them.run(2)
    them.quiet = {1}
    them.run(70)
    ((rank, text),) = them.said
    assert rank == 0 and f"stopped (SIGSTOP), in scoring; `kill -CONT {os.getpid()}`" in text
    them.run(int(LIMIT))
    assert them.ended.keys() == {0} and "stopped (SIGSTOP)" in them.ended[0]


def test_a_store_that_does_not_answer_is_its_keeper_s_fault():
    them = Processes(frame(scoring), frame(exchange), frame(exchange), keeper=0)
    them.run(5, 0)
    them.quiet = {0}
    them.run(65, store=False)
    assert [rank for rank, _ in them.said] == [1] and "for process 0: " in them.said[0][1]
    them.run(int(LIMIT), store=False)
    assert them.ended.keys() == {1, 2} and "process 0 has kept" in them.ended[2]


def test_all_that_wait_for_each_other_end():
    them = Processes(frame(exchange), frame(exchange))
    them.run(int(LIMIT) - 2)
    assert not them.ended
    them.run(6)
    assert them.ended.keys() == {0, 1} and "waited for each other" in them.ended[0]


def test_the_limit_is_a_number_of_seconds(monkeypatch):
    monkeypatch.setenv(HANG_VARIABLE, "7.5")
    assert hang_seconds() == 7.5
    monkeypatch.setenv(HANG_VARIABLE, "never")
    with pytest.raises(UserError, match="FLOWRL_HANG_SECONDS must be a number of seconds above 0"):
        hang_seconds()


def polling(seconds: float) -> threading.Thread:
    """A thread of a library's that looks at something again and again, without code of a user."""
    calls = sched.scheduler(time.monotonic, time.sleep)
    for turn in range(1000):
        calls.enter(turn * seconds / 1000, 1, int)
    return threading.Thread(target=calls.run, daemon=True)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts this for each thread")
def test_threads_of_pools_and_of_the_user_go_on_and_those_of_libraries_do_not_count():
    def rows():
        for _ in range(20):
            time.sleep(0.01)

    def counted(work) -> int:
        """Times gone on during the work, while this thread waits once."""
        before = times_gone_on()
        work()
        return times_gone_on() - before

    own = threading.Thread(target=rows)
    own.start()
    assert counted(lambda: time.sleep(0.1)) > 5
    own.join()
    with ThreadPoolExecutor(1) as pool:
        asked = [pool.submit(time.sleep, 0.01) for _ in range(20)]  # no code of a user's
        assert counted(lambda: time.sleep(0.1)) > 5
        del asked
    poller = polling(0.3)
    poller.start()
    assert counted(lambda: time.sleep(0.1)) < 20
    poller.join()
    assert counted(rows) > 5  # of the main thread


def test_the_main_thread_is_found():
    main = watch.MainThread()
    main.look(1.0, 0.0)
    assert main.place and not main.waiting and sys._getframe().f_code.co_name in watch.stack_text()


def test_the_main_thread_comes_first_among_many():
    """A run with servers and pools may have hundreds of threads; a reader sees the first."""
    over = threading.Event()
    others = [threading.Thread(target=over.wait, name=f"one of {k}") for k in range(150)]
    for each in others:
        each.start()
    try:
        stacks = re.split("^Thread ", watch.stack_text(), flags=re.MULTILINE)[1:]
    finally:
        over.set()
        for each in others:
            each.join()
    first, _, place = stacks[0].partition("\n")
    assert first.startswith(threading.main_thread().name) and "test_watch.py" in place
    assert sum(text.startswith("one of ") for text in stacks) == 150


def test_the_clock_stands_still_while_the_machine_sleeps():
    clock = watch.AwakeClock()
    start = clock.tick(clock._last + 1)
    assert clock.tick(clock._last + 1) == start + 1
    assert clock.tick(clock._last + 36000) == start + 1 + watch.WAITING_SECONDS
