"""Errors that mean that there is no more memory. They are no fault of the model, its file or its
arguments, so a handler that says so of all that a library raises lets them pass first."""

import errno
import re

import torch

# messages of allocators that have no more memory: of torch, of CUDA's libraries and NCCL, of MPS;
# the last ones are of tensors that no machine could hold
NO_MORE = re.compile(
    r"DefaultCPUAllocator|not enough memory|out of memory|_ALLOC_FAILED|_ALLOCATION_FAILED"
    r"|failed to cuda (calloc|malloc)|cannot allocate memory|invalid buffer size"
    r"|storage size calculation overflowed|numel: integer multiplication overflow",
    re.IGNORECASE,
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, outside a reward."""
    if any(note.startswith(("in reward", "in judge")) for note in vars(error).get("__notes__", ())):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):  # of a mapped file, or a process that could not be started
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and NO_MORE.search(str(error)) is not None


def raise_memory(error: BaseException) -> None:
    """Raise an error again that means out of memory."""
    if out_of_memory(error):
        raise error


_BYTES = re.compile(r"tried to allocate (\d+) bytes", re.IGNORECASE)


def memory_reason(error: BaseException) -> str:
    """Words of an out-of-memory error, as a clause; of torch's CPU allocator the bytes that it was
    asked for, which follow its own place in the code."""
    words = str(error).strip() or type(error).__name__
    if (asked := _BYTES.search(words)) is not None:
        return f"tried to allocate {int(asked[1]) / 2**30:,.2f} GiB at once"
    return words.split(". ")[0].splitlines()[0][:200]
