"""`flowrl launch ray` on a cluster of two local nodes without GPUs."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from flowrl.paths import PROJECT
from tests.support import text_runs, tiny_lm


def launched(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flowrl", "launch", "ray", *words, "--submit"]
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
        words = ("--folder", str(folder), "--nodes", "2", "--cpus", "1", "--port", "29611")
        where = {"RAY_ADDRESS": cluster.address}
        found = launched(str(file), *words, **where)
        assert found.returncode == 0, found.stdout + found.stderr
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        assert "reward" in " ".join(lines)
        (saved,) = (folder / "checkpoints").glob("000001")
        assert json.loads((saved / "state.json").read_text())["origin"]["processes"] == 2
        again = launched(str(file), *words, **where)
        assert again.returncode == 0 and "has finished" in again.stdout
        refused = launched(str(file), *words, "--train.lr", "1e-3", "--recipe.group", "1", **where)
        assert refused.returncode != 0
    finally:
        cluster.shutdown()
