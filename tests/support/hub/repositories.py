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

    asked  paths of the requests, in order
    """

    repositories: Mapping[str, Files]
    gated: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
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
        request.send_response(200)
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("ETag", f'"{etag(data)}"')
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if body:
            request.wfile.write(data[: len(data) // 2] if source in self.cut else data)
        return None

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
