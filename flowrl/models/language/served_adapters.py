"""Keeps a server's adapter at the current weights: saved into a folder, loaded by name.

Each process of a run has its own adapter on the server, so that none waits for another.
"""

import hashlib
import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowrl.errors import UserError
from flowrl.models.adapters import save_adapters
from flowrl.models.shards import local_shard
from rewards.serving.client import Client
from rewards.serving.requests import Patience

HASTY = Patience(timeout=30.0, tries=1)  # a server that is down must not delay the end of a run


@dataclass
class Adapters:
    """Adapters on a server, which must see `folder` under the same path.

    client   serves completions, and the list of models and adapters
    admin    loads and unloads adapters: below /v1 in vLLM, beside it in SGLang
    prefix   precedes an adapter's name in requests: SGLang wants `base:adapter`
    process  the number of this process in the run
    """

    model: Any
    folder: Path
    client: Client
    admin: Client
    prefix: str = ""
    process: int = 0
    loaded: str | None = None
    _digest: bytes = b""
    _count: int = 0
    _unique: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def current(self) -> str:
        """Adapter name of the current weights; new weights are loaded first.

        Code that changes weights (an update, an average for an evaluation, a checkpoint) need not
        announce it: weights are compared with those loaded last.
        """
        digest = fingerprint(self.model)
        if digest != self._digest:
            self.loaded, self._digest = self._load(), digest
        return f"{self.prefix}{self.loaded}"

    def lost(self) -> bool:
        """Whether the server answers but lost the adapter in a restart. The next `current` loads
        it again."""
        with suppress(ValueError):  # no server: the request for completions raises the error
            if self.loaded is not None and self.loaded not in served(self.client):
                self._digest = b""
        return self._digest == b""

    def close(self) -> None:
        """Unload and delete all adapters of this process."""
        self._sweep()
        self.loaded, self._digest = None, b""

    def _load(self) -> str:
        """Load the current weights and return the new adapter's name; delete former ones. A name is
        never used twice, since servers cache prompts by adapter name."""
        self._count += 1
        name = f"{self._stem}-{self._unique}-{self._count}"
        path = self.folder.absolute() / name
        save_adapters(self.model, path)
        try:
            self.admin.tell("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        except ValueError as error:
            if not self._has(name):  # a retry after a late answer fails, although it is loaded
                raise UserError(
                    f"model.server.sync: {error}; the server must be able to load adapters "
                    "while it runs (vLLM: --enable-lora, --max-lora-rank, "
                    f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True) and to see {path}; or set "
                    "model.server.sync: none"
                ) from error
        self._sweep(but=name)
        return name

    def _has(self, name: str) -> bool:
        try:
            return name in served(self.client)
        except ValueError:
            return False

    @property
    def _stem(self) -> str:
        return f"flowrl-{self.process}"

    def _sweep(self, but: str | None = None) -> None:
        """Unload and delete this process's adapters, including those of a killed run. Errors are
        ignored: the server may have none of them, or be down, which the next request reports."""
        for path in sorted(self.folder.glob(f"{self._stem}-*")):
            if path.name != but:
                with suppress(ValueError):
                    self.admin.tell("/unload_lora_adapter", {"lora_name": path.name}, HASTY)
                shutil.rmtree(path, ignore_errors=True)


def served(client: Client) -> list[str]:
    """Names of served models and adapters. ValueError if no server answers."""
    listed = client.get("/models")
    rows = listed.get("data", []) if isinstance(listed, dict) else []
    return [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]


def fingerprint(model: Any) -> bytes:
    """Digest of the adapters' values. UserError if no process has all of them."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            if local_shard(parameter) is not parameter:
                raise UserError(
                    "model.server.sync: lora needs whole adapters, but FSDP2 shards them; use "
                    "DDP, or set model.server.sync: none"
                )
            numbers = parameter.detach().cpu().contiguous().view(torch.uint8)
            digest.update(name.encode())
            digest.update(numbers.numpy().tobytes())
    return digest.digest()
