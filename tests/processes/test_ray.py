"""scripts/launch/on_ray.py on a cluster of two local nodes without GPUs."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from flowrl.paths import PROJECT
from tests.support import text_runs, tiny_lm

SCRIPT = PROJECT / "scripts/launch/on_ray.py"


def launched(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words]
    whole = {**os.environ, **environment}
    return subprocess.run(
        command, capture_output=True, text=True, env=whole, timeout=500, cwd=PROJECT
    )


@pytest.mark.slow
def test_two_nodes_of_a_ray_cluster_train_one_run(tmp_path):
    """Both machines of the run take part in it, and a failure of one is the script's exit code."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    model = tiny_lm.write(tmp_path / "lm")
    settings = text_runs.tree(model, tmp_path, text_runs.GRPO, iterations=1)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    paths = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    os.environ |= paths
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        folder = tmp_path / "run"
        words = ("--nodes", "2", "--cpus", "1", "--port", "29611")
        where = {"RAY_ADDRESS": cluster.address}
        found = launched(*words, str(file), "--folder", str(folder), **where)
        assert found.returncode == 0, found.stdout + found.stderr
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        assert "reward" in " ".join(lines)
        (saved,) = (folder / "checkpoints").glob("000001")
        assert json.loads((saved / "state.json").read_text())["origin"]["processes"] == 2
        again = launched(*words, str(tmp_path / "none.yaml"), **where)
        assert again.returncode != 0
    finally:
        cluster.shutdown()


def test_machines_without_gpus_are_asked_for_by_their_cores():
    shown = launched("--dry-run", "--nodes", "2", "--cpus", "3", "configs/demo.yaml")
    first, second = shown.stdout.splitlines()
    assert "ddp_cpu_2.yaml --num_machines 2 --num_processes 6 --machine_rank 0" in first
    assert "--machine_rank 1" in second
    for words in (("--gpus", "1", "--cpus", "1"), (), ("--cpus", "0"), ("--gpus", "-2")):
        wrong = launched("--dry-run", "--nodes", "2", *words, "configs/demo.yaml")
        assert wrong.returncode == 2
        assert "--gpus" in wrong.stderr or "--cpus" in wrong.stderr
