"""A closed terminal, a reader that has gone, or a dead supervisor: the training saves."""

import os
import pty
import signal
import subprocess
import sys
import threading

import pytest

from flowrl.cli import restarts
from flowrl.paths import PROJECT
from flowrl.session import output
from flowrl.session.output import Steady, ending_signals, reader_gone
from flowrl.session.signals import Interrupt

PROCESS = f"""
import os, signal, sys
sys.path.insert(0, {str(PROJECT)!r})
from flowrl.session.output import outlive_terminal, reader_gone
outlive_terminal()
signal.signal(signal.SIGHUP, lambda *_: None)
os.read(0, 1)  # until the reader has gone
for _ in range(3):
    print("to nobody", flush=True)
    print("to nobody", file=sys.stderr, flush=True)
os.write(1, b"by a library")
os.write(int(sys.argv[1]), str(reader_gone()).encode())
"""


def through(terminal: bool) -> tuple[int, str]:
    """A process that prints once the terminal, or the reader of its pipe, has gone."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    go, wait = os.pipe()[::-1]
    answer, said = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(said)],
        stdin=wait,
        stdout=writer,
        stderr=writer,
        pass_fds=[said],
    )
    for number in (reader, writer, said):
        os.close(number)
    os.write(go, b"x")
    code = child.wait(60)
    return code, os.read(answer, 20).decode()


def test_what_is_printed_after_the_terminal_or_the_reader_has_gone_is_no_error():
    assert through(terminal=True) == (0, "False")  # disown: the run goes on
    assert through(terminal=False) == (0, "True")  # `| head`: it saves and ends


def test_other_errors_of_the_output_remain():
    with open("/dev/full", "w") as file, pytest.raises(OSError, match="No space left"):
        Steady(file.fileno()).write(b"x")


def test_sighup_is_remembered_and_does_not_count_twice():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where nohup runs the tests
    try:
        with Interrupt() as interrupt:
            for _ in range(3):
                signal.raise_signal(signal.SIGHUP)
            assert interrupt.signal == signal.SIGHUP
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_ignored_sighup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert list(ending_signals()) == [signal.SIGINT, signal.SIGTERM]
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert interrupt.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reader_that_has_gone_is_a_signal_to_save(monkeypatch):
    monkeypatch.setattr(output, "_reader_gone", {1})
    assert reader_gone()
    with Interrupt() as interrupt:
        assert interrupt.pending(None) == signal.SIGPIPE  # type: ignore[arg-type]


def test_a_child_learns_that_its_parent_has_died(monkeypatch):
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    end, other = os.pipe()
    thread = threading.Thread(target=restarts._end_with_parent, args=(end,))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and not sent
    os.close(other)
    thread.join(10)
    assert sent == [(os.getpid(), signal.SIGTERM)]
