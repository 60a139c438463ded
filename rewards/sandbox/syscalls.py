"""A seccomp filter: refused system calls fail with EPERM in this process and its children.

It refuses calls whose memory escapes the limits (System V and POSIX queues and shared memory,
in-memory files), new namespaces and mounts, calls that inspect other processes, and socket families
that no namespace confines. A process without namespaces of its own also cannot connect, nor signal,
start or become another process.
"""

import ctypes
import os
from typing import Any

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit number, column below
UNCOUNTED = {
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "unshare": (272, 97),
    "setns": (308, 268), "mount": (165, 40), "fsopen": (430, 430), "open_tree": (428, 428),
    "move_mount": (429, 429), "pivot_root": (155, 41), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
}  # fmt: skip
STARTING = {"fork": (57, None), "vfork": (58, None)}
REACHING = {
    "socket": (41, 198), "connect": (42, 203), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "prlimit64": (302, 261), "setpriority": (141, 140),
}  # fmt: skip
SOCKET, FAMILIES = (41, 198), (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink: they end in a namespace
CLONE, CLONE3 = (56, 220), 435
CLONE_NAMESPACES, CLONE_THREAD = 0x7E020000, 0x10000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of BPF
ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x50001, 0x50026
SET_SECCOMP, FILTER_MODE = 22, 2  # of prctl
X32 = 0x40000000  # x86's third set of numbers


class _Program(ctypes.Structure):
    _fields_ = [("size", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def filter_calls(libc: Any, processes: bool, alone: bool) -> bool:
    """Install the system-call filter; False if this machine or kernel does not support it.

    processes: other processes may be started (threads always). alone: namespaces isolate the
    process from all others, so it may use sockets and signals.
    """
    if os.uname().machine not in MACHINES:
        return False
    audit, column = MACHINES[os.uname().machine]
    refused = UNCOUNTED | ({} if processes else STARTING) | ({} if alone else REACHING)
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit), (RETURN, 0, 0, EPERM), (LOAD, 0, 0, 0)]
    if column == 0:
        steps += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, EPERM)]
    for numbers in refused.values():
        if numbers[column] is not None:
            steps += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, EPERM)]
    n = len(FAMILIES)  # of other families, such as AF_VSOCK, sockets would reach the host
    steps += [(EQUAL, 0, n + 3, SOCKET[column]), (LOAD, 0, 0, 16)]
    steps += [(EQUAL, n - place, 0, family) for place, family in enumerate(FAMILIES)]
    steps += [(RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)]
    steps += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ENOSYS)]  # the C library then uses clone
    steps += [(EQUAL, 1, 0, CLONE[column]), (RETURN, 0, 0, ALLOW)]
    steps += [(LOAD, 0, 0, 16), (ANY_BIT, 0, 1, CLONE_NAMESPACES), (RETURN, 0, 0, EPERM)]
    if not processes:
        steps += [(ANY_BIT, 1, 0, CLONE_THREAD), (RETURN, 0, 0, EPERM)]
    steps += [(RETURN, 0, 0, ALLOW)]
    code = b"".join(
        step.to_bytes(2, "little") + bytes((yes, no)) + value.to_bytes(4, "little")
        for step, yes, no, value in steps
    )
    program = _Program(len(steps), code)
    return libc.prctl(SET_SECCOMP, FILTER_MODE, ctypes.byref(program), 0, 0) == 0
