"""Rights of files as a user without privileges meets them, in this process."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_VERSION = 0x20080522  # of the kernel's interface with 64 bits
_OVERRIDE, _SEARCH = 1, 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


@contextmanager
def rights_hold() -> Iterator[None]:
    """Root passes over the rights of files; in the body this thread, and what it starts, does not.
    Skips the test where the system cannot say so."""
    if os.geteuid() != 0:
        yield
        return
    libc, header = ctypes.CDLL(None, use_errno=True), _Header(_VERSION, 0)
    sets = (_Sets * 2)()
    if libc.capget(ctypes.byref(header), sets):
        pytest.skip("this system has no capabilities")
    before = sets[0].effective
    sets[0].effective = before & ~(1 << _OVERRIDE | 1 << _SEARCH)
    if libc.capset(ctypes.byref(header), sets):
        pytest.skip("capabilities cannot be laid down here")
    try:
        yield
    finally:
        sets[0].effective = before
        assert not libc.capset(ctypes.byref(header), sets)
