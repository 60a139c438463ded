"""`isolation: best` on a system that permits no namespaces: what Python alone can do to files and
to other processes, with Landlock and without it."""

import os
import warnings
from pathlib import Path

import pytest

from rewards import load
from rewards.catalogue.code_tests import CodeTests
from rewards.sandbox import run
from tests.rewards.test_rewards_code import PLAIN, SMALL, block, of
from tests.rewards.test_rewards_sandbox import reached, test_no_socket_reaches_anybody

SPACES = (("libc.unshare(flags) == 0", "False"), ("libc.unshare(flags | USERS) != 0", "True"))
NO_LANDLOCK = (("if version < 1:", "if True:"),)

# each prints what it reached; FILE is a file outside with a word, NEW one that is not there yet
WRITING = {
    "a path": "open('NEW', 'w')",
    "a folder's descriptor": "place, name = os.path.split('NEW')\n"
    "os.open(name, os.O_WRONLY | os.O_CREAT, 0o666, dir_fd=os.open(place, os.O_RDONLY))",
    "a database": "import sqlite3\nsqlite3.connect('NEW').execute('create table a (b)')",
    "a pipe by name": "os.mkfifo('NEW')",
    "a node": "os.mknod('NEW')",
    "a folder": "os.mkdir('NEW')",
    "a link": "os.link('FILE', 'NEW')",
    "a symbolic link": "os.symlink('FILE', 'NEW')",
    "another name": "os.rename('FILE', 'NEW')",
    "a socket by name": "import _socket\n_socket.socket(1, 1).bind('NEW')",
}
CHANGING = {
    "its end": "os.truncate('FILE', 0)",
    "its time": "os.utime('FILE', (1, 1))",
    "its rights": "os.chmod('FILE', 0o777)",
    "its attributes": "os.setxattr('FILE', 'user.x', b'x')",
    "its name": "os.remove('FILE')",
}
OTHERS = {
    "its processors": "os.sched_setaffinity(PARENT, {0})",
    "its scheduling": "os.sched_setscheduler(PARENT, 3, os.sched_param(0))",
    "its parameters": "os.sched_setparam(PARENT, os.sched_param(0))",
    "its priority": "os.setpriority(os.PRIO_PROCESS, PARENT, 19)",
    "its limits": "import resource\nresource.prlimit(PARENT, resource.RLIMIT_CORE, (0, 0))",
    "a signal": "os.kill(PARENT, 0)",
}
READING = {
    "a path": "print(open('FILE').read())",
    "a folder's descriptor": "print(os.read(os.open(os.path.basename('FILE'), os.O_RDONLY,"
    " dir_fd=os.open(os.path.dirname('FILE'), os.O_RDONLY)), 99).decode())",
    "its variables": "print(open('/proc/PARENT/environ').read())",
    "its memory": "open('/proc/PARENT/mem', 'rb')\nprint('word')",
    "its root": "print(open('/proc/PARENT/rootFILE').read())",
}
# C libraries of Python's that open files themselves, which no hook sees
LIBRARIES = {
    "gdbm": "import _gdbm\n_gdbm.open('NEW', 'c')",
    "shared memory": "import _posixshmem\n"
    "_posixshmem.shm_open('/NAME', os.O_CREAT | os.O_RDWR, 0o666)",
    "a semaphore": "import _multiprocessing\n_multiprocessing.SemLock(1, 1, 1, '/NAME', False)",
}


def without(folder: Path, changes: tuple[tuple[str, str], ...]) -> Path:
    """A copy of the sandbox for a system without something."""
    folder.mkdir()
    left = {old for old, _ in changes}
    for path in run.SANDBOX_FOLDER.glob("*.py"):
        text = path.read_text()
        for old, new in changes:
            left -= {old} if old in text else set()
            text = text.replace(old, new)
        (folder / path.name).write_text(text)
    assert not left, "the sandbox no longer says so"
    return folder


def landlock() -> bool:
    return "names" in run.run_program("", "", SMALL).missing


@pytest.fixture(params=["landlock", "no landlock"])
def fenced(request, monkeypatch, tmp_path) -> bool:
    """Whether Landlock holds; the system permits no namespaces."""
    changes = SPACES + (NO_LANDLOCK if request.param == "no landlock" else ())
    monkeypatch.setattr(run, "SANDBOX_FOLDER", without(tmp_path / "sandbox", changes))
    if request.param == "landlock" and not landlock():
        pytest.skip("this kernel has no Landlock")
    return request.param == "landlock"


def tried(programs: dict[str, str], place: Path) -> dict[str, str]:
    """What each program reached: what it said, or a file that is new or changed."""
    place.mkdir()
    file, new, name = place / "file", place / "new", f"flowrl-test-{os.getpid()}"
    found: dict[str, str] = {}
    for title, code in programs.items():
        file.write_text("word")
        os.utime(file, (7, 7))
        file.chmod(0o644)
        words = {"FILE": str(file), "NEW": str(new), "NAME": name, "PARENT": str(os.getpid())}
        for word, value in words.items():
            code = code.replace(word, value)
        inner = "\n".join(f"    {line}" for line in code.splitlines())
        catching = f"import os\ntry:\n{inner}\nexcept (OSError, ImportError): print('refused')\n"
        said = run.run_program(catching, "", SMALL).output
        if "refused" not in said:
            found[title] = said.strip()[:80] or "done"
        if [*place.iterdir()] != [file] or (file.stat().st_mtime, file.stat().st_mode & 0o777) != (
            7,
            0o644,
        ):
            found[title] = "a change"
        for left in {*place.iterdir()} - {file}:
            left.rmdir() if left.is_dir() else left.unlink()
        for left in Path("/dev/shm").glob(f"*{name}"):
            found[title] = str(left)
            left.unlink()
    return found


def test_files_and_processes_outside_are_not_changed(fenced, tmp_path):
    place = tmp_path / "place"
    assert tried({f"{n}: {c}": c for n, c in (WRITING | CHANGING | OTHERS).items()}, place) == {}


def test_with_landlock_nothing_is_read_or_written_by_a_library(fenced, tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWRL_SECRET", "word")
    found = tried(READING, tmp_path / "place")
    libraries = tried(LIBRARIES, tmp_path / "libraries")
    if fenced:
        assert found == {} and libraries == {}
    else:
        assert found["a path"] == "word", "reading is not refused, as the warning says"


def test_the_warning_says_what_is_left(fenced, tmp_path):
    left = "see names and sizes of files" if fenced else "read and write files"
    with pytest.raises(ValueError, match=rf"{left}.*or accept .* isolation: best"):
        load("code_tests")
    with pytest.warns(UserWarning, match=f"could {left}"):
        reward = load("code_tests", isolation="best")
    assert isinstance(reward, CodeTests)
    assert reward(of([block("def f(x):\n    return x + 1")], PLAIN)).tolist() == [1]
    assert reached(tmp_path) == (["mine"] if fenced else ["42", "mine"])
    test_no_socket_reaches_anybody()


def test_right_programs_are_right(fenced):
    """Of what a program may do in its own folder, and with the libraries of science."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reward = load("code_tests", isolation="best")
    assert isinstance(reward, CodeTests)
    codes = {
        "stdin": "print(sum(map(int, open('/dev/stdin').read().split())))",
        "numpy": "import numpy\nprint(int(numpy.array(input().split(), int).sum()))",
        "files": "import tempfile\nopen('x', 'w').write(input())\n"
        "print(sum(map(int, open('x').read().split())))",
        "threads": "import threading\nfound = []\n"
        "def f(): found.append(sum(map(int, input().split())))\n"
        "t = threading.Thread(target=f)\nt.start()\nt.join()\nprint(found[0])",
        "database": "import sqlite3\na, b = input().split()\nbase = sqlite3.connect(':memory:')\n"
        "print(base.execute(f'select {a} + {b}').fetchone()[0])",
    }
    samples = of([block(code) for code in codes.values()], [{"input": "2 3", "output": "5"}])
    assert dict(zip(codes, reward(samples).tolist(), strict=True)) == dict.fromkeys(codes, 1.0)


def test_native_code_starts_and_signals_nobody(fenced):
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        f"print(libc.fork(), libc.kill({os.getpid()}, 9), libc.shmget(0, 2**20, 0o1600))\n"
        "libc.execv(b'/bin/true', None)\nprint('still here')"
    )
    said = run.run_program(code, "", SMALL).output
    assert said == "" or said.split() == ["-1", "-1", "-1", "still", "here"]
    code = "import os\ntry:\n    os.fork()\nexcept OSError:\n    print('refused')"
    assert run.run_program(code, "", SMALL).output == "refused\n"
