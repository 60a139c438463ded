"""Drop the privileges that this process does not need, before it runs untrusted code.

On Linux, where user namespaces are permitted (or as root): no network, no view of other processes,
and a read-only file system with only the interpreter and the system's libraries. The code is not
process 1 of its namespace: that one is ours, and with its end the kernel ends all others there.
Memory is limited per process by address space, and in total by a control group where one is
delegated, elsewhere by a watcher outside that ends them; without either, only one process is
allowed. Elsewhere Landlock (Linux 5.13), a system-call filter (Linux) and a Python audit hook
refuse what they can. With Landlock, names and sizes of files can still be seen; without it, files
can be read, and native code can write them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from cgroup import end_group, enter_group, make_group
from keeper import keep_program, reap
from landlock import restrict_files
from syscalls import filter_calls

TYPE_CHECKING = False  # typing itself takes a tenth of a program's start
if TYPE_CHECKING:
    from typing import Any

SPACES = {"mounts": 0x20000, "ipc": 0x8000000, "processes": 0x20000000, "network": 0x40000000}
USERS = 0x10000000  # CLONE_NEWUSER
BIND, RECURSIVE, PRIVATE, DETACH = 0x1000, 0x4000, 0x40000, 2
MOUNT_SETATTR, READ_ONLY = 442, 1 | 2  # the call's number; MOUNT_ATTR_RDONLY and NOSUID
DIE_WITH_PARENT, DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38  # of prctl
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache")
# not /dev/zero: a shared mapping of it is memory that stays while no process has it mapped
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
ZERO_FILE = "/dev/zero"  # a file of as many zeros as may be written stands there instead
LINKS = {
    "/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}  # fmt: skip
PROTECTIONS = ["network", "files", "disk", "processes", "memory"]
OF_MOUNTS = ("files", "names", "disk")  # protections that need a space of mounts
MOST_FILES = 8192  # files and folders that may exist at the same time, empty ones too
MOST_PENDING = 256  # signals that wait and timers, of all processes together
NOBODY = 65534
PROGRAM_FILE = "program.py"  # in the folder that a program starts in
KEEPERS = 2  # processes of ours that are counted as the user's
# protections that rest on a limit. Of the others the time has a second one outside, the filter of
# calls refuses queues, and of a core file only the name could be missed
RESTING = {
    resource.RLIMIT_AS: "memory", resource.RLIMIT_FSIZE: "disk", resource.RLIMIT_NPROC: "processes",
    resource.RLIMIT_NOFILE: "memory",
}  # fmt: skip
if sys.platform == "linux":
    RESTING[resource.RLIMIT_SIGPENDING] = "memory"


def confine(settings: dict[str, Any], close: list[int]) -> list[str]:
    """Confine this process and return the protections that are missing. `close`: files that only
    the confined process closes.

    Execution continues in a new process. This one becomes its keeper, which exits with its code.
    """
    linux, user = sys.platform == "linux", os.geteuid()
    # the keeper's root becomes the program's, where the folder is not found by its name
    beside = os.open(os.path.dirname(settings["folder"]), os.O_RDONLY)
    libc: Any = ctypes.CDLL(None, use_errno=True) if linux else None
    mounts = _space_of_mounts() if linux else None
    alone = linux and _enter_namespaces(libc)
    own_mounts = mounts is not None and _space_of_mounts() != mounts
    if linux:
        libc.prctl(DUMPABLE, 0, 0, 0, 0)  # others of this user may not look into our memory
    group = settings["group"] if alone else None
    if group is not None and not make_group(group, settings, KEEPERS):
        group = settings["group"] = None
    ready, report = os.pipe()
    reading_end, held = os.pipe()
    child = os.fork()  # a new space of processes begins with it
    if child:
        for file in (*close, report, reading_end):
            os.close(file)
        keep_program(child, ready, beside, settings)
    if group is not None and not enter_group(group):
        end_group(group)
        group = None
    for file in (ready, held, beside, settings["lifeline"]):
        os.close(file)
    missing, watched = list(PROTECTIONS), False
    if alone:
        libc.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        files = [*close, settings["control"]]
        grouped = group is not None
        missing, watched = _first(libc, settings, files, reading_end, report, grouped, own_mounts)
    else:
        os.write(report, b"0")
    os.close(report)
    os.close(reading_end)
    most = None  # per user: without namespaces the run's own processes would count
    if alone and "processes" not in missing:
        most = settings["processes"] + (KEEPERS if os.geteuid() == user else 0)
    if linux:
        libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _drop_capabilities(libc)
        libc.prctl(DUMPABLE, 0, 0, 0, 0)  # a change of the user has reset it
    missing = list(dict.fromkeys([*missing, *_limit(settings, most)]))
    return _fence(libc, settings, missing, watched, alone)


def _fence(
    libc: Any, settings: dict[str, Any], missing: list[str], watched: bool, alone: bool
) -> list[str]:
    """Refuse what the namespaces permit, and what they would prevent. Returns what is still
    missing."""
    linux = libc is not None
    if linux and "files" in missing:
        folders = [settings["folder"]]
        if restrict_files(libc, _needed(settings), folders, DEVICES):
            missing[missing.index("files")] = "names"
    if {"network", "files", "names"} & {*missing}:
        _guard(os.path.realpath(settings["folder"]))
    if not linux:
        return missing
    if not filter_calls(libc, watched, alone):
        return missing if "memory" in missing else [*missing, "memory"]
    return missing if alone else [name for name in missing if name in OF_MOUNTS]


def _first(
    libc: Any,
    settings: dict[str, Any],
    close: list[int],
    reading_end: int,
    report: int,
    grouped: bool,
    own_mounts: bool,
) -> tuple[list[str], bool]:
    """Become process 1, and continue in a child of it: the missing protections there, and whether
    the total memory is limited, by its control group or by the keeper. Without `own_mounts` nothing
    is mounted, since the run's process would see it."""
    missing, watched = ["files", "disk"], False
    if own_mounts:
        with suppress(OSError):
            watched = _own_root(libc, settings)
            missing = []
    # a group counts memory by itself; the keeper looks at it only without one
    os.write(report, b"1" if watched and not grouped else b"0")
    watched = watched or grouped
    os.setsid()  # a signal to the code's own group would reach the keeper
    program = os.fork()
    if program:
        for file in (*close, report):
            os.close(file)
        libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _drop_capabilities(libc)
        reap(program, reading_end)
    # a kernel that keeps less than Linux (gVisor's) may keep none of the processes' limit either
    if not _own_user(settings["folder"] if missing else None) or (missing and not _counted()):
        missing.append("processes")
    return missing, watched


def _space_of_mounts() -> str | None:
    """The name of this process's space of mounts; None where the kernel has none to tell. gVisor
    makes no new one when it is asked to, and reports no error."""
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:
        return None


def _enter_namespaces(libc: Any) -> bool:
    """Enter new namespaces, including a user namespace if not root, or a root without other users.
    False if they are not permitted."""
    flags = sum(SPACES.values())
    if os.geteuid() == 0:
        other_users = _other_users()
        if other_users and libc.unshare(flags) == 0:
            return True
        # a root without capabilities cannot name itself in a namespace of its own
        if not other_users and not _tried(lambda: _own_users(libc, 0)):
            return libc.unshare(flags) == 0
    return _own_users(libc, flags)


def _own_users(libc: Any, flags: int) -> bool:
    """Enter a namespace of users with this one alone, and others. OSError if it cannot be named."""
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(flags | USERS) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"),
                       ("gid_map", f"{gid} {gid} 1")):  # fmt: skip
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _own_root(libc: Any, settings: dict[str, Any]) -> bool:
    """Enter an in-memory file system of `written` bytes, with read-only mounts of everything Python
    needs.

    Return whether it has its own /proc, which not every container permits.
    """
    root = settings["folder"]
    os.umask(0o022)  # the user of the end must be able to read what is bound
    _checked(libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None))
    size = f"size={settings['written']},nr_inodes={MOST_FILES},mode=755".encode()
    _checked(libc.mount(b"tmpfs", root.encode(), b"tmpfs", 0, size))
    bound: list[str] = []
    for path in sorted({*_needed(settings), *DEVICES}):
        inside = any(path.startswith(f"{other}/") for other in bound)
        if not os.path.exists(path) or inside:
            continue
        target = root + path
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, mode=0o755, exist_ok=True)
        else:
            open(target, "w").close()
        _checked(libc.mount(path.encode(), target.encode(), None, BIND | RECURSIVE, None))
        _read_only(libc, target)
        bound.append(path)
    for path, target in LINKS.items():
        os.symlink(target, root + path)
    with open(root + ZERO_FILE, "wb") as zeros:  # of holes, which take no memory
        zeros.truncate(settings["written"])
    # where semaphores of several processes lie is a folder of its own
    for name, mode in (("tmp", 0o777), ("dev/shm", 0o777), ("proc", 0o755), ("outside", 0o700)):
        os.makedirs(f"{root}/{name}", exist_ok=True)
        os.chmod(f"{root}/{name}", mode)
    watched = libc.mount(b"proc", f"{root}/proc".encode(), b"proc", 0, None) == 0
    if watched:  # a root that stays root owns the files of /proc/sys, without any capability
        _read_only(libc, f"{root}/proc")
    _checked(libc.pivot_root(root.encode(), f"{root}/outside".encode()))
    os.chdir("/tmp")
    _checked(libc.umount2(b"/outside", DETACH))
    os.rmdir("/outside")
    settings["folder"] = "/tmp"
    return watched


def _needed(settings: dict[str, Any]) -> set[str]:
    """Folders and files of the interpreter, its packages and the system's libraries."""
    real = os.path.realpath
    needed = {*SYSTEM, sys.base_prefix, real(sys.base_prefix), *settings["paths"]}
    return needed | {sys.executable, real(sys.executable), os.path.join(sys.prefix, "pyvenv.cfg")}


def _read_only(libc: Any, target: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    flags = 0x8000  # with all that is mounted below
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _checked(libc.syscall(MOUNT_SETATTR, -100, target.encode(), flags, attributes, size))


def _own_user(folder: str | None) -> bool:
    """Change from root to an unused user, whose processes can be counted. False if impossible, or
    if that user could not read Python's own libraries.

    `folder`: where the program lies if it has no root of its own. It becomes this user's.
    """
    if os.geteuid() != 0:
        return True  # counted by the namespace of users
    if not _other_users():
        return _counted()
    libraries = [path for path in sys.path if os.path.isdir(path)]
    for uid in (1_000_000_000 + os.getppid() + os.getpid() + _nonce(), NOBODY):
        try:
            if folder is not None:
                if not _tried(functools.partial(_reads_as, uid, libraries)):
                    return False  # they may lie in root's own folder
                for path in (folder, f"{folder}/{PROGRAM_FILE}"):
                    os.chown(path, uid, uid)
            _become(uid)
        except OSError:
            continue
        return True
    return False


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _reads_as(uid: int, folders: list[str]) -> bool:
    _become(uid)
    return all(os.access(folder, os.R_OK | os.X_OK) for folder in folders)


@functools.cache  # asked first where /proc is there
def _other_users() -> bool:
    """Whether this namespace has an unused user to change to. In bubblewrap and in containers
    without root, root may be the only one."""
    with open("/proc/self/uid_map") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    return any(first <= NOBODY < first + count for first, _, count in ranges)


def _counted() -> bool:
    """Whether a limit on processes holds for this root, which is true unless it is the host's."""

    def refused() -> bool:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        try:
            os.fork()
        except OSError:
            return True
        return False

    return _tried(refused)


def _tried(attempt: Callable[[], bool]) -> bool:
    """The result of an attempt in a process of its own. False if it raises OSError."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if attempt() else 1)
        except OSError:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _nonce() -> int:
    return int.from_bytes(os.urandom(3), "little")


def _drop_capabilities(libc: Any) -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, of this process
    libc.capset(header, (ctypes.c_uint32 * 6)())


def _limit(settings: dict[str, Any], processes: int | None) -> list[str]:
    """Set the limits of this process and its children. Returns the protections that rest on one
    that the kernel does not have."""
    limits = {
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_CPU: int(settings["seconds"]) + 1,
        resource.RLIMIT_FSIZE: settings["written"],
        resource.RLIMIT_NOFILE: settings["files"],
        resource.RLIMIT_CORE: 0,
    }
    if processes is not None:
        limits[resource.RLIMIT_NPROC] = processes
    if sys.platform == "linux":
        limits[resource.RLIMIT_SIGPENDING] = MOST_PENDING
        limits[resource.RLIMIT_MSGQUEUE] = 0
    lost: list[str] = []
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):  # gVisor keeps none of some kinds
            if kind in RESTING and resource.getrlimit(kind) != (most, most):
                lost.append(RESTING[kind])
    return lost


REFUSED = (
    "socket.", "ctypes.", "subprocess.", "shutil.", "os.exec", "os.fork", "os.posix_spawn",
    "os.spawn", "os.startfile", "os.system", "os.kill", "os.remove", "os.rename", "os.rmdir",
    "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate", "os.chflags",
    "pty.", "signal.pthread_kill", "winreg.", "_winapi.", "os.utime", "os.setxattr",
    "os.removexattr",
)  # fmt: skip


def _guard(folder: str) -> None:
    """Refuse Python audit events that no namespace prevents. The hook cannot be removed."""
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    inside = folder + os.sep

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not allowed here")
        if event == "sqlite3.connect" and arguments[0] not in (":memory:", b":memory:"):
            event, arguments = "open", (arguments[0], "w", writes)
        if event == "open" and arguments[2] & writes and isinstance(arguments[0], (str, bytes)):
            name = os.fsdecode(arguments[0])
            # `os.open` has no mode, and its names may be relative to a folder that it does not say
            plain = arguments[1] is not None or os.path.isabs(name)
            path = os.path.realpath(name)
            if not plain or not path.startswith((inside, os.devnull)):
                raise PermissionError(f"{name} cannot be written here")

    sys.addaudithook(hook)
