"""Freed memory of a run on the CPU stays with the process.

glibc gives freed memory back to the system, and every call of the network gets it again page by
page: 150,000 page faults in an iteration of 600 MB of activations.
"""

import ctypes
import os
import platform

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt in glibc's malloc.h
LARGEST_BLOCK = 32 * 2**20  # the most that glibc takes, and where its own rule ends: others go back


def keep_freed_memory() -> None:
    """Make the process keep freed blocks of up to 32 MiB.

    Do nothing without glibc, or if the user has set glibc's environment variables."""
    own = ("MALLOC_", "GLIBC_TUNABLES")
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(own) for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, LARGEST_BLOCK)  # alone, the next line would end glibc's own rule
    libc.mallopt(TRIM_THRESHOLD, -1)  # never
