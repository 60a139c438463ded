"""A control group (cgroup v2) for one program, in a part of the hierarchy that is delegated to this
user, as systemd does for a user's own services.

The kernel then counts memory, with files in memory and page tables, and processes, and ends all of
the group at once. Without one the keeper looks at the resident memory of all processes.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

TYPE_CHECKING = False  # typing itself takes a tenth of a program's start
if TYPE_CHECKING:
    from typing import Any

CGROUPS, OWN_CGROUP = "/sys/fs/cgroup", "/proc/self/cgroup"
NEEDED = {"memory", "pids"}
DELEGATED = ("user.delegate", "trusted.delegate")  # attributes that systemd sets
PREFIX = "flowrl-"
KEEPER_BYTES = 2**24  # bytes for process 1, which is ours
REMOVE_SECONDS = 2.0  # until the kernel has taken the last process out


def delegated_folder(
    root: str = CGROUPS, membership: str = OWN_CGROUP, user: int | None = None
) -> str | None:
    """A folder of the hierarchy where groups can be made that count memory and processes, at or
    above this process's own group. None if there is none."""
    user = os.geteuid() if user is None else user
    try:
        with open(membership) as file:
            place = next(line[3:].strip() for line in file if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    folder = os.path.normpath(root + place)
    while folder.startswith(root):
        # a process changes groups only below a folder whose processes its user may move
        if not os.access(f"{folder}/cgroup.procs", os.W_OK):
            return None
        if (
            _enabled(folder) >= NEEDED
            and os.access(folder, os.W_OK)
            and (user or _delegated(folder, root))
        ):
            return folder
        folder = os.path.dirname(folder)
    return None


def _enabled(folder: str) -> set[str]:
    """Controllers of the groups in a folder."""
    try:
        with open(f"{folder}/cgroup.subtree_control") as file:
            return set(file.read().split())
    except OSError:
        return set()


def _delegated(folder: str, root: str) -> bool:
    """Whether root was given this part: systemd owns the others where it runs."""
    if not os.path.isdir("/run/systemd/system"):
        return True
    while folder.startswith(root):
        for name in DELEGATED:
            with suppress(OSError):
                if os.getxattr(folder, name) == b"1":
                    return True
        folder = os.path.dirname(folder)
    return False


def group_name(folder: str, nonce: str) -> str:
    """The path of a new group of this process. Groups of processes that have ended are removed."""
    for name in os.listdir(folder):
        owner = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            with suppress(OSError):  # it is not empty
                os.rmdir(f"{folder}/{name}")
    return f"{folder}/{PREFIX}{os.getpid()}-{nonce}"


def make_group(group: str, settings: dict[str, Any], keepers: int) -> bool:
    """Make a group with the limits of a program. False, and no group, if the kernel refuses."""
    limits = {
        "memory.max": settings["memory"] + settings["written"] + KEEPER_BYTES,
        "memory.oom.group": 1,
        "pids.max": settings["processes"] + keepers,
    }
    try:
        os.mkdir(group)
        for name, value in limits.items():
            _write(group, name, value)
    except OSError:
        with suppress(OSError):
            os.rmdir(group)
        return False
    with suppress(OSError):  # a kernel without swap has no such file
        _write(group, "memory.swap.max", 0)
    return True


def enter_group(group: str) -> bool:
    """Move this process, and with it all that it starts. False if the kernel refuses."""
    try:
        _write(group, "cgroup.procs", 0)
    except OSError:
        return False
    return True


def end_group(group: str) -> None:
    """Kill everything in a group, and remove it."""
    with suppress(OSError):  # kernels before 5.14: the end of process 1 ends all
        _write(group, "cgroup.kill", 1)
    until = time.monotonic() + REMOVE_SECONDS
    while os.path.isdir(group) and time.monotonic() < until:
        try:
            os.rmdir(group)
        except OSError:
            time.sleep(0.01)


def _write(group: str, name: str, value: int) -> None:
    with open(f"{group}/{name}", "w") as file:
        file.write(str(value))
