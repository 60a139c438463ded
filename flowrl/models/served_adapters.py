"""Keeps a server's adapter at the weights in force: saved into a folder, loaded by its name.

Each process of a run has an adapter of its own there, so that processes need not wait for another.
"""

import hashlib
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowrl.errors import UserError
from flowrl.models import text_lora
from flowrl.processes.sharding import local
from rewards.client import Client


@dataclass
class Adapters:
    """`folder` is one that the server sees by the same name.

    admin   where adapters are loaded and unloaded: vLLM has it below /v1, SGLang beside it
    prefix  what the name of an adapter is asked for with: SGLang wants `base:adapter`
    """

    model: Any
    folder: Path
    admin: Client
    prefix: str = ""
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

    def _load(self) -> str:
        """The new adapter's name; the former one is unloaded and deleted."""
        self._count += 1
        name, former = f"flowrl-{self._own}-{self._count}", self.loaded
        path = self.folder.absolute() / name
        text_lora.save(self.model, path)
        try:
            self.admin.tell("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
            if former is not None:
                self.admin.tell("/unload_lora_adapter", {"lora_name": former})
        except ValueError as error:
            raise UserError(
                f"model.server.sync: {error}; the server must load adapters while it runs (vLLM: "
                "--enable-lora, --max-lora-rank, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True) and see "
                f"{path}; or set model.server.sync: none"
            ) from error
        if former is not None:
            shutil.rmtree(self.folder / former, ignore_errors=True)
        return name


def fingerprint(model: Any) -> bytes:
    """Of the adapters' numbers. UserError where no process has all of them."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            if local(parameter) is not parameter:
                raise UserError(
                    "model.server.sync: lora wants whole adapters, and FSDP2 shares them out; use "
                    "DDP, or set model.server.sync: none"
                )
            numbers = parameter.detach().cpu().contiguous().view(torch.uint8)
            digest.update(name.encode())
            digest.update(numbers.numpy().tobytes())
    return digest.digest()
