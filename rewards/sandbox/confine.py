"""Take from this process what it does not need, before it runs code that nobody has read.

On Linux, where user namespaces are permitted (or we are root): no network, no sight of other
processes, and of the file system only the interpreter and the system's libraries, read-only; what
it starts ends with it. Elsewhere a hook on Python's own events refuses the same things, which
stops accidents and not an attack: ctypes-free native code could go past it. Limits of memory,
processor time, written bytes and open files hold on every POSIX system.
"""

import ctypes
import os
import resource
import signal
import sys
from typing import Any

SPACES = {"mounts": 0x20000, "ipc": 0x8000000, "processes": 0x20000000, "network": 0x40000000}
USERS = 0x10000000  # CLONE_NEWUSER
BIND, RECURSIVE, PRIVATE, DETACH = 0x1000, 0x4000, 0x40000, 2
MOUNT_SETATTR, READ_ONLY = 442, 1 | 2  # the call's number; MOUNT_ATTR_RDONLY and NOSUID
DIE_WITH_PARENT, DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38  # of prctl
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
PROTECTIONS = ["network", "files", "processes"]


def confine(settings: dict[str, Any], close: list[int]) -> list[str]:
    """What could not be taken away. `close` are files that only the confined process may hold.

    Where processes can be shut in, we go on as the first of a new world, and who waits outside ends
    as we end.
    """
    missing = list(PROTECTIONS)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if _shut_in(libc):
            missing = _inside(libc, settings, close)
        libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _drop_capabilities(libc)
        libc.prctl(DUMPABLE, 0, 0, 0, 0)  # others of this user may not look into our memory
    _limit(settings, "processes" not in missing)
    if "network" in missing or "files" in missing:
        _guard(os.path.realpath(settings["folder"]))
    return missing


def _shut_in(libc: Any) -> bool:
    """Own namespaces; of users too where we are not root."""
    flags = sum(SPACES.values())
    if os.geteuid() == 0 and libc.unshare(flags) == 0:
        return True
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(flags | USERS) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"),
                       ("gid_map", f"{gid} {gid} 1")):  # fmt: skip
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def _inside(libc: Any, settings: dict[str, Any], close: list[int]) -> list[str]:
    inner = os.fork()  # a new space of processes begins with the next one
    if inner:
        for file in close:
            os.close(file)
        _, status = os.waitpid(inner, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    missing = []
    try:
        _own_root(libc, settings)
    except OSError:
        missing = ["files"]
    if not _own_user():
        missing.append("processes")
    return missing


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _own_root(libc: Any, settings: dict[str, Any]) -> None:
    """A file system in memory, of `written` bytes, with what Python needs bound in read-only."""
    root = settings["folder"]
    os.umask(0o022)  # whoever we are in the end must find the way to what is bound
    _checked(libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None))
    size = f"size={settings['written']},mode=755".encode()
    _checked(libc.mount(b"tmpfs", root.encode(), b"tmpfs", 0, size))
    real = os.path.realpath
    needed = {*SYSTEM, *DEVICES, sys.base_prefix, real(sys.base_prefix), *settings["paths"]}
    bound: list[str] = []
    for path in sorted(needed):
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
    for name, mode in (("tmp", 0o777), ("proc", 0o755), ("outside", 0o700)):
        os.makedirs(f"{root}/{name}", exist_ok=True)
        os.chmod(f"{root}/{name}", mode)
    libc.mount(b"proc", f"{root}/proc".encode(), b"proc", 0, None)  # not everywhere, nor needed
    _checked(libc.pivot_root(root.encode(), f"{root}/outside".encode()))
    os.chdir("/tmp")
    _checked(libc.umount2(b"/outside", DETACH))
    os.rmdir("/outside")
    settings["folder"] = "/tmp"


def _read_only(libc: Any, target: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    flags = 0x8000  # with all that is mounted below
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _checked(libc.syscall(MOUNT_SETATTR, -100, target.encode(), flags, attributes, size))


def _own_user() -> bool:
    """From root to a user that nobody else is, whose processes can be counted. False if we stay."""
    if os.geteuid() != 0:
        return True  # counted by the namespace of users
    for uid in (1_000_000_000 + os.getppid() + os.getpid() + _nonce(), 65534):
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError:
            continue
        return True
    return False


def _nonce() -> int:
    return int.from_bytes(os.urandom(3), "little")


def _drop_capabilities(libc: Any) -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, of this process
    libc.capset(header, (ctypes.c_uint32 * 6)())


def _limit(settings: dict[str, Any], counted: bool) -> None:
    limits = {
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_CPU: int(settings["seconds"]) + 1,
        resource.RLIMIT_FSIZE: settings["written"],
        resource.RLIMIT_NOFILE: settings["files"],
        resource.RLIMIT_CORE: 0,
    }
    if counted:  # by user: elsewhere the run's own processes would count
        limits[resource.RLIMIT_NPROC] = settings["processes"]
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


REFUSED = (
    "socket.", "ctypes.", "subprocess.", "shutil.", "os.exec", "os.fork", "os.posix_spawn",
    "os.spawn", "os.startfile", "os.system", "os.kill", "os.remove", "os.rename", "os.rmdir",
    "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate", "os.chflags",
    "pty.", "signal.pthread_kill", "winreg.", "_winapi.",
)  # fmt: skip


def _guard(folder: str) -> None:
    """Refuse in Python what no namespace keeps us from. A hook cannot be taken off again."""
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    inside = folder + os.sep

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open" and arguments[2] & writes and isinstance(arguments[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith((inside, os.devnull)):
                raise PermissionError(f"{path} cannot be written here")

    sys.addaudithook(hook)
