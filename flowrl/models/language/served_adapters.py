"""Keeps a server's adapter at the weights in force: saved into a folder, loaded by its name.

Each process of a run has an adapter of its own there, so that processes need not wait for another.
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
from flowrl.models.language import lora
from flowrl.models.shards import local_shard
from rewards.serving.client import Client
from rewards.serving.requests import Patience

HASTY = Patience(timeout=30.0, tries=1)  # a server that is gone keeps nobody from ending


@dataclass
class Adapters:
    """`folder` is one that the server sees by the same name.

    client   where completions are asked for, and what is served is listed
    admin    where adapters are loaded and unloaded: vLLM has it below /v1, SGLang beside it
    prefix   what the name of an adapter is asked for with: SGLang wants `base:adapter`
    process  its number in the run
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
    _own: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def current(self) -> str:
        """The name to ask for: of the weights in force, loaded first where they are new.

        Whoever puts weights in force (an update, an average for an evaluation, a checkpoint) need
        not tell: they are compared with what was loaded last.
        """
        digest = fingerprint(self.model)
        if digest != self._digest:
            self.loaded, self._digest = self._load(), digest
        return f"{self.prefix}{self.loaded}"

    def lost(self) -> bool:
        """Whether the server is there and has the adapter no more: it was started anew. The next
        `current` loads it again."""
        with suppress(ValueError):  # nothing there: whoever asks for completions tells
            if self.loaded is not None and self.loaded not in served(self.client):
                self._digest = b""
        return self._digest == b""

    def close(self) -> None:
        """Nothing of this process stays loaded, nor in the folder."""
        self._sweep()
        self.loaded, self._digest = None, b""

    def _load(self) -> str:
        """The new adapter's name; former ones are unloaded and deleted. A name is never used twice:
        servers keep what they computed of a prompt by the name of the adapter."""
        self._count += 1
        name = f"{self._mine}-{self._own}-{self._count}"
        path = self.folder.absolute() / name
        lora.save_text_lora(self.model, path)
        try:
            self.admin.tell("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        except ValueError as error:
            if not self._has(name):  # it may, where an answer was late and it was told again
                raise UserError(
                    f"model.server.sync: {error}; the server must load adapters while it runs "
                    "(vLLM: --enable-lora, --max-lora-rank, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True) "
                    f"and see {path}; or set model.server.sync: none"
                ) from error
        self._sweep(but=name)
        return name

    def _has(self, name: str) -> bool:
        try:
            return name in served(self.client)
        except ValueError:
            return False

    @property
    def _mine(self) -> str:
        return f"flowrl-{self.process}"

    def _sweep(self, but: str | None = None) -> None:
        """Unload and delete this process's adapters, also what it left here when it was killed. The
        server may know one no more, or be gone, which the next request tells better."""
        for path in sorted(self.folder.glob(f"{self._mine}-*")):
            if path.name != but:
                with suppress(ValueError):
                    self.admin.tell("/unload_lora_adapter", {"lora_name": path.name}, HASTY)
                shutil.rmtree(path, ignore_errors=True)


def served(client: Client) -> list[str]:
    """Names of models and adapters. ValueError where no server answers."""
    listed = client.get("/models")
    rows = listed.get("data", []) if isinstance(listed, dict) else []
    return [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]


def fingerprint(model: Any) -> bytes:
    """Of the adapters' numbers. UserError where no process has all of them."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            if local_shard(parameter) is not parameter:
                raise UserError(
                    "model.server.sync: lora wants whole adapters, and FSDP2 shares them out; use "
                    "DDP, or set model.server.sync: none"
                )
            numbers = parameter.detach().cpu().contiguous().view(torch.uint8)
            digest.update(name.encode())
            digest.update(numbers.numpy().tobytes())
    return digest.digest()
