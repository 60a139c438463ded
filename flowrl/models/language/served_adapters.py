"""Keep a server at the current weights: adapters loaded by name, or all weights loaded from files.

The processes of a run share the server's weights: the main process saves and loads, the others
wait. Names come from the weights' values, so that processes agree on them without a message.
"""

import hashlib
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.adapters import save_adapters
from flowrl.models.checksum import weights_checksum
from flowrl.models.language.served_owner import COMING_SUFFIX, SENT_PREFIX, ServerOwner
from flowrl.models.shards import is_apart, is_sharded, local_shard
from rewards.serving.client import Client
from rewards.serving.requests import Patience

HASTY = Patience(timeout=30.0, tries=1)  # a server that is down must not delay the end of a run
HEAD_START = 30.0  # seconds that the other processes leave to the main one
OWN_VERSION = "default"  # vLLM's name of the weights that it was started with


@runtime_checkable
class InStep(Protocol):
    """Keeps a server at the current weights."""

    def current(self) -> str:
        """Load new weights if there are any; returns the name that requests use."""
        ...

    def lost(self) -> bool:
        """Whether the server answers but lost the weights in a restart. The next `current` loads
        them again."""
        ...

    def held(self) -> bool:
        """Whether the answers since `current` come from these weights."""
        ...

    def close(self) -> bool:
        """Leave the server. Whether it has its own weights again."""
        ...


@dataclass
class Adapters:
    """Adapters on a server, which must see `folder` under the same path.

    client  serves completions, and the list of models and adapters
    admin   loads and unloads adapters: below /v1 in vLLM, next to it in SGLang
    prefix  precedes an adapter's name in requests: SGLang needs `base:adapter`
    main    whether this process saves and loads
    """

    model: Any
    folder: Path
    client: Client
    admin: Client
    prefix: str = ""
    main: bool = True
    loaded: str | None = None
    _digest: bytes = b""

    def current(self) -> str:
        """Load new weights if there are any; returns the adapter name of the current weights.

        Code that changes weights (an update, an average for an evaluation, a checkpoint) need not
        announce it: weights are compared with those loaded last.
        """
        digest = fingerprint(self.model)
        if digest != self._digest:
            self.loaded, self._digest = self._load(digest), digest
        return f"{self.prefix}{self.loaded}"

    def lost(self) -> bool:
        """Whether the server answers but lost the adapter in a restart. The next `current` loads
        it again."""
        with suppress(ValueError):  # no server: the request for completions raises the error
            if self.loaded is not None and self.loaded not in served(self.client):
                self._digest = b""
        return self._digest == b""

    def held(self) -> bool:
        return True  # a server without the adapter refuses its name

    def close(self) -> bool:
        """Unload and delete all adapters of the run."""
        if self.main:
            self._sweep()
        self.loaded, self._digest = None, b""
        return True

    def _load(self, digest: bytes) -> str:
        """Load the current weights and return the adapter's name; the main process deletes earlier
        ones. Equal weights have the same name, since servers cache prompts by it."""
        name = f"{self._stem}-{digest.hex()[:16]}"
        path = self.folder.absolute() / name
        if self.main:
            save_adapters(self.model, path)
        elif waited_for(lambda: self._has(name)):
            return name
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
        if self.main:
            self._sweep(but=name)
        return name

    def _has(self, name: str) -> bool:
        try:
            return name in served(self.client)
        except ValueError:
            return False

    @property
    def _stem(self) -> str:
        """Prefix of this run's adapter names, since another run may use the server too."""
        at = str(self.folder.absolute()).encode()
        return f"{SENT_PREFIX}{hashlib.blake2b(at, digest_size=4).hexdigest()}"

    def _sweep(self, but: str | None = None) -> None:
        """Unload and delete the run's adapters, including those of a killed run. Errors are
        ignored: the server may not have these adapters, or may be down, which the next request
        reports."""
        for path in sorted(self.folder.glob(f"{SENT_PREFIX}*")):
            if path.name != but:
                with suppress(ValueError):
                    self.admin.tell("/unload_lora_adapter", {"lora_name": path.name}, HASTY)
                shutil.rmtree(path, ignore_errors=True)


@dataclass
class Weights:
    """All weights of a vLLM server (0.32), which must see `folder` under the same path.

    The server reads the files in place (`/collective_rpc` with `reload_weights`), clears its prompt
    cache (`/reset_prefix_cache`) and stores a version name (`/update_weight_version`). Another name
    after a batch of answers means that the server was restarted. VLLM_SERVER_DEV_MODE=1 enables
    these paths. Sharded weights are sent while they are gathered.

    name   the server's name of the model
    admin  client for the paths outside /v1
    owner  the run's lease on the server
    base   the model's own folder or name, for a server that does not say what it was started with
    main   whether this process saves and loads
    """

    model: Any
    folder: Path
    name: str
    admin: Client
    owner: ServerOwner
    base: str
    main: bool = True
    loaded: str | None = None
    _stamp: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def current(self) -> str:
        """The model's name, after the server has the current weights. Weights that are sharded now
        were sent when they were last gathered."""
        if self.loaded is not None and is_apart(self.model):
            return self.name
        stamp = [(p.data_ptr(), p._version) for p in self.model.parameters()]
        # gathered weights keep their place and version when their shards change
        if is_sharded(self.model) or stamp != self._stamp or not self.held():
            self.loaded, self._stamp = self._load(), stamp
        return self.name

    def lost(self) -> bool:
        return not self.held()

    def held(self) -> bool:
        """Whether the server names the weights that were loaded last. True if it does not answer,
        which the request for completions reports."""
        try:
            return self._version() == self.loaded
        except ValueError:
            return True

    def close(self) -> bool:
        """Give the server its own weights back, and delete the files. A server that is gone, or was
        restarted, has them."""
        given_back = True
        if self.main:
            given_back = self._give_back()
            shutil.rmtree(self.folder, ignore_errors=True)
        self.loaded, self._stamp = None, []
        return given_back

    def _give_back(self) -> bool:
        """Let the server read its own weights. False, with a line, if it cannot."""
        if not self.owner.ours(self.owner.version()):
            return True
        base = self.owner.base() or self.base
        try:
            self._read(base, OWN_VERSION, replace(self.admin.patience, tries=1))
        except ValueError as error:
            print(
                f"model.server: it still has the run's weights, since it could not read {base} "
                f"({error}): restart it before another run uses it",
                file=sys.stderr,
            )
            return False
        return True

    def _version(self) -> Any:
        answer = self.admin.get("/weight_info")
        return answer.get("weight_version") if isinstance(answer, dict) else None

    def _load(self) -> str:
        """Load the current weights unless the server has them; returns their name."""
        self.owner.take()
        name = f"{SENT_PREFIX}{checksum(self.model)}"
        path = self.folder.absolute() / name

        def is_loaded() -> bool:
            with suppress(ValueError):
                return self._version() == name
            return False

        if is_loaded() or (not self.main and waited_for(is_loaded)):
            return name
        if not path.is_dir():
            self.model.save_pretrained(path, state_dict=gathered_state(self.model))
        try:
            self._read(str(path), name, self.admin.patience)
        except ValueError as error:
            raise UserError(
                f"model.server.sync: {error}; the server must be a vLLM of 0.32 or newer, started "
                f"with VLLM_SERVER_DEV_MODE=1, and see {path}; or set model.server.sync: none"
            ) from error
        for former in self.folder.glob(f"{SENT_PREFIX}*"):
            if former.name != name:
                shutil.rmtree(former, ignore_errors=True)
        return name

    def _read(self, source: str, version: str, patience: Patience) -> None:
        """Let the server read weights in place, and name them. ValueError if it cannot.

        Before the first weights of a run it says that they are coming, so that a run that is killed
        meanwhile leaves no weights without a name.
        """
        if not (self.owner.version() or "").startswith(SENT_PREFIX):
            self.admin.tell(
                "/update_weight_version", {"new_version": version + COMING_SUFFIX}, patience
            )
        how = {"method": "reload_weights", "kwargs": {"weights_path": source}}
        self.admin.tell("/collective_rpc", how, patience)
        self.admin.tell("/reset_prefix_cache", {}, patience)
        self.admin.tell("/update_weight_version", {"new_version": version}, patience)


def gathered_state(model: Any) -> dict[str, Tensor] | None:
    """Weights and persistent buffers of a sharded model, as they are gathered now: its own
    `state_dict` shards them again. None for another model."""
    if not is_sharded(model):
        return None
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    buffers = [(name, b) for name, b in model.named_buffers() if name not in passing]
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *buffers]}


def waited_for(are_loaded: Any) -> bool:
    """Wait until the main process has loaded these weights; False if it does not."""
    end = time.monotonic() + HEAD_START
    while time.monotonic() < end:
        if are_loaded():
            return True
        time.sleep(0.1)
    return False


def served(client: Client) -> list[str]:
    """Names of served models and adapters. ValueError if no server answers."""
    listed = client.get("/models")
    rows = listed.get("data", []) if isinstance(listed, dict) else []
    return [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]


def fingerprint(model: Any) -> bytes:
    """Digest of the adapters' values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            numbers = _whole(parameter).detach().cpu().contiguous().view(torch.uint8)
            digest.update(name.encode())
            digest.update(numbers.numpy().tobytes())
    return digest.digest()


def checksum(model: Any) -> str:
    """Digest of all weights, which are whole or gathered."""
    return weights_checksum((name, _whole(p)) for name, p in model.named_parameters())


def _whole(parameter: Tensor) -> Tensor:
    assert local_shard(parameter) is parameter, "FSDP2 sends weights only while they are gathered"
    return parameter
