import gc
import itertools
import os
import random
import re
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
torch.set_num_threads(1)  # several test processes on few cores: one thread each is fastest

os.environ["FLOWRL_STATE"] = tempfile.mkdtemp(prefix="flowrl-tests-")  # folders that were begun
os.environ["FLOWRL_CACHE"] = tempfile.mkdtemp(prefix="flowrl-tests-")  # of processes that stay
OWNER = os.getpid()
os.environ["FLOWRL_NOTIFY"] = "off"  # no test sends notices by the configuration of who runs it


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make the cases slow that a test's `quick_cases` does not name: variants of one check."""
    quick: dict[str, list[bool]] = {}
    for item in items:
        mark = item.get_closest_marker("quick_cases")
        if mark is None or not isinstance(item, pytest.Function):
            continue
        here = any(name in item.callspec.id for name in mark.args)
        quick.setdefault(item.nodeid.partition("[")[0], []).append(here)
        if not here:
            item.add_marker(pytest.mark.slow)
    wrong = [name for name, cases in quick.items() if len(cases) > 2 and not any(cases)]
    if wrong:
        raise pytest.UsageError(f"quick_cases of {wrong[0]} names none of its cases")


CACHES, NUMBERS = Path(os.environ["FLOWRL_CACHE"]), itertools.count()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Remove what this process made. One that it forked removes nothing."""
    if os.getpid() == OWNER:
        for name in ("FLOWRL_STATE", "FLOWRL_CACHE"):
            shutil.rmtree(os.environ[name], ignore_errors=True)


gc.disable()  # what is imported and collected stays: looking for garbage there takes seconds


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the global generators before a test and its fixtures, so that its random numbers do not
    depend on which tests ran before it."""
    _seed()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """Make what several tests share without drawing from a test's random numbers: the first test of
    a module would draw others than in another order."""
    if fixturedef.scope == "function":
        return (yield)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    _seed()
    try:
        return (yield)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_kept_proofs(monkeypatch) -> None:
    """A proof that another test has kept would hide what this one changes in a pipeline.

    The folder is named and not made: few tests write into it.
    """
    monkeypatch.setenv("FLOWRL_CACHE", str(CACHES / str(next(NUMBERS))))


@pytest.fixture
def tmp_path(request, tmp_path_factory) -> Path:
    """A folder of this test, in place of pytest's own fixture, which reads the names of all folders
    of earlier tests: half a minute of a whole run."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{name}-{next(NUMBERS)}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory) -> Path:
    """The folder of a tiny random StableDiffusion3Pipeline."""
    from tests.support import runs

    return runs.write_pipeline(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="session")
def warm():
    """Starts runs as processes of their own, quickly."""
    from tests.support.warm import Warm

    server = Warm()
    yield server
    server.close()
