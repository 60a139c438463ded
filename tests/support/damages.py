"""Damages of files of weights, of configurations and of a run's own files, by their form."""

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], object]


def parts(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its data."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put(file: Path, header: Any, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def first(header: dict[str, Any]) -> str:
    return next(name for name in header if name != "__metadata__")


def changed(file: Path, change: Callable[[dict[str, Any], str], object]) -> None:
    """A file whose header's first entry is changed."""
    header, data = parts(file)
    change(header, first(header))
    put(file, header, data)


def _overlap(header: dict[str, Any], name: str) -> None:
    other = next(each for each in header if each not in ("__metadata__", name))
    header[other] = dict(header[name])


def _tensors(file: Path, change: Callable[[dict[str, Any], str], object]) -> None:
    """A whole file with other tensors."""
    header, _ = parts(file)
    tensors = load_file(file)
    change(tensors, sorted(tensors)[0])
    save_file(tensors, file, metadata=header.get("__metadata__"))


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


ANY: dict[str, Damage] = {  # of any file of weights
    "cut": lambda f: f.write_bytes(f.read_bytes()[:-9]),
    "half": lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]),
    "emptied": lambda f: f.write_bytes(b""),
    "zeros": lambda f: f.write_bytes(bytes(f.stat().st_size)),
    "a folder": _folder,
    "a pipe": _pipe,
}
HEADERS: dict[str, Damage] = {  # of safetensors
    "absurd length": lambda f: put(f, *parts(f), length=2**62),
    "broken JSON": lambda f: put(f, b"{" * 64, parts(f)[1]),
    "nested": lambda f: put(f, b"[" * 100_000, b""),
    "a list": lambda f: put(f, [1, 2], b""),
    "beyond the file": lambda f: changed(
        f, lambda h, n: h[n].update(data_offsets=[0, 2**50], shape=[2**48])
    ),
    "overlapping": lambda f: changed(f, _overlap),
    "negative": lambda f: changed(f, lambda h, n: h[n].update(shape=[-1])),
    "no shape": lambda f: changed(f, lambda h, n: h[n].update(shape="x")),
    "no place": lambda f: changed(f, lambda h, n: h[n].pop("data_offsets")),
    "unknown type": lambda f: changed(f, lambda h, n: h[n].update(dtype="X9")),
    "a pickle": lambda f: f.write_bytes(pickle.dumps({"a": list(range(99))})),
    "a torch file": lambda f: torch.save({"a": torch.zeros(3)}, f),
}
MISFITS: dict[str, Damage] = {  # whole files of safetensors with other tensors
    "another shape": lambda f: _tensors(
        f, lambda t, n: t.update({n: torch.zeros([k + 1 for k in t[n].shape])})
    ),
    "whole numbers": lambda f: _tensors(
        f, lambda t, _: t.update({n: v.to(torch.int64) for n, v in t.items()})
    ),
    "a tensor less": lambda f: _tensors(f, lambda t, n: t.pop(n)),
    "no tensors": lambda f: save_file({}, f, metadata={"format": "pt"}),
}


def _zip(file: Path, change: Callable[[dict[str, bytes]], object], packed: bool = False) -> None:
    """A torch file with other parts."""
    with zipfile.ZipFile(file) as old:
        inside = {name: old.read(name) for name in old.namelist()}
    change(inside)
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", kind) as new:
        for name, data in inside.items():
            new.writestr(name, data)


class _Large:
    """What asks for a thousand gigabytes when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (10**12,)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


def _repeated() -> torch.Tensor:
    return torch.zeros(1).expand(2**40)


TORCH: dict[str, Damage] = {  # of what `torch.save` writes
    "packed": lambda f: _zip(f, lambda _: None, packed=True),
    "a part less": lambda f: _zip(
        f, lambda parts: parts.pop(next(name for name in parts if "/data/" in name), None)
    ),
    "no pickle": lambda f: _zip(
        f, lambda parts: parts.pop(next(name for name in parts if name.endswith("data.pkl")))
    ),
    "asks for memory": lambda f: torch.save({"a": _Large()}, f),
    "repeats a number": lambda f: torch.save({"a": _repeated()}, f),
    "code": lambda f: torch.save({"a": _Code()}, f),
    "a pickle": lambda f: f.write_bytes(pickle.dumps({"a": 1})),
}
TEXTS: dict[str, Damage] = {  # of JSON
    "emptied": lambda f: f.write_bytes(b""),
    "zeros": lambda f: f.write_bytes(bytes(60)),
    "half": lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]),
    "nested": lambda f: f.write_text("[" * 100_000),
    "nested objects": lambda f: f.write_text('{"a":' * 100_000),
    "a list": lambda f: f.write_text("[]"),
    "no number": lambda f: f.write_text('{"a": ' + "9" * 6000 + "}"),
    "no text": lambda f: f.write_bytes(b'{"a": "\xff"}'),
    "a pickle": lambda f: f.write_bytes(pickle.dumps({"a": 1})),
}
