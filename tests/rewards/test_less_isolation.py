"""`isolation: best` on a system that permits no namespaces: what Python alone can do to files and
to other processes, with Landlock and without it."""

import ctypes
import errno
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rewards import load
from rewards.catalogue.code_tests import CodeTests
from rewards.sandbox import run
from tests.rewards.test_rewards_code import ISOLATED, PLAIN, SMALL, block, of
from tests.rewards.test_rewards_sandbox import reached, test_no_socket_reaches_anybody

isolated = pytest.mark.skipif(not ISOLATED, reason="no namespaces are permitted here")
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


NO_MOUNTS = (('    root = settings["folder"]\n', "    raise OSError\n"),)
# as gVisor answers: no new space of mounts, and no error
SAME_MOUNTS = (('"mounts": 0x20000', '"mounts": 0'),)
FEWER_LIMITS = (
    ("            resource.setrlimit(kind, (most, most))\n        except",
     "            if kind != resource.KIND: resource.setrlimit(kind, (most, most))\n"
     "            else: raise ValueError\n        except"),
)  # fmt: skip
OWN_FILES = "print(open('program.py').read()[:5], open('new', 'w').write(input()))"


PYTHONS = {"this one": sys.executable, "one that all users may read": "/usr/bin/python3"}


@isolated
@pytest.mark.parametrize("python", PYTHONS)
def test_where_mounts_alone_are_refused_a_program_has_its_own_folder(python, monkeypatch, tmp_path):
    """As in containers of root's whose profile forbids mounts. There it becomes another user, if
    that one can read the interpreter's libraries."""
    asked = [PYTHONS[python], "-c", "import sys; print(sys.version_info >= (3, 11))"]
    if not os.path.exists(asked[0]) or subprocess.check_output(asked) != b"True\n":
        pytest.skip("it is none of 3.11 or later")
    monkeypatch.setattr(sys, "executable", asked[0])
    monkeypatch.setattr(run, "SANDBOX_FOLDER", without(tmp_path / "sandbox", NO_MOUNTS))
    found = run.run_program(OWN_FILES, "12345\n", SMALL)
    assert (found.code, found.output) == (0, "print 5\n")
    assert {*found.missing} - {"processes"} in ({"names", "disk"}, {"files", "disk"})
    assert run.run_tests("def f(x): return x + 1", PLAIN, SMALL).passed == [True] * 3


@isolated
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts without a namespace of users")
def test_nothing_is_mounted_unless_the_space_of_mounts_is_new(monkeypatch, tmp_path):
    """In a space that is thrown away, since a sandbox that believed the kernel would change it."""
    monkeypatch.setattr(run, "SANDBOX_FOLDER", without(tmp_path / "sandbox", SAME_MOUNTS))
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).unshare(0x20000)
        before = Path("/proc/self/mountinfo").read_text()
        found = run.run_program("print(1)", "", SMALL)
        os.write(tell, f"{Path('/proc/self/mountinfo').read_text() == before} {found}".encode())
        os._exit(0)
    os.close(tell)
    os.waitpid(child, 0)
    said = os.read(told, 2**12).decode()
    os.close(told)
    assert said.startswith("True ") and "output='1\\n'" in said and "'disk'" in said


@isolated
@pytest.mark.parametrize(
    ("kind", "lost"),
    [("RLIMIT_NPROC", "processes"), ("RLIMIT_AS", "memory"), ("RLIMIT_FSIZE", "disk"),
     ("RLIMIT_SIGPENDING", "memory"), ("RLIMIT_CORE", None)],
)  # fmt: skip
def test_a_limit_that_the_kernel_does_not_have_is_a_missing_protection(
    kind, lost, monkeypatch, tmp_path
):
    changes = tuple((old, new.replace("KIND", kind)) for old, new in FEWER_LIMITS)
    monkeypatch.setattr(run, "SANDBOX_FOLDER", without(tmp_path / "sandbox", changes))
    found = run.run_program("print(1)", "", SMALL)
    assert found == run.ProgramResult(0, "1\n", () if lost is None else (lost,))


REACHES_OTHERS = (
    *("chmod", "chown", "connect", "execve", "execveat", "fchmod", "fchmodat", "fchown"),
    *("fchownat", "futimesat", "kill", "lchown", "mknod", "mknodat", "pidfd_open"),
    *("pidfd_send_signal", "prlimit64", "rt_sigqueueinfo", "rt_tgsigqueueinfo"),
    *("sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler"),
    *("setpriority", "tgkill", "tkill", "truncate", "utime", "utimensat", "utimes"),
)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of its calls")
def test_without_namespaces_no_call_reaches_others():
    """Arguments that no call takes: one that is let through fails with another error."""
    spec = importlib.util.spec_from_file_location("calls", run.SANDBOX_FOLDER / "syscalls.py")
    assert spec is not None and spec.loader is not None
    calls = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(calls)
    known = calls.PERMITTED | calls.REACHING
    numbers = {name: known[name][0] for name in REACHES_OTHERS}
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(38, 1, 0, 0, 0)
        holds = calls.filter_calls(libc, False, False)
        results = {name: (libc.syscall(n, -1, -1, -1, -1), ctypes.get_errno())
                   for name, n in numbers.items()}  # fmt: skip
        passed = [name for name, result in results.items() if result != (-1, errno.EPERM)]
        # io_setup, which the kernel has and no list, and x86's third set of numbers
        others = (206, calls.X32 | 39)
        unknown = [(libc.syscall(n, -1, -1), ctypes.get_errno()) for n in others]
        os.write(tell, repr((holds, passed, unknown)).encode())
        os._exit(0)
    os.close(tell)
    os.waitpid(child, 0)
    said = os.read(told, 2**14).decode()
    os.close(told)
    assert said == repr((True, [], [(-1, errno.ENOSYS), (-1, errno.EPERM)]))
