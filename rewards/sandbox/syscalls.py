"""A seccomp filter: which system calls this process and its children may make.

Calls that are not named here fail with ENOSYS, as on a kernel that does not have them; libraries
then do without. Among them are those whose memory no limit counts (asynchronous input and output,
inotify, io_uring) and those that newer kernels bring. Refused by name, with EPERM: calls whose
memory escapes the limits (System V and POSIX queues and shared memory, in-memory files), new
namespaces and mounts, calls that inspect other processes, and socket families that no namespace
confines. Of mappings, memory that is shared without a file is refused, since its pages stay while
no process has them mapped and so counts them, and so are huge pages, which are the host's. A
process without namespaces of its own also cannot connect, nor signal, start, become or schedule
another process, nor change a file by its name alone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

TYPE_CHECKING = False  # typing itself takes a tenth of a program's start
if TYPE_CHECKING:
    from typing import Any

Instruction = tuple[int, int, int, int]
"""An instruction of the filter: its code, the steps to skip if true and if false, and a value."""

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
    "prlimit64": (302, 261), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "fchownat": (260, 54), "lchown": (94, None),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "mknod": (133, None), "mknodat": (259, 33), "truncate": (76, 45),
}  # fmt: skip
PERMITTED = {
    "accept": (43, 202), "accept4": (288, 242), "access": (21, None), "alarm": (37, None),
    "arch_prctl": (158, None), "bind": (49, 200), "brk": (12, 214), "cachestat": (451, 451),
    "capget": (125, 90), "chdir": (80, 49), "chmod": (90, None), "chown": (92, None),
    "clock_getres": (229, 114), "clock_gettime": (228, 113), "clock_nanosleep": (230, 115),
    "close": (3, 57), "close_range": (436, 436), "connect": (42, 203),
    "copy_file_range": (326, 285), "creat": (85, None), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24), "epoll_create": (213, None), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
    "epoll_wait": (232, None), "eventfd": (284, None), "eventfd2": (290, 19), "execve": (59, 221),
    "execveat": (322, 281), "exit": (60, 93), "exit_group": (231, 94), "faccessat": (269, 48),
    "faccessat2": (439, 439), "fadvise64": (221, 223), "fallocate": (285, 47), "fchdir": (81, 50),
    "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "fchown": (93, 55),
    "fchownat": (260, 54), "fcntl": (72, 25), "fdatasync": (75, 83), "fgetxattr": (193, 10),
    "flistxattr": (196, 13), "flock": (73, 32), "fork": (57, None), "fstat": (5, 80),
    "fstatfs": (138, 44), "fsync": (74, 82), "ftruncate": (77, 46), "futex": (202, 98),
    "futex_requeue": (456, 456), "futex_wait": (455, 455), "futex_waitv": (449, 449),
    "futex_wake": (454, 454), "futimesat": (261, None), "get_mempolicy": (239, 236),
    "get_robust_list": (274, 100), "getcpu": (309, 168), "getcwd": (79, 17),
    "getdents": (78, None), "getdents64": (217, 61), "getegid": (108, 177), "geteuid": (107, 175),
    "getgid": (104, 176), "getgroups": (115, 158), "getitimer": (36, 102),
    "getpeername": (52, 205), "getpgid": (121, 155), "getpgrp": (111, None), "getpid": (39, 172),
    "getppid": (110, 173), "getpriority": (140, 141), "getrandom": (318, 278),
    "getresgid": (120, 150), "getresuid": (118, 148), "getrlimit": (97, 163),
    "getrusage": (98, 165), "getsid": (124, 156), "getsockname": (51, 204),
    "getsockopt": (55, 209), "gettid": (186, 178), "gettimeofday": (96, 169),
    "getuid": (102, 174), "getxattr": (191, 8), "ioctl": (16, 29), "kill": (62, 129),
    "lchown": (94, None), "lgetxattr": (192, 9), "link": (86, None), "linkat": (265, 37),
    "listen": (50, 201), "listxattr": (194, 11), "llistxattr": (195, 12), "lseek": (8, 62),
    "lstat": (6, None), "madvise": (28, 233), "map_shadow_stack": (453, 453),
    "membarrier": (324, 283), "mincore": (27, 232), "mkdir": (83, None), "mkdirat": (258, 34),
    "mknod": (133, None), "mknodat": (259, 33), "mlock": (149, 228), "mlock2": (325, 284),
    "mlockall": (151, 230), "mmap": (9, 222), "mprotect": (10, 226), "mremap": (25, 216),
    "mseal": (462, 462), "msync": (26, 227), "munlock": (150, 229), "munlockall": (152, 231),
    "munmap": (11, 215), "nanosleep": (35, 101), "newfstatat": (262, 79), "open": (2, None),
    "openat": (257, 56), "openat2": (437, 437), "pause": (34, None), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pipe": (22, None), "pipe2": (293, 59),
    "pkey_alloc": (330, 289), "pkey_free": (331, 290), "pkey_mprotect": (329, 288),
    "poll": (7, None), "ppoll": (271, 73), "prctl": (157, 167), "pread64": (17, 67),
    "preadv": (295, 69), "preadv2": (327, 286), "prlimit64": (302, 261), "pselect6": (270, 72),
    "pwrite64": (18, 68), "pwritev": (296, 70), "pwritev2": (328, 287), "read": (0, 63),
    "readahead": (187, 213), "readlink": (89, None), "readlinkat": (267, 78), "readv": (19, 65),
    "recvfrom": (45, 207), "recvmmsg": (299, 243), "recvmsg": (47, 212), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "restart_syscall": (219, 128),
    "rmdir": (84, None), "rseq": (334, 293), "rt_sigaction": (13, 134),
    "rt_sigpending": (127, 136), "rt_sigprocmask": (14, 135), "rt_sigqueueinfo": (129, 138),
    "rt_sigreturn": (15, 139), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "rt_tgsigqueueinfo": (297, 240), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "sched_getaffinity": (204, 123),
    "sched_getattr": (315, 275), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_rr_get_interval": (148, 127), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_yield": (24, 124), "select": (23, None), "sendfile": (40, 71), "sendmmsg": (307, 269),
    "sendmsg": (46, 211), "sendto": (44, 206), "set_robust_list": (273, 99),
    "set_tid_address": (218, 96), "setfsgid": (123, 152), "setfsuid": (122, 151),
    "setgid": (106, 144), "setgroups": (116, 159), "setitimer": (38, 103), "setpgid": (109, 154),
    "setpriority": (141, 140), "setregid": (114, 143), "setresgid": (119, 149),
    "setresuid": (117, 147), "setreuid": (113, 145), "setrlimit": (160, 164),
    "setsid": (112, 157), "setsockopt": (54, 208), "setuid": (105, 146), "shutdown": (48, 210),
    "sigaltstack": (131, 132), "signalfd": (282, None), "signalfd4": (289, 74),
    "socketpair": (53, 199), "stat": (4, None), "statfs": (137, 43), "statx": (332, 291),
    "symlink": (88, None), "symlinkat": (266, 36), "sync_file_range": (277, 84),
    "sysinfo": (99, 179), "tgkill": (234, 131), "time": (201, None), "timer_create": (222, 107),
    "timer_delete": (226, 111), "timer_getoverrun": (225, 109), "timer_gettime": (224, 108),
    "timer_settime": (223, 110), "timerfd_create": (283, 85), "timerfd_gettime": (287, 87),
    "timerfd_settime": (286, 86), "times": (100, 153), "tkill": (200, 130), "truncate": (76, 45),
    "umask": (95, 166), "uname": (63, 160), "unlink": (87, None), "unlinkat": (263, 35),
    "utime": (132, None), "utimensat": (280, 88), "utimes": (235, None), "vfork": (58, None),
    "wait4": (61, 260), "waitid": (247, 95), "write": (1, 64), "writev": (20, 66),
}  # fmt: skip
SOCKET, FAMILIES = (41, 198), (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink: they end in a namespace
CLONE = (56, 220)  # clone3, whose flags lie in memory, is unknown: the C library then uses clone
CLONE_NAMESPACES, CLONE_THREAD = 0x7E020000, 0x10000
MMAP = (9, 222)
SHARED, ANONYMOUS, HUGE = 1, 0x20, 0x40000  # flags of a mapping
LOAD, EQUAL, ABOVE, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06  # of BPF
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
    steps: list[Instruction] = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, audit),
        (RETURN, 0, 0, EPERM),
        (LOAD, 0, 0, 0),
    ]
    if column == 0:
        steps += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, EPERM)]
    for numbers in refused.values():
        if numbers[column] is not None:
            steps += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, EPERM)]
    n = len(FAMILIES)  # of other families, such as AF_VSOCK, sockets would reach the host
    steps += [(EQUAL, 0, n + 3, SOCKET[column]), (LOAD, 0, 0, 16)]
    steps += [(EQUAL, n - place, 0, family) for place, family in enumerate(FAMILIES)]
    steps += [(RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)]
    steps += _clone_steps(CLONE[column], processes)
    steps += _mapping_steps(MMAP[column])
    for first, last in _ranges(number[column] for number in PERMITTED.values()):
        steps += [(AT_LEAST, 0, 2, first), (ABOVE, 1, 0, last), (RETURN, 0, 0, ALLOW)]
    steps += [(RETURN, 0, 0, ENOSYS)]
    code = b"".join(
        step.to_bytes(2, "little") + bytes((yes, no)) + value.to_bytes(4, "little")
        for step, yes, no, value in steps
    )
    program = _Program(len(steps), code)
    return libc.prctl(SET_SECCOMP, FILTER_MODE, ctypes.byref(program), 0, 0) == 0


def _clone_steps(clone: int, processes: bool) -> list[Instruction]:
    """Threads, and processes if they are permitted, but no namespaces."""
    body: list[Instruction] = [
        (LOAD, 0, 0, 16),
        (ANY_BIT, 0, 1, CLONE_NAMESPACES),
        (RETURN, 0, 0, EPERM),
    ]
    if not processes:
        body += [(ANY_BIT, 1, 0, CLONE_THREAD), (RETURN, 0, 0, EPERM)]
    body += [(RETURN, 0, 0, ALLOW)]
    return [(EQUAL, 0, len(body), clone), *body]


def _mapping_steps(mmap: int) -> list[Instruction]:
    """Mappings of files, and private memory in pages of the usual size."""
    body: list[Instruction] = [
        (LOAD, 0, 0, 40),  # the fourth argument
        (ANY_BIT, 2, 0, HUGE),
        (ANY_BIT, 0, 2, ANONYMOUS),
        (ANY_BIT, 0, 1, SHARED),
        (RETURN, 0, 0, EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    return [(EQUAL, 0, len(body), mmap), *body]


def _ranges(numbers: Iterable[int | None]) -> list[tuple[int, int]]:
    """The first and the last number of each row of consecutive numbers; None is left out."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(number for number in numbers if number is not None):
        if ranges and number <= ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ranges
