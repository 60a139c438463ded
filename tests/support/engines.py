"""Engines for tests: the example's, served over HTTP, and some that are wrong."""

import importlib.util
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from flowrl.models.engine import Engine, EngineRequest, EngineSamples
from flowrl.models.engine.serve import create_engine_app
from flowrl.paths import PROJECT

EXAMPLE = PROJECT / "examples" / "engine" / "sd3_engine.py"


def example_engine(folder: Path) -> Any:
    """The engine of examples/engine with a pipeline's folder."""
    spec = importlib.util.spec_from_file_location("sd3_engine", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SD3Engine(str(folder))


@contextmanager
def served_engine(engine: Engine, port: int = 0, token: str | None = None) -> Iterator[str]:
    """The server of an engine, in a thread; gives its address."""
    config = uvicorn.Config(create_engine_app(engine, token), port=port, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


class ForgetfulEngine:
    """An engine around another one that never takes weights after the first."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.loads = inner, 0

    def load(self, version: str, folder: Path) -> None:
        self.loads += 1
        if self.loads == 1:
            self.inner.load(version, folder)
        self.inner.held = version

    def sample(self, request: EngineRequest) -> EngineSamples:
        return self.inner.sample(request)

    def close(self) -> None:
        self.inner.close()
