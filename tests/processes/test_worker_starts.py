"""However a worker's start ends, one sentence names the cause."""

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from flowrl.errors import UserError
from flowrl.processes.meeting import meet
from flowrl.run import start
from flowrl.session.smaller_calls import explained
from flowrl.settings.read import run_from
from tests.support import runs

os.environ["RAY_AUTH_MODE"] = "disabled"  # read when Ray is imported
ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

# A reward whose opening ends as its setting says, in a worker alone.
REWARD = """
import os, resource, signal, socket, sys, threading, time
import ray
import torch

class Odd(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")

class Locked(Exception):
    def __init__(self):
        super().__init__("it holds a lock")
        self.lock = threading.Lock()

def memory():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
    bytearray(2**33)

def device():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

def odd():
    raise Odd("this", "that")

def locked():
    raise Locked

def lines():
    raise RuntimeError("the first line\\nthe second one")

def missing():
    import a_package_that_is_missing

def disk():
    raise OSError(28, "No space left on device", "/weights")

def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_server(server.getsockname())

def ends():
    sys.exit("it asked to end")

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def crashed():
    os.write(2, b"a library said: no such device\\n")
    os.abort()

def left():
    os._exit(7)

def hangs():
    time.sleep(1000)

class Ends:
    def __init__(self, how):
        if ray.get_runtime_context().get_actor_id() is not None:
            globals()[how]()

    def __call__(self, samples):
        return torch.zeros(len(samples.prompts))
"""
CAUSES = {
    "memory": r"out of memory .*MemoryError",
    "device": "out of memory .*CUDA out of memory",
    "odd": "Odd: this and that",
    "locked": "Locked: it holds a lock",
    "lines": "the first line the second one",
    "missing": "No module named 'a_package_that_is_missing'",
    "disk": "/weights.*[Nn]o space left on device",
    "port": "Address already in use",
    "ends": "SystemExit: it asked to end",
    "killed": r"ended 3 times while it opened its parts: its process was killed, .*process \d+ on",
    "crashed": r"ended 3 times .*whose last words were: .*; its log is .*worker-",
    "left": "ended 3 times while it opened its parts",
    "hangs": r"has not opened its parts in 90 s \(process \d+ on .*py-spy dump --pid \d+",
}
MEMORY = ("memory", "device")
ON_A_CLUSTER = ("device", "killed", "hangs")


@pytest.fixture(scope="module", params=["local", "cluster"])
def running(request) -> Iterator[str]:
    """Ray of this machine, or a cluster of two nodes."""
    from ray.cluster_utils import Cluster  # type: ignore[reportMissingImports]

    os.environ |= runs.environment()
    if request.param == "local":
        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2)
        yield request.param
        ray.shutdown()
        return
    how = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 200 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args=how)
    nodes.add_node(**how)
    ray.init(address=nodes.address, log_to_driver=False)
    yield request.param
    ray.shutdown()
    nodes.shutdown()


@pytest.mark.parametrize("kind", ["sampling", "replica"])
@pytest.mark.parametrize("how", CAUSES)
def test_the_cause_is_named(running, kind, how, pipeline, tmp_path):
    if running == "cluster" and how not in ON_A_CLUSTER:
        pytest.skip("as on one machine")
    (tmp_path / "ends.py").write_text(REWARD)
    tree = runs.tree(pipeline, tmp_path, runs.NFT)
    tree["rewards"] = [{"name": f"{tmp_path / 'ends.py'}:Ends", "how": how, "label": "ending"}]
    workers: dict[str, Any] = {"limit": 90.0 if how == "hangs" else 400.0}
    workers |= {"sampling": 1} if kind == "sampling" else {"rewards": {"ending": {}}}
    run = run_from(tree | {"workers": workers}, "run")
    with (
        pytest.raises(UserError) as said,
        explained(run),
        start.on_cluster(run, meet(True)) as cluster,
        start.with_workers(runs.session_of(run, tmp_path / "run"), cluster),
    ):
        pytest.fail("it started")
    place = "workers.rewards: ending: " if kind == "replica" else "workers: "
    place = "out of memory (in a worker: " if place == "workers: " and how in MEMORY else place
    text = str(said.value)
    assert text.startswith(place) and re.search(CAUSES[how], text, re.DOTALL), text
    assert "\n" not in text and "\x1b" not in text
