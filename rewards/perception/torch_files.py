"""Files of `torch.save` by strangers: what is in them, before torch reads them.

Such a file is a zip archive of a pickle and of tensors' bytes. torch's own reader of weights runs
no code, but it unpacks what is compressed and makes what the pickle asks for, of any size.
`torch.save` compresses nothing and asks for tensors in plain containers, so anything else is
refused.
"""

import pickletools
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pickle import UnpicklingError
from typing import IO, Any

import torch
from torch import Tensor

# what readers of such files raise
TORCH_ERRORS = (
    RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError,
    OverflowError, UnpicklingError, AssertionError, MemoryError, OSError, zipfile.BadZipFile,
)  # fmt: skip
MOST_PICKLE = 2**26  # bytes: it has names and shapes, and no tensor's values
MOST_DIRECTORY = 2**26  # bytes: half a million tensors
_PICKLE, _OLDER = b"\x80", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9"  # of torch before 1.6
_ZIP, _ZIP_END, _LARGE_END = b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06"
_COMMENT = 2**16  # bytes at most behind the end of a zip's directory
# functions and classes that make more than they are given
_MAKERS = {
    ("builtins", "bytearray"),
    ("__builtin__", "bytearray"),
    ("torch._utils", "_rebuild_wrapper_subclass"),
}


def torch_damage(opened: IO[bytes], size: int) -> str:
    """A clause on what is wrong with a file of `torch.save`; empty if nothing is seen. Of an
    archive, reads the directory and the pickle, not the tensors; a file of another beginning is
    left to its reader."""
    opened.seek(0)
    begin = opened.read(2**12)
    if not any(begin):
        return "is filled with zeros"
    if begin.startswith(_PICKLE) and not begin.startswith(_OLDER):
        return "is a pickle, not a file of torch.save"
    if not begin.startswith(_ZIP):
        return ""
    try:
        if (directory := _directory(opened, size)) > MOST_DIRECTORY:
            return f"has a directory of {directory} bytes, more than {MOST_DIRECTORY}"
        with zipfile.ZipFile(opened) as archive:
            return _archive_damage(archive, size)
    except (*TORCH_ERRORS, NotImplementedError, struct.error) as error:
        return f"is cut off or damaged ({' '.join(str(error).split())[:100]})"


def _directory(opened: IO[bytes], size: int) -> int:
    """Number of bytes of a zip archive's directory; ValueError without its end."""
    tail = min(size, _COMMENT + 22 + 20 + 56)
    opened.seek(size - tail)
    end = opened.read(tail)
    place = end.rfind(_ZIP_END)
    if place < 0:
        raise ValueError("the archive has no end")
    (number,) = struct.unpack_from("<I", end, place + 12)
    if number == 2**32 - 1:  # the form of large archives has its own end before
        place = end.rfind(_LARGE_END)
        if place < 0:
            raise ValueError("the archive has no end")
        (number,) = struct.unpack_from("<Q", end, place + 40)
    return number


def _archive_damage(archive: zipfile.ZipFile, size: int) -> str:
    parts = archive.infolist()
    if any("/code/" in part.filename for part in parts):
        return "is a TorchScript program, not a file of torch.save"
    packed = next((part.filename for part in parts if part.compress_type), None)
    if packed is not None:
        return f"has a compressed part ({packed[:80]}), which torch.save does not write"
    if sum(part.file_size for part in parts) > size:
        return "has parts that are larger than itself"
    pickled = next((part for part in parts if part.filename.endswith("/data.pkl")), None)
    if pickled is None:
        return "is a zip archive without data.pkl, so not a file of torch.save"
    if pickled.file_size > MOST_PICKLE:
        return f"has a data.pkl of {pickled.file_size} bytes, more than {MOST_PICKLE}"
    asked = _asks_for(archive.read(pickled))
    return "" if asked is None else f"asks for {asked} beside tensors"


def _asks_for(pickle: bytes) -> str | None:
    """The name in a pickle of something that could make more than the file holds; None for tensors
    in plain containers. torch itself refuses what is none of its own."""
    strings = list[str]()
    for operation, argument, _ in pickletools.genops(pickle):
        named: tuple[str, str] | None = None
        if operation.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            named = module, name
        elif operation.name == "STACK_GLOBAL" and len(strings) > 1:
            named = strings[-2], strings[-1]
        elif isinstance(argument, str):
            strings = [*strings[-1:], argument]
        if named in _MAKERS:
            return ".".join(named)
    return None


def check_within(stored: Any, size: int) -> None:
    """ValueError for tensors that hold more than a file of this many bytes."""
    storages = dict[int, int]()
    for tensor in _tensors(stored):
        if tensor.layout is not torch.strided:
            raise ValueError(f"a tensor of layout {tensor.layout}")
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        if tensor.numel() * tensor.element_size() > storage.nbytes():
            raise ValueError(f"a tensor of {tensor.numel()} numbers, which the file does not hold")
    if sum(storages.values()) > size:
        raise ValueError("its tensors are larger than itself")


def _tensors(stored: Any) -> Iterator[Tensor]:
    left, seen = [stored], set[int]()
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))  # a container may hold itself
            left += value.values() if isinstance(value, Mapping) else value
