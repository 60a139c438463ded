import itertools
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
torch.set_num_threads(1)  # several test processes on few cores: one thread each is fastest

os.environ["FLOWRL_STATE"] = tempfile.mkdtemp(prefix="flowrl-tests-")  # folders that were begun
os.environ["FLOWRL_CACHE"] = tempfile.mkdtemp(prefix="flowrl-tests-")  # of processes that stay


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the global generators before a test and its fixtures, so that its random numbers do not
    depend on which tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_kept_proofs(monkeypatch) -> None:
    """A proof that another test has kept would hide what this one changes in a pipeline.

    The folder is named and not made: few tests write into it, and each `mktemp` reads the names of
    all folders before it, which took half a minute of a whole run.
    """
    monkeypatch.setenv("FLOWRL_CACHE", str(CACHES / str(next(NUMBERS))))


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
