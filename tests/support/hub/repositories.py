"""Repositories of the table `models.yaml` as a hub serves them: an index and configurations, and a
local server of the hub's HTTP."""

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote

import diffusers
import yaml

from flowrl.models.diffusers.call.drive.driver import DENOISERS

CONFIGS = Path(__file__).parents[3] / "flowrl" / "models" / "public_configs.json"
COMMIT = "0" * 40
Files = Mapping[str, str]
# a refusal: its status, and the hub's word for it; None: an answer that is no refusal
FAULTS: Mapping[str, Any] = {
    "gated": (401, "GatedRepo"), "private": (401, "RepoNotFound"), "no right": (403, ""),
    "missing": (404, "EntryNotFound"), "too many": (429, ""), "in trouble": (503, ""),
    "slow": None, "drops": None, "closed": None, "cut": None, "half": None, "a list": None,
    "no text": None, "empty": None, "a page": None,
}  # fmt: skip


@cache
def table() -> Mapping[str, Mapping[str, Any]]:
    text = Path(__file__).with_name("models.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["models"]


@cache
def _shared() -> Mapping[str, Any]:
    return json.loads(CONFIGS.read_text(encoding="utf-8"))["configs"]


def files(row: Mapping[str, Any]) -> Files:
    """model_index.json, and the configurations of the denoisers and of the scheduler. Those of the
    other parts, which decide nothing, are missing."""
    kind = getattr(diffusers, row["class"])
    named = row["denoiser"]
    base = _shared().get(named, {"_class_name": named})
    denoiser = {**base, **row.get("with", {})}
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", **row.get("scheduler", {})}
    index: dict[str, Any] = {"_class_name": row["class"], **row.get("index", {})}
    made = {}
    for name in inspect.signature(kind.__init__).parameters:
        if name in DENOISERS and (name in ("unet", "transformer") or row.get("second")):
            index[name] = ["diffusers", denoiser["_class_name"]]
            made[f"{name}/config.json"] = json.dumps(denoiser)
        elif name == "scheduler":
            index[name] = ["diffusers", scheduler["_class_name"]]
            made["scheduler/scheduler_config.json"] = json.dumps(scheduler)
        elif name == "vae":
            index[name] = ["diffusers", "AutoencoderKL"]
        elif name.startswith("text_encoder"):
            index[name] = ["transformers", "T5EncoderModel"]
    return {"model_index.json": json.dumps(index), **made}


def etag(data: bytes) -> str:
    """The name of a file's contents, as a hub gives it."""
    return f"{abs(hash(data)):040x}"


@dataclass
class Hub:
    """A local hub: its address, the repositories, and those that misbehave.

    broken  a file that misbehaves, and how (a word of `FAULTS`), by repository
    asked   paths of the requests, in order
    """

    repositories: Mapping[str, Files]
    gated: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    broken: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    release: Event = field(default_factory=Event)

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = unquote(request.path)
        self.asked.append(path)
        owner, name, _, _, *rest = [*path.strip("/").split("/"), "", "", "", ""][:8]
        source, file = f"{owner}/{name}", "/".join(part for part in rest if part)
        if source in self.slow:
            self.release.wait(60)
        if source in self.gated:
            return self._refuse(request, 401, "GatedRepo")
        if source not in self.repositories:
            return self._refuse(request, 401, "RepoNotFound")
        if file not in self.repositories[source]:
            return self._refuse(request, 404, "EntryNotFound")
        data = self.repositories[source][file].encode()
        place, fault = self.broken.get(source, ("", ""))
        if place == file:
            return self._misbehave(request, body, data, fault)
        self._send(request, body, data, data[: len(data) // 2] if source in self.cut else data)
        return None

    def _misbehave(
        self, request: BaseHTTPRequestHandler, body: bool, data: bytes, fault: str
    ) -> None:
        half = len(data) // 2
        match fault:
            case "slow":
                self.release.wait(60)
            case "drops":
                self._send(request, body, data, data, pause=self.release)
            case "closed":
                request.connection.close()
            case "cut":
                self._send(request, body, data, data[:half])
            case "half":
                self._send(request, body, data, data[:half], length=half)
            case "a list":
                self._send(request, body, data, b"[1, 2]", length=6)
            case "no text":
                self._send(request, body, data, b"\xff\xfe{}", length=4)
            case "empty":
                self._send(request, body, data, b"", length=0)
            case "a page":
                request.send_response(200)
                request.send_header("Content-Length", "13")
                request.end_headers()
                request.wfile.write(b"<html></html>" if body else b"")
            case _:
                self._refuse(request, *FAULTS[fault])

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler,
        body: bool,
        data: bytes,
        sent: bytes,
        length: int | None = None,
        pause: Event | None = None,
    ) -> None:
        """An answer that says it is of a file with this data, and its bytes, one a second until
        `pause`. `length` is the answer's, if it is not the file's."""
        request.send_response(200)
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("ETag", f'"{etag(data)}"')
        request.send_header("Content-Length", str(len(data) if length is None else length))
        request.end_headers()
        if body and pause is not None:
            for number in sent:
                if pause.wait(1.0):
                    return
                request.wfile.write(bytes([number]))
        elif body:
            request.wfile.write(sent)

    def _refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Content-Length", "0")
        request.end_headers()


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """The address of a server that answers for a hub."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            hub.answer(self, body=False)

        def do_GET(self) -> None:
            hub.answer(self, body=True)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        hub.release.set()
        server.shutdown()
        server.server_close()
