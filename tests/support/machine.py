"""What a command leaves on a machine: `python -m tests.support.machine OUT COMMAND ...`.

It runs in a space of processes, mounts and queues of its own (`alone`), where nothing else starts
or ends, so that what is there before and after can be compared as a whole: processes of any user,
contexts of asynchronous input, timers, System V and POSIX queues, mounts, control groups, temporary
folders and shared memory.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flowrl.paths import PROJECT

SPACES = ("--pid", "--fork", "--mount", "--ipc", "--mount-proc")
SETTLED_SECONDS = 10.0  # in which what was killed is gone, on a busy machine too
CGROUPS = Path("/sys/fs/cgroup")

needs_root = pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0,
    reason="only root sees the processes of all users",
)


def alone(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float = 900
) -> dict[str, Any]:
    """Run a command in spaces of its own. Returns its `code`, what it `said`, and what is `left`,
    by kind: what was there before alone, and what is there afterwards alone. `folder`: that of
    temporary files."""
    out = folder / "machine.json"
    whole = ["unshare", *SPACES, sys.executable, "-m", "tests.support.machine", str(out), *command]
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "tmp").chmod(0o777)
    subprocess.run(
        whole, cwd=PROJECT, check=True, timeout=seconds, stdin=subprocess.DEVNULL,
        env={**environment, "PYTHONPATH": str(PROJECT), "TMPDIR": str(folder / "tmp")},
    )  # fmt: skip
    return json.loads(out.read_text())


def state() -> dict[str, list[str]]:
    """What the kernel holds for the processes of these spaces, and for all where there is one."""
    shared = ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg")
    places = (tempfile.gettempdir(), "/var/tmp", "/dev/shm", "/dev/mqueue")
    return {
        "processes": processes(),
        "contexts of asynchronous input": [Path("/proc/sys/fs/aio-nr").read_text().strip()],
        "timers": [str(sum(map(_timers, Path("/proc").glob("[0-9]*/timers"))))],
        "queues": [line for path in shared for line in Path(path).read_text().splitlines()[1:]],
        "mounts": Path("/proc/self/mountinfo").read_text().splitlines(),
        "control groups": [str(path) for path in CGROUPS.rglob("*") if path.is_dir()],
        "files": [f"{place}/{name}" for place in places for name in _names(place)],
    }


def processes() -> list[str]:
    """Numbers and commands of all that run. One that has ended is nobody's."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if (folder / "stat").read_text().rpartition(") ")[2][0] != "Z":
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found.append(f"{folder.name} {words.decode(errors='replace')[:200]}")
    return found


def _timers(path: Path) -> int:
    try:
        return path.read_text().count("ID: ")
    except OSError:  # its process has ended
        return 0


def _names(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _left(before: dict[str, list[str]]) -> dict[str, list[list[str]]]:
    after = state()
    return {
        kind: [sorted({*was} - {*after[kind]}), sorted({*after[kind]} - {*was})]
        for kind, was in before.items()
        if {*was} != {*after[kind]}
    }


def main(out: str, *command: str) -> None:
    libc = ctypes.CDLL(None)
    for place in ("/var/tmp", "/dev/shm"):  # which others of the machine write to
        assert libc.mount(b"none", place.encode(), b"tmpfs", 0, b"mode=1777") == 0
    before = state()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    until = time.monotonic() + SETTLED_SECONDS
    while (left := _left(before)) and time.monotonic() < until:
        time.sleep(0.1)
    Path(out).write_text(json.dumps({"code": done.returncode, "said": done.stdout, "left": left}))


if __name__ == "__main__":
    main(*sys.argv[1:])
