"""Runs with workers on two Ray nodes of this machine, beside the same run in one process."""

import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from flowrl.paths import PROJECT
from tests.support import runs, text_runs, tiny_lm
from tests.support.warm import Process, Warm, agree

# `Cluster` makes no token, which Ray asks for since 2.60; read when Ray is imported
os.environ["RAY_AUTH_MODE"] = "disabled"

RECIPES: dict[str, dict[str, Any]] = {
    "flow_grpo": {"name": "flow_grpo", "steps": 3, "group": 2, "clip": 0.2},
    "mix_grpo": {"name": "mix_grpo", "steps": 4, "group": 2, "window": 2},
    "branch_grpo": {"name": "branch_grpo", "steps": 3, "at": [0, 1]},
    "temp_flow": {"name": "temp_flow", "steps": 3, "roots": 1, "branch": 2},
    "nft": {"name": "nft", "steps": 3, "group": 2, "levels_per_sample": 2},
    "text_grpo": {**text_runs.GRPO, "group": 3, "length": 4},
}
UNTIMED = ("seconds", "workers/")
LIMIT = 120.0  # seconds until a worker without an answer is replaced


class Case(NamedTuple):
    """`disturbed`: whether a sampling worker is killed once."""

    recipe: str
    lag: int = 0
    sampling: int = 0
    replicas: int = 0
    disturbed: bool = False

    @property
    def name(self) -> str:
        more = "-killed" if self.disturbed else ""
        return f"{self.recipe}-lag{self.lag}-{self.sampling}-{self.replicas}{more}"

    def options(self, address: str) -> list[str]:
        words = ["--workers.sampling", str(self.sampling), "--workers.address", address]
        if self.replicas:
            label = "share" if self.recipe == "text_grpo" else "brightness"
            words += ["--workers.rewards", json.dumps({label: {"replicas": self.replicas}})]
        return words


class Nodes:
    """Two Ray nodes on this machine; learners connect to the first."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster  # type: ignore[reportMissingImports]  # an extra

        how = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 200 * 2**20}
        self.how = how
        self.cluster = Cluster(initialize_head=True, head_node_args=how)
        self.other = self.cluster.add_node(**how)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def workers(self, kind: str = "") -> list[int]:
        """Process ids of sampling or scoring workers, which Ray names by their class."""
        return [
            child.pid
            for node in (self.cluster.head_node, self.other)
            for child in _children(self.pid(node, "raylet"))
            if f"ray::{kind}" in _title(child) and "Worker" in _title(child)
        ]

    def kill_other(self) -> None:
        """SIGKILL to the second node's raylet, with which its workers end; then another joins."""
        os.kill(self.pid(self.other, "raylet"), signal.SIGKILL)
        self.cluster.remove_node(self.other, allow_graceful=False)
        self.other = self.cluster.add_node(**self.how)

    def kill_head(self) -> None:
        """SIGKILL to what makes a node the head. `close` ends the rest."""
        for kind in ("gcs_server", "raylet"):
            os.kill(self.pid(self.cluster.head_node, kind), signal.SIGKILL)

    def pid(self, node: Any, kind: str) -> int:
        return node.all_processes[kind][0].process.pid

    def close(self) -> None:
        with suppress(Exception):  # of a cluster whose head is gone
            self.cluster.shutdown()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class Bench:
    """The folders, the cluster and the warm process of many runs."""

    def __init__(self, out: Path, iterations: int) -> None:
        self.out, self.iterations = out, iterations
        out.mkdir(parents=True, exist_ok=True)
        os.environ |= runs.environment() | {"PYTHONPATH": str(PROJECT), "RAY_worker_niceness": "0"}
        self.pipeline, self.language = out / "pipeline", out / "language"
        if not self.pipeline.exists():
            runs.write_pipeline(self.pipeline)
            tiny_lm.write(self.language)
        self.warm, self.nodes = Warm(), Nodes()

    def config(self, recipe: str, lag: int) -> Path:
        place = self.out / f"{recipe}-lag{lag}"
        place.mkdir(exist_ok=True)
        if recipe == "text_grpo":
            tree = text_runs.tree(self.language, place, RECIPES[recipe], iterations=self.iterations)
            tree["evaluate"] |= {"samples": 6, "per_prompt": 2}
        else:
            tree = runs.tree(self.pipeline, place, RECIPES[recipe], iterations=self.iterations)
            tree["evaluate"] |= {"steps": 2, "samples": 2, "per_prompt": 1}
            tree["prompts"]["per_iteration"] = 4
        tree["evaluate"] |= {"average": 0.5, "every": 2}
        tree["workers"] = {"unit": 1, "lag": lag, "limit": LIMIT, "evaluate": True}
        return runs.write(tree, place)

    def start(self, *words: Any, out: Path) -> Process:
        return Process(self.warm, words, out, 1, False)

    def reference(self, recipe: str, lag: int) -> Path:
        """The run in one process, once for each recipe and lag."""
        folder = self.place(f"{recipe}-lag{lag}-here", keep=True)
        if not (folder.parent / "done").exists():
            out = folder.parent / "out.txt"
            codes = self.start(self.config(recipe, lag), "--folder", folder, out=out).wait()
            assert codes == [0], out.read_text()[-3000:]
            (folder.parent / "done").touch()
        return folder

    def place(self, name: str, keep: bool = False) -> Path:
        """Where a run will be: all have the same name, which pages show."""
        if not keep or not (self.out / name / "done").exists():
            shutil.rmtree(self.out / name, ignore_errors=True)
            (self.out / name).mkdir()
        return self.out / name / "run"

    def fresh_nodes(self) -> None:
        self.nodes.close()
        self.nodes = Nodes()

    def close(self) -> None:
        self.nodes.close()
        self.warm.close()


def differences(folder: Path, wanted: Path) -> str:
    """Compare a run's end with another's; nothing if it is the same to the bit."""
    try:
        agree(folder, wanted, UNTIMED)
        parts = ("samples/*.*", "report/evaluation-*", "report/tree-*")
        shown = [p.relative_to(wanted) for part in parts for p in sorted(wanted.glob(part))]
        assert len(shown) > 3, shown
        for name in shown:
            assert (folder / name).read_bytes() == (wanted / name).read_bytes(), name
    except (AssertionError, OSError, ValueError) as error:
        return f"{folder} differs from {wanted}: {error!r}"
    return ""
