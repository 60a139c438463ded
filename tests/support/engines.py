"""Engines for tests: the example's, served over HTTP, and some that are wrong."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowrl.models.engine import Engine, EngineRequest, EngineSamples
from flowrl.models.engine.serve import create_engine_app
from flowrl.paths import PROJECT
from tests.support.servers import in_thread

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
    with in_thread(create_engine_app(engine, token), port) as address:
        yield address


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
