"""Faults of the hub's cache on this machine: a repository's files that are gone, damaged or locked,
and a cache that cannot be written.

The hub's client calls each of them a missing file, network or repository. Here each one is a clause
that names the file or the folder, and what helps.
"""

import errno
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rewards.perception.reachable import (
    NO_DAMAGE,
    RIGHTS,
    chain_of,
    fault_of,
    is_absent,
    way_to_read,
)
from rewards.perception.weight_files import (
    LOADED_TEXTS,
    WEIGHT_SUFFIXES,
    check_file,
    check_json,
    check_shards,
    shard_index,
)

RepositoryKind = Literal["model", "dataset"]
_COMMIT = re.compile(r"[\w.-]+")
_WHOLE_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHECKED = (*LOADED_TEXTS, *WEIGHT_SUFFIXES, ".yaml")
_INDICES = ("model_index.json", "modular_model_index.json")
_MOST_INDEX = 2**20  # bytes
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITTEN = (*_FULL, errno.EROFS)
_OS_ERROR = re.compile(r"os error (\d+)")  # as libraries in Rust word an error of the system
_WEIGHTS = re.compile(  # that a loader reads by itself
    r"(?P<stem>model|pytorch_model|diffusion_pytorch_model|pytorch_lora_weights|adapter_model)"
    r"(-\d+-of-\d+)?\.(?P<suffix>safetensors|bin)"
)


@dataclass(frozen=True)
class CacheFault:
    """A fault of a repository in the hub's cache.

    words    a clause that names the file or the folder, and what helps
    fetched  whether the hub's client fetches what is gone by itself, if the hub answers
    """

    words: str
    fetched: bool = False


@dataclass(frozen=True)
class CachedRepository:
    """A repository's place in the hub's cache.

    file      of its files, the one that is read; None for those that a loader of models reads
    whole     whether all of its files are read
    revision  the branch, tag or commit that is read; None: the main branch
    """

    name: str
    kind: RepositoryKind = "model"
    file: str | None = None
    whole: bool = False
    revision: str | None = None

    @property
    def folder(self) -> Path:
        """Its folder, whether it exists or not."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        return Path(constants.HF_HUB_CACHE) / repo_folder_name(
            repo_id=self.name, repo_type=self.kind
        )

    @property
    def root(self) -> Path:
        """The folder of the whole cache."""
        return self.folder.parent

    def command(self, file: str = "", *, force: bool = False) -> str:
        """The command that downloads it, or one of its files; `force` for a file that is there."""
        of_kind = "" if self.kind == "model" else f"--repo-type {self.kind} "
        file, force_option = f" {file}" if file else "", " --force-download" if force else ""
        revision = "" if self.revision is None else f" --revision {self.revision}"
        return f"`hf download {of_kind}{self.name}{file}{revision}{force_option}`"

    def snapshot(self) -> Path | CacheFault | None:
        """The folder with the files of its revision; None if nothing of it is in the cache."""
        if _WHOLE_COMMIT.fullmatch(self.revision or ""):
            return self._of_commit(str(self.revision))
        ref = self.folder / "refs" / (self.revision or "main")
        for folder in (self.root, self.folder, ref.parent):
            if (fault := fault_of(folder)) is not None:
                return None if is_absent(fault) else self._locked(folder, fault)
        try:
            commit = ref.read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            return None if is_absent(error) else self._locked(ref, error)
        if not _COMMIT.fullmatch(commit):
            return CacheFault(f"{ref} names no commit: run {self.command()}", fetched=True)
        snapshot = self.folder / "snapshots" / commit
        if (fault := fault_of(snapshot)) is None:
            return snapshot
        if not is_absent(fault):
            return self._locked(snapshot, fault)
        if (self.folder / ".no_exist" / commit).is_dir():
            return None  # the hub was asked for files that it does not have, and for no other
        return CacheFault(
            f"{ref} names a snapshot that is not there, since its download did not finish or it "
            f"was removed: run {self.command()}",
            fetched=True,
        )

    def _of_commit(self, commit: str) -> Path | CacheFault | None:
        """The same of a commit, which no file of the cache need name."""
        snapshots = self.folder / "snapshots"
        for folder in (self.root, self.folder, snapshots, snapshots / commit):
            if (fault := fault_of(folder)) is not None:
                return None if is_absent(fault) else self._locked(folder, fault)
        return snapshots / commit

    def fault(self) -> CacheFault | None:
        """The fault of its files, those first that the hub's client does not fetch again;
        None without a fault, and if nothing of it is in the cache."""
        try:
            snapshot = self.snapshot()
            return self._worst(snapshot) if isinstance(snapshot, Path) else snapshot
        except OSError as error:  # it vanishes, or its disk fails, while it is looked at
            return self._unread(_file(error) or self.folder, error)

    def _worst(self, snapshot: Path) -> CacheFault | None:
        faults = list[CacheFault]()
        for file in self._read(snapshot, faults):
            if (fault := self._fault_of_file(file, snapshot)) is not None:
                faults.append(fault)
        return min(faults, key=lambda fault: fault.fetched, default=None)

    def _read(self, snapshot: Path, faults: list[CacheFault]) -> Iterator[Path]:
        """The files of a snapshot that are read. `faults` gets those of its folders."""
        if self.file is not None:
            if os.path.lexists(snapshot / self.file):
                yield snapshot / self.file
            return
        if self.whole:
            yield from sorted(path for path in snapshot.rglob("*") if not path.is_dir())
            return
        for folder in (snapshot, *_parts(snapshot)):
            try:
                names = sorted(os.listdir(folder))
            except OSError as error:
                if not is_absent(error):
                    faults.append(self._locked(folder, error))
                continue
            yield from (folder / name for name in names if Path(name).suffix in LOADED_TEXTS)
            weights = _loaded_weights(names)
            yield from (folder / name for name in weights)
            if (fault := self._fault_of_shards(folder, weights)) is not None:
                faults.append(fault)

    def _fault_of_shards(self, folder: Path, weights: list[str]) -> CacheFault | None:
        if not all((folder / name).exists() for name in weights):
            return None  # the check of its file says so
        try:
            check_shards(folder, weights)
        except ValueError as error:
            index = next(folder.glob("*.index.json"), None)
            whole = index is not None and set(shard_index(index).values()) <= set(weights)
            if whole:
                return self._damaged(str(error), "")
            return CacheFault(f"{error} (run {self.command()})", fetched=True)
        return None

    def _fault_of_file(self, file: Path, snapshot: Path) -> CacheFault | None:
        inside = file.relative_to(snapshot).as_posix()
        if (fault := fault_of(file)) is not None:
            if not is_absent(fault):
                return self._locked(file, fault)
            blob = f" to {os.readlink(file)}" if file.is_symlink() else ""
            return CacheFault(
                f"{file} is a link{blob}, which is not there: run {self.command(inside)}",
                fetched=True,
            )
        if not file.is_file() or file.suffix not in _CHECKED:
            return None
        try:
            check_file(file)
            if file.suffix == ".json":
                check_json(file)
        except OSError as error:
            return self._unread(file, error)
        except ValueError as error:
            if isinstance(error.__cause__, OSError):
                return self._unread(file, error.__cause__)
            return self._damaged(str(error), inside)
        return None

    def _unread(self, file: Path, fault: OSError) -> CacheFault:
        return CacheFault(self.lost(file), True) if is_absent(fault) else self._locked(file, fault)

    def lost(self, file: Path) -> str:
        """A clause on a file or folder that vanished."""
        return (
            f"{file} is no longer there: it was moved, removed or unmounted; run "
            f"{self.command()}, or set HF_HOME to the cache's present place"
        )

    def _damaged(self, sentence: str, file: str) -> CacheFault:
        """`hf download` leaves a file that is there as it is."""
        return CacheFault(f"{sentence}; in the hub's cache, {self.command(file, force=True)} does")

    def _locked(self, file: Path, fault: OSError) -> CacheFault:
        reason = (fault.strerror or str(fault)).lower()
        return CacheFault(
            f"{file} cannot be read ({reason}): {way_to_read(file, fault)}, or set HF_HOME to "
            "another folder for the hub's cache"
        )

    def raised(self, error: BaseException) -> str | None:
        """A clause on an error of reading or writing the cache among those that led to this one;
        None without one."""
        for fault in chain_of(error):
            number, file = _number(fault), _file(fault)
            if file is not None and not self._holds(file):
                continue
            if number in _NOT_WRITTEN or (number in RIGHTS and file and _only_written(file)):
                reason = os.strerror(number).lower()
                way = "free space on its disk" if number in _FULL else "change its rights"
                at = "" if file is None else f" at {file}"
                return (
                    f"the hub's cache {self.root} cannot be written{at} ({reason}): {way}, or set "
                    "HF_HOME to another folder for it"
                )
            if file is not None and isinstance(fault, OSError) and number in NO_DAMAGE:
                return self._locked(file, fault).words
        return None

    def _holds(self, file: Path) -> bool:
        roots = (self.root, *_beside())
        return any(file.is_relative_to(root) for path in roots for root in (path, path.resolve()))


def _beside() -> Iterator[Path]:
    """The caches of the hub's libraries beside that of its client."""
    from huggingface_hub import constants

    yield Path(constants.HF_HOME)
    if (datasets := sys.modules.get("datasets")) is not None:
        yield Path(datasets.config.HF_DATASETS_CACHE)


def _parts(snapshot: Path) -> Iterator[Path]:
    """The folders of a pipeline's components in its snapshot."""
    for name in _INDICES:
        if not (snapshot / name).is_file():
            continue
        try:
            content = (snapshot / name).read_bytes()
            index = json.loads(content) if len(content) <= _MOST_INDEX else None
        except (OSError, ValueError, RecursionError):
            continue  # the check of this file tells it
        names = index if isinstance(index, dict) else ()
        yield from (snapshot / part for part in names if (snapshot / part).is_dir())
        return


def _loaded_weights(names: list[str]) -> list[str]:
    """The files of weights among `names` in the form that a loader prefers."""
    matches = [match for name in names if (match := _WEIGHTS.fullmatch(name))]
    preferred = min((match["suffix"] != "safetensors" for match in matches), default=False)
    return [match[0] for match in matches if (match["suffix"] != "safetensors") == preferred]


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = _OS_ERROR.search(str(error))
    return None if match is None else int(match[1])


def _file(error: BaseException) -> Path | None:
    name = error.filename if isinstance(error, OSError) else None
    return Path(os.fsdecode(name)) if isinstance(name, str | bytes | os.PathLike) else None


def _only_written(file: Path) -> bool:
    """Whether an error of rights was one of writing: the file is absent, or can be read."""
    fault = fault_of(file)
    if fault is not None:
        return is_absent(fault)
    try:
        if file.is_file():
            file.open("rb").close()
    except OSError:
        return False
    return True
