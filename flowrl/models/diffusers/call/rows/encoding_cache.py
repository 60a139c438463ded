"""A cache of prompt encodings across iterations, on the CPU or in files."""

import fcntl
import pickle
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flowrl.models.diffusers.call.inputs.columns import TEXT_COLUMNS, Extra
from flowrl.models.diffusers.call.inputs.conditioning import Conditioning
from flowrl.models.diffusers.call.rows.row_calls import Encode

KeptWhere = Literal["cpu", "disk"]
MIB = 2**20
PREFIX, LOCK = "flowrl-encodings-", "lock"  # of temporary folders, and a file in each


class EncodingCache:
    """The most recently used encodings of single prompts, up to `most` bytes.

    Every prompt is encoded alone, so that its bits do not depend on the rest of the batch, on the
    order, or on the cache's content. Rows with their own images are not cached. Files are in a
    temporary folder, which is removed when the run ends, or at the next start if a run was killed.
    """

    def __init__(self, where: KeptWhere, most: int) -> None:
        self.where, self.most, self.bytes = where, most, 0
        self._kept: OrderedDict[tuple[Any, ...], CachedEncoding] = OrderedDict()
        self._folder: Path | None = None
        self._lock: IO[str] | None = None
        self._written = 0
        if where == "disk":
            self._folder, self._lock = new_folder()
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def encode(
        self,
        encode: Encode,
        prompts: Sequence[str],
        extras: Sequence[Extra],
        device: torch.device,
        size: tuple[Any, ...] = (),
    ) -> Conditioning:
        """Encode prompts, each alone or from the cache; the result is on `device`. Encodings may
        depend on the `size` of the samples."""
        row_extras = list(extras) if extras else [{}] * len(prompts)
        pairs = zip(prompts, row_extras, strict=True)
        rows = [self._row(encode, *row, size, bool(extras)) for row in pairs]
        return moved(Conditioning.cat(rows), device)

    def _row(
        self, encode: Encode, prompt: str, extra: Extra, size: tuple[Any, ...], extras: bool
    ) -> Conditioning:
        key = encoding_key(prompt, extra)
        key = None if key is None else (*size, *key)
        if key is not None and key in self._kept:
            self._kept.move_to_end(key)
            if (cached := self._kept[key].read()) is not None:
                return cached
            self.bytes -= self._kept.pop(key).size  # its file is damaged
        conditioning = moved(encode([prompt], [extra] if extras else ()), torch.device("cpu"))
        if key is not None:
            self._keep(key, conditioning)
        return conditioning

    def _keep(self, key: tuple[Any, ...], conditioning: Conditioning) -> None:
        size = byte_count(conditioning)
        while self._kept and self.bytes + size > self.most:
            _, old = self._kept.popitem(last=False)
            self.bytes -= old.size
            if old.file is not None:
                old.file.unlink(missing_ok=True)
        if size > self.most:
            return
        cached = CachedEncoding(conditioning, size)
        if self._folder is not None:
            self._written += 1
            cached = cached.written(self._folder / f"{self._written}.pt")
        self._kept[key], self.bytes = cached, self.bytes + size


@dataclass(frozen=True)
class CachedEncoding:
    """Encoding of one prompt; an encoding stored in a file has no values in memory."""

    encoding: Conditioning
    size: int
    file: Path | None = None

    def written(self, file: Path) -> "CachedEncoding":
        """Move the values to a file. OSError if it cannot be written, for example on a full
        disk."""
        plain = self.encoding.plain
        try:
            torch.save((self.encoding.values, None if plain is None else plain.values), file)
        except RuntimeError as error:  # torch's own writer says it so
            reason = "cannot be written: is its disk full? (model.encodings keeps files there)"
            raise OSError(f"{file} {reason}") from error
        bare = None if plain is None else replace(plain, values=())
        return CachedEncoding(replace(self.encoding, values=(), plain=bare), self.size, file)

    def read(self) -> Conditioning | None:
        """Read the whole encoding; None if its file is damaged or missing."""
        if self.file is None:
            return self.encoding
        try:
            values, plain = torch.load(self.file, weights_only=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):
            return None
        bare = self.encoding.plain
        whole = None if bare is None else replace(bare, values=plain)
        return replace(self.encoding, values=values, plain=whole)


def new_folder() -> tuple[Path, IO[str]]:
    """Create a temporary folder with a locked file, and remove folders of killed runs, which are no
    longer locked."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError), (old / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        file = (folder / LOCK).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another start is just removing it
            file.close()
            continue
        except OSError:  # without locks nobody removes it
            return folder, file
        if (folder / LOCK).exists():  # else another start has just removed it
            return folder, file
        file.close()


def encoding_key(prompt: str, extra: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Key of everything that an encoding depends on; None if that includes an image."""
    if all(TEXT_COLUMNS.fullmatch(name) for name in extra):
        return (prompt, *sorted(extra.items()))
    return None


def byte_count(conditioning: Conditioning) -> int:
    """Number of bytes in an encoding's tensors."""
    plain = 0 if conditioning.plain is None else byte_count(conditioning.plain)
    leaves = [leaf for leaf in tree_leaves(conditioning.values) if isinstance(leaf, Tensor)]
    return plain + sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def moved(conditioning: Conditioning, device: torch.device) -> Conditioning:
    """The same encoding with its tensors on a device."""

    def on_device(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    plain = None if conditioning.plain is None else moved(conditioning.plain, device)
    return replace(conditioning, values=tree_map(on_device, conditioning.values), plain=plain)
