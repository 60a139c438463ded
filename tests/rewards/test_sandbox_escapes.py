"""Programs that try to outlive their verdict, as this user and as another: nothing of them may be
alive once it is there, whatever they do to signals, sessions, users, limits and process 1."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from rewards.checks.escapes import ESCAPES, Escape, program_of
from rewards.sandbox import run
from tests.rewards.test_rewards_code import ISOLATED, PLAIN, SMALL

pytestmark = pytest.mark.skipif(not ISOLATED, reason="no namespaces are permitted here")

PROJECT = Path(__file__).parents[2]
NOBODY = 65534
BY_DEFAULT = (  # one of each kind; the others are slow
    "two forks",
    "another user",
    "process 1 killed",
    "its keeper's group",
    "kept until its time is over",
    "timers",
)
VALUES = {  # files of no folder, and a canary that no error's words have
    "word": "word", "port": 9, "socket": "none", "secret": "/nowhere/secret",
    "target": "/nowhere/target", "canary": "canary", "outer": 2**30,
}  # fmt: skip
SCRIPTS = [name for name, escape in ESCAPES.items() if not escape.tests]
PREAMBLE = program_of(Escape("end", ""), {**VALUES, "mark": "none"})


def escaped(name: str, mark: str) -> str | None:
    """What is wrong after the program: processes that are alive, or what it says it reached."""
    code = program_of(ESCAPES[name], {**VALUES, "mark": mark})
    limits = run.SandboxLimits(seconds=ESCAPES[name].seconds, memory=SMALL.memory, processes=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a keeper that did not end in time
        result = run.run_program(code, "", limits)
    if left := alive(mark):
        return f"{name}: alive: {left}"
    if result.output:
        return f"{name}: {result.output}"
    # it ends well, or something of ours ends it: none has mistakes of its own
    return f"{name}: ended with {result.code}" if result.code not in (0, None, 137) else None


def alive(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if mark.encode() in words and path.parent.name != str(os.getpid()):
            found.append(path.parent.name)
    return found


@pytest.fixture(scope="module")
def folder():
    """A folder for temporary files whose name marks the processes that were started with it."""
    with tempfile.TemporaryDirectory(prefix="flowrl-escape-", dir="/tmp") as made:
        os.chmod(made, 0o777)
        yield made


@pytest.mark.parametrize(
    "name",
    [n if n in BY_DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in SCRIPTS],
)
def test_nothing_is_alive_after_the_verdict(name, folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", folder)
    assert escaped(name, folder) is None
    assert run.run_program("print(1)", "", SMALL).output == "1\n"


DRIVER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from tests.rewards import test_sandbox_escapes as escapes
print([wrong for name in escapes.SCRIPTS if (wrong := escapes.escaped(name, sys.argv[1]))])
"""


def driven(script: str, folder: str, **more) -> "subprocess.Popen[str]":
    os.makedirs(folder, exist_ok=True)
    os.chmod(folder, 0o777)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "HOME": folder}
    return subprocess.Popen(
        [sys.executable, "-c", script, folder], env=environment, cwd=PROJECT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_nor_is_anything_of_another_users_programs(folder):
    as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    probe = "from rewards.sandbox import run\n"
    probe += "print(run.run_program('', '', run.SandboxLimits()).missing)"
    try:
        began = driven(probe, f"{folder}/probe", **as_nobody)
    except PermissionError:  # an environment below a folder of root's alone
        pytest.skip(f"another user cannot run {sys.executable}")
    with began as process:
        said, error = process.communicate(timeout=120)
    if said.strip() != "()":
        pytest.skip(f"another user has no namespaces here: {said} {error[-300:]}")
    with driven(DRIVER, f"{folder}/nobody", **as_nobody) as process:
        said, error = process.communicate(timeout=600)
    assert said.strip() == "[]", error[-2000:]


KILLED = """
import sys, tempfile, threading
tempfile.tempdir = sys.argv[1]
from rewards.sandbox import run
from tests.rewards.test_sandbox_escapes import PREAMBLE
limits = run.SandboxLimits(seconds=60.0)
code = PREAMBLE + "leave(lambda: libc.prctl(1, 0, 0, 0, 0))\\nleave()\\nlinger()"
tests = PREAMBLE + "leave()\\ndef f(x): linger()"
threading.Thread(target=run.run_program, args=(code, "", limits)).start()
threading.Thread(target=run.run_tests, args=(tests, ["assert f(2) == 3"], limits)).start()
print("began", flush=True)
"""


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_nothing_is_alive_after_the_run_is_killed_in_the_middle(how, folder):
    own = f"{folder}/killed-{how}"
    with driven(KILLED, own) as process:
        assert process.stdout is not None and process.stdout.readline() == "began\n"
        until = time.monotonic() + 60
        while len(alive(own)) < 12 and time.monotonic() < until:
            time.sleep(0.05)  # three keepers, their first processes, the programs, what they left
        assert len(alive(own)) >= 12
        process.send_signal(how)
        process.wait(timeout=60)
    until = time.monotonic() + 10
    while (alive(own) or os.listdir(own)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(own)
    assert not os.listdir(own), "its temporary folders"


def test_a_killed_keeper_leaves_nothing(folder, monkeypatch):
    """As the kernel does that runs out of memory: process 1 ends by itself."""
    monkeypatch.setattr(tempfile, "tempdir", f"{folder}/keeper")
    os.makedirs(f"{folder}/keeper")
    with (
        run.make_folder(PREAMBLE + "leave()\nlinger()") as own,
        run._file(b"") as out,
        run.started("program", own, SMALL, subprocess.DEVNULL, out) as started,
    ):
        run.read_control(started.reports, 0.5)
        assert len(alive(own)) >= 3
        started.process.kill()
        started.process.wait()
        until = time.monotonic() + 5
        while alive(own) and time.monotonic() < until:
            time.sleep(0.02)
        assert not alive(own)


def test_tests_of_functions_leave_nothing_either(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", folder)
    code = PREAMBLE + "leave()\ndef f(x):\n    leave()\n    return x + 1"
    assert run.run_tests(code, PLAIN, SMALL)[0] == [True] * 3
    assert not alive(folder)


def test_a_signal_to_its_own_group_reaches_no_process_of_ours_outside():
    """A group goes on in a new space of processes: its number is 0 there if it began outside, where
    a keeper of the same user would be killed or stopped with it."""
    code = "import os\nprint(os.getpgid(0), os.getsid(0))"
    assert run.run_program(code, "", SMALL).output.split() == ["1", "1"]


MAPPED = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
for flags in (0x22, 0x21, 0x23, 0x40022, 0x4022):  # of MAP_ANONYMOUS and others
    made = libc.mmap(None, 2**21, 3, flags, -1, 0) != ctypes.c_void_p(-1).value
    print(made or errno.errorcode[ctypes.get_errno()], end=' ')
"""


def test_memory_is_mapped_where_it_can_be_counted():
    """Private memory, also if it is reserved only; neither shared memory nor the host's pages."""
    found = run.run_program(MAPPED, "", SMALL)
    assert found.output.split() == ["True", "EPERM", "EPERM", "EPERM", "True"]
    zeros = "file = open('/dev/zero', 'rb')\nprint(file.read(9) == bytes(9), file.seek(0, 2))"
    assert run.run_program(zeros, "", SMALL).output.split() == ["True", str(SMALL.written)]


SHARING = """
import mmap, os, sys
small, large = mmap.mmap(-1, 1000), mmap.mmap(-1, int(sys.stdin.read()))
large[7:9] = b'ab'
if os.fork() == 0:
    small[0] = 5
    os._exit(0)
os.wait()
print(small[0], len(small), large[7:9].decode(), isinstance(small, mmap.mmap), type(small).__name__)
print(mmap.mmap(-1, 10, flags=mmap.MAP_PRIVATE)[0], mmap.mmap(-1, 10, access=mmap.ACCESS_READ)[3])
"""


def test_mappings_of_python_are_shared_with_children_and_may_be_large():
    found = run.run_program(SHARING, str(2**24), SMALL)
    assert found.output == "5 1000 ab True mmap\n0 0\n"


BWRAP = ("bwrap", "--dev-bind", "/", "/", "--unshare-user", "--unshare-pid", "--proc", "/proc")
COUNTED = """
from rewards.sandbox import run
code = '''
import os, time
began = 0
try:
    for _ in range(40):
        if os.fork() == 0: time.sleep(3); os._exit(0)
        began += 1
except OSError: pass
print(began)'''
print(run.run_program(code, '', run.SandboxLimits(processes=8)))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("options", [("--uid", "1000"), ("--uid", "0", "--cap-add", "ALL")])
def test_in_bubblewrap_processes_are_counted(options, folder):
    """As a user there, and as a root who is the only user and is not the host's."""
    command = [*BWRAP, *options, sys.executable, "-c", COUNTED]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(PROJECT), "HOME": folder}, cwd=PROJECT,
        capture_output=True, text=True, timeout=120, check=False, user=NOBODY, group=NOBODY,
        extra_groups=[],
    )  # fmt: skip
    if "Permission denied" in done.stderr:  # an environment below a folder of root's alone
        pytest.skip(f"another user cannot run {sys.executable}")
    assert "missing=()" in done.stdout and "output='7\\n'" in done.stdout
