"""Landlock (Linux 5.13 and later): which files this process and its children may open, where no
namespace can give them a file system of their own.

Names, sizes and times of other files stay visible, and their rights and times are left to the
system-call filter. A process of this kind also cannot look into the memory or the variables of
processes that are not.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

TYPE_CHECKING = False  # typing itself takes a tenth of a program's start
if TYPE_CHECKING:
    from typing import Any

CREATE_RULES, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # numbers of the calls on all machines
VERSION, BELOW_PATH = 1, 1  # ask for the version; the kind of rule that names a folder or file
EXECUTE, WRITE, READ, LIST, TRUNCATE = 1, 2, 4, 8, 1 << 14
MAKE = {"folder": 1 << 7, "file": 1 << 8}
REMOVE = 1 << 4 | 1 << 5
READ_RIGHTS = EXECUTE | READ | LIST
WRITE_RIGHTS = READ_RIGHTS | WRITE | TRUNCATE | REMOVE | MAKE["folder"] | MAKE["file"]
FILE_RIGHTS = EXECUTE | WRITE | READ | TRUNCATE  # the rights that a rule of one file may have
FIRST_VERSION = (1 << 13) - 1  # all rights that it knows
LATER_RIGHTS = {2: 1 << 13, 3: TRUNCATE, 5: 1 << 15}  # and those of later versions
BIND_AND_CONNECT = 3  # over TCP (version 4)
OTHER_PROCESSES = 3  # their abstract sockets and signals (version 6)


def restrict_files(
    libc: Any, read: Iterable[str], write: Iterable[str], devices: Iterable[str]
) -> bool:
    """Permit this process to read what lies in `read`, to change what lies in `write`, to use
    `devices` and its standard input and output, and nothing else. False if the kernel cannot."""
    version = libc.syscall(CREATE_RULES, None, 0, VERSION)
    if version < 1:
        return False
    supported = FIRST_VERSION | sum(
        right for since, right in LATER_RIGHTS.items() if version >= since
    )
    handled = [supported, BIND_AND_CONNECT, OTHER_PROCESSES][: 1 + (version >= 4) + (version >= 6)]
    attributes = (ctypes.c_uint64 * len(handled))(*handled)
    rules = libc.syscall(CREATE_RULES, attributes, ctypes.c_size_t(8 * len(handled)), 0)
    if rules < 0:
        return False
    try:
        for paths, rights in ((read, READ_RIGHTS), (write, WRITE_RIGHTS), (devices, READ | WRITE)):
            for path in paths:
                _permit_path(libc, rules, path, rights & supported)
        for file, right in ((0, READ), (1, WRITE | READ)):
            if stat.S_ISREG(os.fstat(file).st_mode):  # its name in /dev opens it again
                _permit(libc, rules, file, right)
        return libc.syscall(RESTRICT_SELF, rules, 0) == 0
    finally:
        os.close(rules)


def _permit_path(libc: Any, rules: int, path: str, rights: int) -> None:
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no rule
    try:
        folder = stat.S_ISDIR(os.fstat(file).st_mode)
        _permit(libc, rules, file, rights if folder else rights & FILE_RIGHTS)
    finally:
        os.close(file)


def _permit(libc: Any, rules: int, file: int, rights: int) -> None:
    rule = rights.to_bytes(8, "little") + file.to_bytes(4, "little")
    if libc.syscall(ADD_RULE, rules, BELOW_PATH, rule, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
