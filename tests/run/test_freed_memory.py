"""Freed memory of a run on the CPU stays with the process, so that it is not faulted in again."""

import os
import platform
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.paths import PROJECT
from flowrl.run import train
from flowrl.run.watch.alarms import Alarms
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from flowrl.session.signals import Interrupt
from flowrl.settings.read import override, read_run

FAULTS = """
import ctypes
import resource
import sys
from flowrl.session.session import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
if sys.argv[1] == "keep":
    keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    before = faults()
    blocks = [libc.malloc(2**23) for _ in range(20)]  # 160 MiB
    for block in blocks:
        libc.memset(block, 1, 2**23)
    while blocks:
        libc.free(blocks.pop())
print(faults() - before)
"""


def faults(*words: str, **variables: str) -> int:
    given = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, *words],
        capture_output=True, text=True, check=True, env=given | variables,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back")
def test_blocks_are_not_faulted_in_again() -> None:
    kept, plain = faults("keep"), faults("plain")
    assert kept < 0.05 * plain
    # a user's own setting stays
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072") > 0.5 * plain


def test_what_an_iteration_made_is_freed_before_the_next_one(monkeypatch) -> None:
    held: list[weakref.ref] = []

    class Made:
        """An iteration, whose rows may fill a GPU."""

    def iterate(stages: Any, progress: Progress) -> Made:
        assert not any(each() for each in held)
        progress.iteration += 1
        made = Made()
        held.append(weakref.ref(made))
        return made

    monkeypatch.setattr(train, "iterate", iterate)
    monkeypatch.setattr(train.TrainingLoop, "finish", lambda *_: None)
    session = object.__new__(Session)
    settings = read_run(PROJECT / "configs" / "demo.yaml")
    few = override(settings, ["--train.iterations", "3"])
    object.__setattr__(session, "learner", SimpleNamespace(run=few))
    stages: Any = None
    train.TrainingLoop(session, Progress(), Alarms(), stages).run(Interrupt())
    assert len(held) == 3
