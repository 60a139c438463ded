"""Say who owns a server, so that no run samples from the weights of another.

A run that samples from a server keeps a lease: a file in flowrl's cache that names the run's folder
and is locked while its process lives. A run that replaces the server's weights needs the server for
itself. Weights that a killed run has left there have a name that begins with `flowrl-`.
"""

import fcntl
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.bounded_files import bounded_json
from flowrl.errors import UserError
from flowrl.json_text import json_text
from flowrl.paths import cache_folder
from rewards.serving.client import Client

MOST_LEASE = 2**16  # bytes
SENT_PREFIX = "flowrl-"  # of the names of all weights and adapters that flowrl sends
COMING_SUFFIX = "-coming"  # ends the name of weights that the server is about to read
LOCAL_URL = re.compile(r"https?://(localhost|127\.|\[::1\])")


@dataclass
class ServerOwner:
    """The lease of a run on a server.

    beside  client for the paths outside /v1
    name    the server's name of the base model
    run     the run's folder
    alone   whether the run replaces the server's weights
    main    whether this process holds the lease
    """

    beside: Client
    name: str
    run: Path
    alone: bool
    main: bool = True
    _file: int | None = field(default=None, repr=False)

    def take(self) -> None:
        """Take the lease. UserError if another run owns the server, or its weights are left
        there."""
        if not self.main or self._file is not None:
            return
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / f"{_digest(str(self.run.absolute()))}.json", os.O_RDWR | os.O_CREAT)
        try:
            _locked(file)
            self._refuse_others(folder)
            self._refuse_left(folder)
            text = json_text({"run": str(self.run.absolute()), "alone": self.alone})
            os.ftruncate(file, 0)
            os.pwrite(file, text.encode(), 0)
        except UserError:
            os.close(file)
            raise
        self._file = file

    def release(self, given_back: bool = True) -> None:
        """Give the lease back. `given_back`: the server has its own weights again; otherwise the
        lease stays, without its lock, and names the run that left them."""
        if self._file is None:
            return
        if given_back:
            os.ftruncate(self._file, 0)
        os.close(self._file)
        self._file = None

    def base(self) -> str | None:
        """Folder or name of the server's own weights, as the server names it."""
        with suppress(ValueError):
            listed = self.beside.get("/v1/models")
            rows = listed.get("data", []) if isinstance(listed, dict) else []
            roots = [row.get("root") for row in rows if _named(row, self.name)]
            return next((root for root in roots if isinstance(root, str)), None)
        return None

    def version(self) -> str | None:
        """The name of the weights that the server holds; None if it does not say."""
        with suppress(ValueError):
            answer = self.beside.get("/weight_info")
            name = answer.get("weight_version") if isinstance(answer, dict) else None
            return name if isinstance(name, str) else None
        return None

    def ours(self, version: str | None) -> bool:
        """Whether this run has sent the weights of that name."""
        sent = version is not None and version.startswith(SENT_PREFIX)
        return sent and (self.run / "served" / str(version).removesuffix(COMING_SUFFIX)).is_dir()

    def _folder(self) -> Path:
        host = socket.gethostname() if LOCAL_URL.match(self.beside.url) else ""
        return cache_folder() / "servers" / _digest(f"{host} {self.beside.url}")

    def _refuse_others(self, folder: Path) -> None:
        """UserError for a run that samples from the server now, if either needs it for itself."""
        for run, alone, lives in _leases(folder):
            if lives and run != str(self.run.absolute()) and (alone or self.alone):
                raise UserError(
                    f"model.server: {self.beside.url} is used by the run {run}, and "
                    f"{'that run' if alone else 'this one'} replaces its weights (sync: weights): "
                    "wait until it has ended, or start another server"
                )

    def _refuse_left(self, folder: Path) -> None:
        """UserError if the server says that it holds weights of another run."""
        version = self.version()
        if version is None or not version.startswith(SENT_PREFIX) or self.ours(version):
            return
        owners = [run for run, alone, _ in _leases(folder) if alone]
        owner = f"the run {owners[0]}, which did not end by itself" if owners else "another run"
        resumed = f"resume that run (flowrl train --resume {owners[0]}), " if owners else ""
        raise UserError(
            f"model.server: {self.beside.url} holds the weights {version} of {owner}: {resumed}"
            f"restart the server, or give it its own weights back: {self._commands()}"
        )

    def _commands(self) -> str:
        base = self.base() or "FOLDER_OF_THE_BASE_MODEL"
        reload = {"method": "reload_weights", "kwargs": {"weights_path": base}}
        steps = {
            "collective_rpc": reload, "reset_prefix_cache": {},
            "update_weight_version": {"new_version": "default"},
        }  # fmt: skip
        how = "curl -X POST -H 'Content-Type: application/json' -d"
        commands = [
            f"{how} '{json.dumps(body)}' {self.beside.url}/{at}" for at, body in steps.items()
        ]
        return "; ".join(commands)


def _leases(folder: Path) -> Iterator[tuple[str, bool, bool]]:
    """Run, whether it replaces weights, and whether its process lives, of each lease."""
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            lease: Any = bounded_json(path, MOST_LEASE)
            file = os.open(path, os.O_RDWR)
            try:
                free = _locked(file)
            finally:
                os.close(file)
            yield str(lease["run"]), bool(lease["alone"]), not free


def _locked(file: int) -> bool:
    """Lock a lease, which its process's end unlocks. False if another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody is known to live
        return True
    return True


def _named(row: Any, name: str) -> bool:
    return isinstance(row, dict) and row.get("id") == name


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
