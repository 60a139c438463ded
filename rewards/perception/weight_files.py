"""Read files of weights, and tell damaged ones before they are read: pointers and pages in a file's
place, files of another form, and downloads that were cut off."""

import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from rewards.perception.contents import FIRST_BYTES, file_unlike_its_name, unlike_its_name

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
_TEXTS = (".json", ".txt", ".model", ".jinja")  # what a loader reads beside weights
_PARTS = r"(-\d+-of-\d+)?"
_LOADED = tuple(  # the first that a folder has is the one that transformers reads
    re.compile(rf"{name}{_PARTS}\.{suffix}")
    for name, suffix in (("model", "safetensors"), ("pytorch_model", "bin"))
)
_AGAIN = "download it again"
READ_ERRORS = (SafetensorError, UnpicklingError, RuntimeError, EOFError)  # of readers of weights


def safetensors_header(file: Path) -> dict[str, Any] | None:
    """The header of a safetensors file; None if it has none."""
    with file.open("rb") as opened:
        begin = opened.read(8)
        length = int.from_bytes(begin, "little")
        if len(begin) < 8 or length > file.stat().st_size - 8:
            return None
        try:
            found = json.loads(opened.read(length))
        except ValueError:
            return None
    return found if isinstance(found, dict) else None


def damage_of(file: Path) -> str:
    """Describe the damage of a file of weights as a clause with the fix; empty if its first bytes,
    and the header of safetensors, are those of a whole file. OSError if it cannot be read."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        begin = opened.read(FIRST_BYTES)
    if (what := unlike_its_name(file.name, begin)) is not None:
        return what
    if not size:
        return f"is empty: {_AGAIN}"
    if file.suffix == ".gguf" and not begin.startswith(b"GGUF"):
        return f"is not a GGUF file: {_AGAIN}"
    if file.suffix != ".safetensors":
        return ""
    header = safetensors_header(file)
    if header is None:
        return f"is not a safetensors file, or is cut off: {_AGAIN}"
    try:
        ends = [header[name]["data_offsets"][1] for name in header if name != "__metadata__"]
        whole = 8 + int.from_bytes(begin[:8], "little") + max(ends, default=0)
    except (KeyError, TypeError, IndexError):
        return f"is damaged: {_AGAIN}"
    return "" if whole == size else f"has {size} bytes instead of {whole}: {_AGAIN}"


def check_file(file: Path) -> None:
    """ValueError for a file, of weights or another one, that is damaged as far as its beginning
    shows."""
    try:
        what = damage_of(file) if file.suffix in WEIGHT_SUFFIXES else file_unlike_its_name(file)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    if what:
        raise ValueError(f"{file} cannot be read: it {what}")


def check_texts_beside(folder: Path) -> None:
    """ValueError for a configuration or vocabulary in the folder itself that is not what its name
    says. Its weights may be pointers: some models are read without them."""
    for file in sorted(folder.iterdir()):
        if file.suffix in _TEXTS and file.is_file():
            check_file(file)


def check_loaded_weights(folder: Path) -> None:
    """ValueError for damaged weights of a transformers folder, among those that `from_pretrained`
    reads."""
    names = sorted(file.name for file in folder.iterdir())
    for form in _LOADED:
        if loaded := [name for name in names if form.fullmatch(name)]:
            for name in loaded:
                check_file(folder / name)
            return


def stored_in(who: str, file: Path) -> Any:
    """Read what a safetensors or torch file holds: a mapping of tensors, or what `torch.save` was
    given. Nothing but tensors and plain containers is read. ValueError, which begins with `who`, if
    the file is damaged."""
    from safetensors.torch import load_file

    try:
        check_file(file)
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from error
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        mapped = zipfile.is_zipfile(file)  # the form before torch 1.6 cannot be mapped
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except READ_ERRORS as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"{who}: {file} cannot be read: {why}; {_AGAIN}") from error


def weights_of_file(who: str, file: Path, inside: str = "model") -> dict[str, Tensor]:
    """Read the tensors of a safetensors or torch file; from a torch file, those under the key
    `inside` if present.

    ValueError if it is damaged or holds anything but tensors.
    """
    state = stored_in(who, file)
    if file.suffix != ".safetensors" and isinstance(state, Mapping):
        state = state.get(inside, state)
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{who}: {file} does not hold tensors")
    return dict(state)
