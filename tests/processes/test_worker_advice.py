"""What is said of workers that were lost, late or too large, and that its advice works."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.processes.meeting import meet
from flowrl.run import start
from flowrl.session.smaller_calls import explained
from flowrl.settings.read import dump, run_from
from tests.support import runs, text_runs
from tests.support.advice import advice

os.environ["RAY_AUTH_MODE"] = "disabled"  # read when Ray is imported
ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

# Two replicas of it at once are too many for a machine's memory.
REWARD = """
import os, pathlib, time
import ray
import torch

class Large:
    def __init__(self, folder):
        here = pathlib.Path(folder) / str(os.getpid())
        here.touch()
        for _ in range(60):
            if len(list(here.parent.iterdir())) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            time.sleep(0.05)

    def __call__(self, samples):
        return torch.zeros(len(samples.prompts))
"""


def connected(tree: dict[str, Any], **workers: Any) -> int:
    """The replicas with which Ray was started or joined for a run."""
    run = run_from(tree | {"workers": workers}, "run")
    with explained(run), start.on_cluster(run, meet(True)) as cluster:
        assert cluster is not None
        return len(cluster.replicas)


def test_a_cluster_that_is_there_is_joined_or_ray_started_here(pipeline, tmp_path):
    from ray.cluster_utils import Cluster  # type: ignore[reportMissingImports]

    os.environ |= runs.environment()
    tree = runs.tree(pipeline, tmp_path, runs.NFT)
    replica = {"brightness": {}}
    away = f"127.0.0.1:{runs.free_port()}"

    def refused() -> None:
        began = time.monotonic()
        try:
            connected(tree, rewards=replica, address=away)
        finally:
            assert time.monotonic() - began < 120, "Ray itself tries for 12 minutes"

    advice(
        "workers.address: {} is not a Ray cluster ({}); start one with `ray start --head`, or "
        "leave workers.address out",
        refused,
        lambda: connected(tree, rewards=replica),
    )
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        assert connected(tree, rewards=replica, address=nodes.address) == 1
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    os.environ |= runs.environment()
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2)
    yield
    ray.shutdown()


def test_fewer_replicas_fit(running, pipeline, tmp_path):
    (tmp_path / "large.py").write_text(REWARD)
    tree = runs.tree(pipeline, tmp_path, runs.NFT)

    def started(replicas: int) -> int:
        folder = tmp_path / f"memory-{replicas}"
        folder.mkdir()
        large = {"name": f"{tmp_path / 'large.py'}:Large", "folder": str(folder), "label": "large"}
        return connected(tree | {"rewards": [large]}, rewards={"large": {"replicas": replicas}})

    assert (
        advice(
            "{}: out of memory while a replica opened it ({}); use fewer replicas",
            lambda: started(2),
            lambda: started(1),
        )
        == 1
    )


def test_a_reward_that_finds_answers_is_left_to_the_sampling_processes(tmp_path):
    from flowrl.run.workers.scoring import ScoringWorker

    tree = text_runs.tree(Path("lm"), tmp_path, text_runs.GRPO)
    share = tree["rewards"][0] | {"label": "share"}
    tree["rewards"] = [{"name": "exact_answer", "label": "exact"}, share]

    def opened(**replicas: dict[str, int]) -> None:
        run = run_from(tree | {"workers": {"rewards": replicas}}, "run")
        for label in run.workers.rewards:
            ScoringWorker(dump(run), label, 1).open()  # as each of its replicas does

    advice(
        "{} finds answers in texts, which sampling processes need locally; leave it out there",
        lambda: opened(exact={}, share={}),
        lambda: opened(share={}),
    )


class Slow:
    """A worker that takes a second for its answers."""

    def winnable(self, prompts: list[str], meta: list[Any]) -> list[str]:
        time.sleep(1)
        return ["yes"] * len(prompts)

    def sample(self) -> tuple[Any, Any]:
        from flowrl.run.workers.sampler import MadePiece

        time.sleep(1)
        nothing: Any = None
        return MadePiece(nothing, "text", {}, (0, 0)), None


def test_what_takes_longer_than_the_limit_has_a_higher_one(running):
    from flowrl.run.workers.flights import Flight, Sent
    from flowrl.run.workers.pool import SamplingPool
    from flowrl.run.workers.scoring import ReplicatedReward

    def begun() -> Any:
        worker = ray.remote(num_cpus=0, max_restarts=-1)(Slow).remote()
        ray.get(worker.winnable.remote([], []))
        return worker

    worker = begun()
    assert advice(
        "workers.rewards: {} has not said in {} s what it knows of the rows ({}): raise "
        "workers.limit if that is slow",
        lambda: ReplicatedReward("slow", [worker], 0.2).winnable(["a"], [{}]),
        lambda: ReplicatedReward("slow", [worker], 60.0).winnable(["a"], [{}]),
    ) == ["yes"]

    def waited(limit: float) -> int:
        worker = begun()

        def ask(_: str) -> Sent:
            result, samples = worker.sample.options(num_returns=2).remote()
            return Sent(worker, result, samples, {})

        pool: Any = object.__new__(SamplingPool)
        pool.settings = SimpleNamespace(limit=limit)
        pool.crew = SimpleNamespace(lost=lambda worker, reason: None)
        pool.busy, pool.sizes = {}, {}
        return len(pool.made(Flight(ask, ["unit"]), {}))

    assert (
        advice(
            "workers: a unit was lost {} times ({}); see `ray status`, or raise workers.limit",
            lambda: waited(0.2),
            lambda: waited(60.0),
        )
        == 1
    )
