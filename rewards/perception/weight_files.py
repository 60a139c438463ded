"""Read files of weights, and tell damaged ones before they are read: pointers and pages in a file's
place, files of another form, downloads that were cut off, and headers that do not fit their file.

Anybody may have written a file. A header is read within a limit, a torch file only if nothing in it
is compressed or asks for more than tensors, and a tensor never reaches beyond its file.
"""

import json
import re
import stat
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rewards.perception.contents import FIRST_BYTES, file_unlike_its_name, unlike_its_name
from rewards.perception.gguf_files import gguf_damage
from rewards.perception.reachable import DOWNLOAD_AGAIN, reachable, way_to_read
from rewards.perception.torch_files import TORCH_ERRORS, check_within, torch_damage

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
MOST_HEADER = 2**25  # bytes of a safetensors header: a quarter of a million tensors
_MOST_TEXT = 2**26  # bytes of a configuration or vocabulary
_ZERO_TAIL = 2**23  # bytes: a shorter end of zeros may be a layer's
_LOOKS = 64  # blocks that are read of such an end
_LOOK = 4096  # bytes
LOADED_TEXTS = (".json", ".txt", ".model", ".jinja")  # what a loader reads beside weights
_PARTS = r"(-\d+-of-\d+)?"
_OBJECTS = re.compile(r"(.+_)?config\.json|tokenizer\.json|special_tokens_map\.json")
_LOADED = tuple(  # the first that a folder has is the one that transformers reads
    re.compile(rf"{name}{_PARTS}\.{suffix}")
    for name, suffix in (("model", "safetensors"), ("pytorch_model", "bin"))
)
_SHARD = re.compile(r"(?P<stem>.+)-\d+-of-\d+\.(?P<suffix>safetensors|bin)")
# of readers of weights; a library's own checks of shapes and settings raise the last ones
READ_ERRORS = (
    SafetensorError,
    UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
)


def safetensors_header(file: Path) -> dict[str, Any] | None:
    """The header of a safetensors file; None if it has none, or one of more than MOST_HEADER
    bytes. OSError if the file cannot be read."""
    with file.open("rb") as opened:
        begin = opened.read(8)
        length = int.from_bytes(begin, "little")
        if len(begin) < 8 or length > min(file.stat().st_size - 8, MOST_HEADER):
            return None
        try:
            header = json.loads(opened.read(length))
        except (ValueError, RecursionError):
            return None
    return header if isinstance(header, dict) else None


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a whole safetensors file's tensors, from its header; empty without one."""
    header = safetensors_header(file) or {}
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def damage_of(file: Path) -> str:
    """Describe the damage of a file of weights as a clause with the fix; empty if its first bytes,
    its header and its size are those of a whole file. OSError if it cannot be read."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        return f"is {kind}, not a file: put the file in its place"
    size = status.st_size
    with file.open("rb") as opened:
        begin = opened.read(FIRST_BYTES)
        if (damage := unlike_its_name(file.name, begin)) is not None:
            return damage
        if not size:
            return f"is empty: {DOWNLOAD_AGAIN}"
        if file.suffix == ".safetensors":
            damage = _safetensors_damage(file, opened, size)
        elif file.suffix == ".gguf":
            damage = gguf_damage(opened, size)
        elif file.suffix in TORCH_SUFFIXES:
            damage = torch_damage(opened, size)
    return f"{damage}: {DOWNLOAD_AGAIN}" if damage else ""


def _safetensors_damage(file: Path, opened: IO[bytes], size: int) -> str:
    """A clause on what is wrong with a safetensors file; empty if nothing is seen. The library's
    own reader has the last word on names, types, shapes and places of tensors."""
    opened.seek(0)
    length = int.from_bytes(opened.read(8), "little")
    if length > MOST_HEADER and length <= size - 8:
        return f"has a header of {length} bytes, more than {MOST_HEADER}"
    header = safetensors_header(file)
    if header is None:
        return "is not a safetensors file, or is cut off"
    ends = [_end(entry) for name, entry in header.items() if name != "__metadata__"]
    if None in ends:
        return "is damaged: its header does not say where its tensors are"
    whole = 8 + length + max((end for end in ends if end is not None), default=0)
    if whole != size:
        return f"has {size} bytes instead of {whole}"
    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OverflowError) as error:
        return f"is damaged: its header does not fit its tensors ({_short(error)})"
    if _ends_in_zeros(opened, 8 + length, size):
        return "ends in zeros, as a download that was not finished does"
    return ""


def _end(entry: Any) -> int | None:
    """The place at which a tensor of a header ends, in bytes; None if the entry does not say it."""
    offsets = entry.get("data_offsets") if isinstance(entry, Mapping) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or type(offsets[1]) is not int:
        return None
    return offsets[1]


def _ends_in_zeros(opened: IO[bytes], begin: int, size: int) -> bool:
    """Whether the last eighth of a file's data is zeros, as far as some of its blocks show.
    Programs that download reserve a file's size first."""
    tail = (size - begin) // 8
    if tail < _ZERO_TAIL:
        return False
    for i in range(_LOOKS):
        opened.seek(size - tail + i * (tail - _LOOK) // (_LOOKS - 1))
        if any(opened.read(_LOOK)):
            return False
    return True


def check_shards(folder: Path, files: Sequence[str]) -> None:
    """ValueError for shards without the index that says which tensor is where, for an index that
    names a file which the folder lacks, or a tensor that its file lacks, and for a shard of another
    index. `files`: the names of a model's weights, which are one file or shards."""
    shards = {match[0]: match for name in files if (match := _SHARD.fullmatch(name))}
    if not shards or len(shards) < len(files):  # one file, which a loader prefers to shards
        return
    first = next(iter(shards.values()))
    index = f"{first['stem']}.{first['suffix']}.index.json"
    if not (folder / index).is_file():
        raise ValueError(
            f"{folder} has {first[0]}, but no {index}, which says where each tensor is: "
            + DOWNLOAD_AGAIN
        )
    listed = shard_index(folder / index)
    named = set(listed.values())
    if lacking := sorted(named - {path.name for path in folder.iterdir()}):
        raise ValueError(
            f"{folder} lacks {', '.join(lacking[:3])}, which {index} names: {DOWNLOAD_AGAIN}"
        )
    if unnamed := sorted(set(shards) - named):
        raise ValueError(
            f"{folder} has {unnamed[0]}, which {index} does not name: remove it if it is another "
            "model's, or download the folder again"
        )
    for name in sorted(named) if first["suffix"] == "safetensors" else ():
        inside = tensor_shapes(folder / name).keys()
        absent = sorted({tensor for tensor, file in listed.items() if file == name} - inside)
        if absent:
            raise ValueError(
                f"{folder / name} lacks {absent[0]}, which {index} says is in it: {DOWNLOAD_AGAIN}"
            )


def shard_index(file: Path) -> dict[str, str]:
    """The file of each tensor, by an index of shards. ValueError, which names the file, if it is
    damaged or names a file outside of its folder."""
    try:
        if file.stat().st_size > MOST_HEADER:
            raise ValueError(f"more than {MOST_HEADER} bytes")
        index_content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} cannot be read ({_reason(error)}): {way_to_read(file, error)}"
        ) from error
    listed = index_content.get("weight_map") if isinstance(index_content, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{file} names no weights (weight_map): {DOWNLOAD_AGAIN}")
    for name in listed.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(
                f"{file} names {name!r:.80}, which is no file beside it: {DOWNLOAD_AGAIN}"
            )
    return listed


def misfit(file: Path, model: Mapping[str, Tensor]) -> str:
    """A clause on how the tensors of a safetensors file differ in shape or kind from a model's of
    the same names; empty if they do not, and for a file with other names, which a
    loader converts. The model may be on torch's meta device."""
    header = safetensors_header(file) or {}
    header.pop("__metadata__", None)
    if not header.keys() <= model.keys():
        return ""
    for name, entry in header.items():
        parameter = model[name]
        if list(parameter.shape) != entry["shape"]:
            return (
                f"has {name} of shape {entry['shape']}, but the model's is {list(parameter.shape)}"
            )
        if parameter.is_floating_point() and not entry["dtype"].startswith(("F", "BF")):
            return f"has {name} as {entry['dtype']}, but the model's are floating-point numbers"
    return ""


def adapter_damage(file: Path) -> str:
    """A clause on what is wrong with the tensors of a whole safetensors file of adapters, by its
    header, with the fix: none at all, half of a product, or no floating-point numbers.
    Empty if nothing is seen; tensors with other names than adapters' are left to their reader."""
    header = safetensors_header(file) or {}
    header.pop("__metadata__", None)
    if not header:
        return f"holds no tensors: {DOWNLOAD_AGAIN}"
    for name, entry in header.items():
        other = other_half(name)
        if other is not None and other not in header:
            return f"lacks {other}: {DOWNLOAD_AGAIN}"
        if other is not None and not entry["dtype"].startswith(("F", "BF")):
            return (
                f"has {name} as {entry['dtype']}, not as floating-point numbers: {DOWNLOAD_AGAIN}"
            )
    return ""


def other_half(key: str) -> str | None:
    """The name of a product's other matrix; None for another tensor. Of a matrix whose other one is
    missing, diffusers leaves the other one without values."""
    for a, b in (("lora_A", "lora_B"), ("lora_down", "lora_up"), ("lora.down", "lora.up")):
        for one, other in ((a, b), (b, a)):
            if key.endswith(f"{one}.weight"):
                return f"{key.removesuffix(f'{one}.weight')}{other}.weight"
    return None


def absent(folder: Path, model: Mapping[str, Tensor]) -> list[str]:
    """Names of a model's weights that a folder's safetensors files lack; empty for files with other
    names than the model's, which a loader converts, and without such files."""
    files = list(folder.glob("*.safetensors"))
    stored = {name for file in files for name in tensor_shapes(file)}
    return sorted(model.keys() - stored) if files and stored <= model.keys() else []


def _reason(error: BaseException) -> str:
    """Why a file cannot be read, without its name."""
    return (error.strerror if isinstance(error, OSError) else None) or _short(error)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def check_file(file: Path) -> None:
    """ValueError for a file, of weights or another one, that is damaged as far as its beginning
    shows."""
    try:
        damage = damage_of(file) if file.suffix in WEIGHT_SUFFIXES else file_unlike_its_name(file)
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read ({_reason(error)}): {way_to_read(file, error)}"
        ) from error
    if damage:
        raise ValueError(f"{file} cannot be read: it {damage}")


def check_texts_beside(folder: Path) -> None:
    """ValueError for a configuration or vocabulary in the folder itself that is not what its name
    says, or is no JSON although it is called so. Its weights may be pointers: some models are read
    without them."""
    for file in sorted(folder.iterdir()):
        if file.suffix in LOADED_TEXTS and file.is_file():
            check_file(file)
            if file.suffix == ".json":
                check_json(file)


def check_json(file: Path) -> None:
    """ValueError for a file that is no JSON, or not of the form that its name promises."""
    size = file.stat().st_size
    if size > _MOST_TEXT:
        raise ValueError(f"{file} cannot be read: it has {size} bytes, more than {_MOST_TEXT}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} cannot be read ({_reason(error)}): {way_to_read(file, error)}"
        ) from error
    if _OBJECTS.fullmatch(file.name) and not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a JSON object: {DOWNLOAD_AGAIN}")
    if file.name == "tokenizer.json" and not content:
        raise ValueError(f"{file} is empty: {DOWNLOAD_AGAIN}")


def check_loaded_weights(folder: Path) -> None:
    """ValueError for damaged weights of a transformers folder, among those that `from_pretrained`
    reads."""
    names = sorted(file.name for file in folder.iterdir())
    for form in _LOADED:
        if loaded := [name for name in names if form.fullmatch(name)]:
            for name in loaded:
                check_file(folder / name)
            check_shards(folder, loaded)
            return


def stored_in(reward: str, file: Path) -> Any:
    """Read what a safetensors or torch file holds: a mapping of tensors, or what `torch.save` was
    given. Nothing but tensors and plain containers is read. ValueError, which begins with `reward`,
    if the file is damaged."""
    from safetensors.torch import load_file

    with reachable(reward, file):
        try:
            check_file(file)
        except ValueError as error:
            raise ValueError(f"{reward}: {error}") from error
        try:
            if file.suffix == ".safetensors":
                return load_file(file)
            mapped = zipfile.is_zipfile(file)  # the form before torch 1.6 cannot be mapped
            stored = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
            check_within(stored, file.stat().st_size)
            return stored
        except (SafetensorError, *TORCH_ERRORS) as error:
            raise ValueError(
                f"{reward}: {file} cannot be read: {_short(error)}; {DOWNLOAD_AGAIN}"
            ) from error


def weights_of_file(reward: str, file: Path, inside: str = "model") -> dict[str, Tensor]:
    """Read the tensors of a safetensors or torch file; from a torch file, those under the key
    `inside` if present.

    ValueError if it is damaged or holds anything but tensors.
    """
    state = stored_in(reward, file)
    if file.suffix != ".safetensors" and isinstance(state, Mapping):
        state = state.get(inside, state)
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{reward}: {file} does not hold tensors")
    return dict(state)
