"""Programs that try to outlive their verdict, as this user and as another: nothing of them may be
alive once it is there, whatever they do to signals, sessions, users, limits and process 1."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from rewards.sandbox import run
from tests.rewards.test_rewards_code import ISOLATED, PLAIN, SMALL

pytestmark = pytest.mark.skipif(not ISOLATED, reason="no namespaces are permitted here")

PROJECT = Path(__file__).parents[2]
NOBODY = 65534
SETUP = """
import ctypes, os, resource, signal, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def linger():
    while True: time.sleep(1)
def leave(last=None):
    'A grandchild of its own session, without files, which ignores what it can.'
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            if last: last()
            linger()
        os._exit(0)
def quietly(function, *given):
    try: return function(*given)
    except (OSError, ValueError, OverflowError) as error: return error
"""
ESCAPES = {
    "a session of its own": """
if os.fork() == 0:
    os.setsid()
    linger()
""",
    "a session of the program's own": """
quietly(os.setsid)
os.fork() or linger()
""",
    "two forks": "leave()",
    "no death signal": """
libc.prctl(1, 0, 0, 0, 0)
leave(lambda: libc.prctl(1, 0, 0, 0, 0))
""",
    "another user": """
uid = os.getuid()
quietly(os.setresuid, uid, uid, uid)
leave(lambda: quietly(os.setresuid, uid, uid, uid))
""",
    "signals ignored": """
def deaf():
    for s in range(1, 65): quietly(signal.signal, s, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
deaf()
leave(deaf)
""",
    "files closed": """
leave(lambda: os.closerange(0, 4096))
os.closerange(0, 4096)
""",
    "many forks": """
for i in range(200):
    if quietly(os.fork) == 0: linger()
""",
    "forks of forks": """
end = time.time() + 0.4
while time.time() < end: quietly(os.fork)
linger()
""",
    "another program": "leave(lambda: os.execv('/bin/sleep', ['{mark}', '60']))",
    "a spawned program": "os.posix_spawn('/bin/sleep', ['{mark}', '60'], {{}}, setsid=True)",
    "a shell in the background": """
subprocess.Popen(['/bin/sh', '-c', 'sleep 60 & sleep 60 # {mark}'], start_new_session=True)
""",
    "a reaper of its own": """
libc.prctl(36, 1, 0, 0, 0)
leave(lambda: libc.prctl(36, 1, 0, 0, 0))
""",
    "new namespaces": """
for flag in (0x10000000, 0x20000000, 0x20000, 0x30000000):
    libc.unshare(flag)
    libc.syscall(56, flag | 17, 0, 0, 0, 0) or linger()
leave()
""",
    "a child of its parent": "libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0) or linger()",
    "a traced process 1": """
for pid in (1, os.getppid()):
    for call in (16, 0x4206, 8):
        libc.ptrace(call, pid, 0, 0)
leave()
""",
    "process 1 signalled": """
for s in range(1, 65):
    quietly(os.kill, 1, s)
leave()
time.sleep(0.2)
""",
    "process 1 killed": """
leave()
quietly(os.kill, 1, signal.SIGKILL)
quietly(os.kill, 1, signal.SIGSTOP)
""",
    "everybody stopped": """
leave()
quietly(os.kill, -1, signal.SIGSTOP)
quietly(os.kill, 0, signal.SIGSTOP)
""",
    "its group killed": """
leave()
quietly(os.killpg, 0, signal.SIGKILL)
""",
    "its keeper's group": """
leave()
for g in range(2, 99): quietly(os.killpg, g, signal.SIGSTOP)
quietly(os.setpgid, 0, 0)
""",
    "limits of process 1": """
for kind in range(16):
    quietly(resource.prlimit, 1, kind, (0, 0))
quietly(os.sched_setaffinity, 1, [0])
quietly(os.setpriority, 0, 1, 19)
leave()
""",
    "memory of process 1": """
for name in ('mem', 'oom_score_adj', 'fd', 'cwd', 'environ'):
    quietly(open, '/proc/1/' + name, 'r+b')
leave()
""",
    "a stopped child": "leave(lambda: os.kill(os.getpid(), signal.SIGSTOP))",
    "orphans": """
for i in range(60):
    if quietly(os.fork) == 0:
        quietly(os.fork)
        os._exit(0)
    time.sleep(0.005)
leave()
""",
    "threads": """
for i in range(8): threading.Thread(target=linger).start()
leave()
""",
    "a traced child": """
pid = os.fork()
if pid == 0: linger()
libc.ptrace(16, pid, 0, 0)
leave()
""",
    "timers": """
leave()
for i in range(100_000):
    if libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())): break
print(i)
""",
    "asynchronous input": """
leave()
made = sum(libc.syscall({io_setup}, 999, ctypes.byref(ctypes.c_ulong())) == 0 for _ in range(9))
print(made)
""",
    "a session of its own until its time is over": """
quietly(os.setsid)
libc.prctl(1, 0, 0, 0, 0)
leave()
linger()
""",
    "kept until its time is over": """
leave()
linger()
""",
    "a large memory": """
leave(lambda: (bytearray(2**27), linger()))
linger()
""",
}  # fmt: skip
ENDS = {"timers": 256, "asynchronous input": 0}  # most of them that a program can have


def escaped(name: str, mark: str) -> str | None:
    """What is wrong after the program: processes that are alive, or more of what is counted."""
    number = {"x86_64": 206, "aarch64": 0}.get(os.uname().machine, 206)
    code = SETUP + ESCAPES[name].format(mark=mark, io_setup=number)
    limits = run.SandboxLimits(seconds=1.0, memory=SMALL.memory, processes=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a keeper that did not end in time
        result = run.run_program(code, "", limits)
    if left := alive(mark):
        return f"{name}: alive: {left}"
    said = result.output.split()
    if name in ENDS and not (said and int(said[0]) <= ENDS[name]):
        return f"{name}: {said} instead of at most {ENDS[name]}"
    return None


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


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_is_alive_after_the_verdict(name, folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", folder)
    assert escaped(name, folder) is None
    assert run.run_program("print(1)", "", SMALL).output == "1\n"


DRIVER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from tests.rewards import test_sandbox_escapes as escapes
print([wrong for name in escapes.ESCAPES if (wrong := escapes.escaped(name, sys.argv[1]))])
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
from tests.rewards.test_sandbox_escapes import SETUP
limits = run.SandboxLimits(seconds=60.0)
code = SETUP + "leave(lambda: libc.prctl(1, 0, 0, 0, 0))\\nleave()\\nlinger()"
tests = SETUP + "leave()\\ndef f(x): linger()"
threading.Thread(target=run.run_program, args=(code, "", limits)).start()
threading.Thread(target=run.run_tests, args=(tests, ["assert f(2) == 3"], limits)).start()
print("began", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
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
    while alive(own) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(own)


def test_a_killed_keeper_leaves_nothing(folder, monkeypatch):
    """As the kernel does that runs out of memory: process 1 ends by itself."""
    monkeypatch.setattr(tempfile, "tempdir", f"{folder}/keeper")
    os.makedirs(f"{folder}/keeper")
    with (
        run._folder(SETUP + "leave()\nlinger()") as own,
        run._file(b"") as out,
        run._started("program", own, SMALL, subprocess.DEVNULL, out) as started,
    ):
        run._read_control(started.reports, 0.5)
        assert len(alive(own)) >= 3
        started.process.kill()
        started.process.wait()
        until = time.monotonic() + 5
        while alive(own) and time.monotonic() < until:
            time.sleep(0.02)
        assert not alive(own)


def test_tests_of_functions_leave_nothing_either(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", folder)
    code = SETUP + "leave()\ndef f(x):\n    leave()\n    return x + 1"
    assert run.run_tests(code, PLAIN, SMALL)[0] == [True] * 3
    assert not alive(folder)
