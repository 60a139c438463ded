"""Serve an engine over HTTP, to runs on this or other machines that see the run's folder.

    GET  /health    {"version": the weights that it holds, or null}
    POST /load      {"version", "folder"}: files below a path that the server sees
    POST /sample    an `EngineRequest` as JSON -> samples as safetensors; 409 for other weights
    POST /close     forget the run's weights

One request is served at a time, since an engine need not be thread-safe.
"""

import hmac
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.models.engine.protocol import Engine
from flowrl.models.engine.remote import STALE
from flowrl.models.engine.wire import answer_bytes, read_request

if TYPE_CHECKING:
    from fastapi import FastAPI


class HeldEngine:
    """An engine, the version of the weights that it holds, and a lock."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.version = engine, ""
        self.lock = threading.Lock()

    def load(self, version: str, folder: str) -> None:
        """Load weights unless they are there: every process of a run asks for it."""
        with self.lock:
            if version != self.version:
                self.version = ""
                self.engine.load(version, Path(folder))
                self.version = version

    def sample(self, body: Any) -> bytes:
        """ValueError for a request that is none, LookupError for other weights."""
        request = read_request(body)
        with self.lock:
            if request.version != self.version:
                held = self.version or "no weights of a run"
                raise LookupError(f"the engine holds {held}")
            return answer_bytes(self.engine.sample(request))

    def close(self) -> None:
        with self.lock:
            self.engine.close()
            self.version = ""


def create_engine_app(engine: Engine, token: str | None = None) -> "FastAPI":
    """The ASGI application of an engine. `token`: what clients must send, if anything."""
    from fastapi import Body, FastAPI, Header, HTTPException, Response

    held, app = HeldEngine(engine), FastAPI(title="flowrl engine")

    def allowed(authorization: str | None) -> None:
        if token is not None and not hmac.compare_digest(
            (authorization or "").encode(), f"Bearer {token}".encode()
        ):
            raise HTTPException(401, "another token")

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"version": held.version or None}

    @app.post("/load")
    def load(
        version: str = Body(), folder: str = Body(), authorization: str | None = Header(None)
    ) -> dict[str, Any]:
        allowed(authorization)
        held.load(version, folder)
        return {"version": version}

    @app.post("/sample")
    def sample(body: Any = Body(), authorization: str | None = Header(None)) -> Response:
        allowed(authorization)
        try:
            content = held.sample(body)
        except LookupError as error:
            return Response(str(error), STALE)
        except ValueError as error:
            return Response(str(error), 422)
        return Response(content, media_type="application/octet-stream")

    @app.post("/close")
    def close(authorization: str | None = Header(None)) -> dict[str, Any]:
        allowed(authorization)
        held.close()
        return {}

    return app


def serve_engine(engine: Engine, host: str = "127.0.0.1", port: int = 8200) -> None:
    """Serve an engine until Ctrl-C. Who can reach the address can use it, and let it read files."""
    import uvicorn

    print(f"engine at http://{host}:{port}", flush=True)
    uvicorn.run(create_engine_app(engine), host=host, port=port, log_level="warning")
