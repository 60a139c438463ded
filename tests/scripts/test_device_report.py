"""Iterations on a pretended CUDA device: no mix of devices, few waits and copies."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.paths import PROJECT
from tests.support import runs
from tests.support.pretended_cuda import compiled

ALL_WEIGHTS = {"lora": None}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # recipe, changes of the model
    "chain": ({"name": "flow_grpo", "steps": 3, "group": 2, "kl": 0.01}, {}),
    "tree": ({"name": "branch_grpo", "steps": 3, "at": [0, 1]}, ALL_WEIGHTS),
    "matching": ({"name": "nft", "steps": 2, "group": 2, "levels_per_sample": 1}, {}),
    "gradient": ({"name": "draft", "steps": 3, "group": 2, "last": 1}, ALL_WEIGHTS),
}


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    try:
        compiled.library()
    except compiled.NoCompiler as error:
        pytest.skip(str(error))


def text_run() -> dict[str, Any]:
    tree = yaml.safe_load((PROJECT / "configs/text_demo.yaml").read_text())
    tree["recipe"] |= {"group": 4}
    tree["prompts"] |= {"per_iteration": 2}
    return tree


def written(folder: Path, pipeline: Path, kind: str) -> Path:
    recipe, model = KINDS[kind]
    # the chain is drawn and scored in parts
    train = {"updates": 2, "rows_per_call": 4} if kind == "chain" else {"updates": 1}
    tree = runs.tree(pipeline, folder, recipe, self_test="off", **train)
    tree["model"] |= model
    path = folder / f"{kind}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def reports(*words: str | Path) -> list[dict[str, Any]]:
    """The reports of runs, by one process."""
    command = [sys.executable, "scripts/benchmarks/device_report.py", "--json", *map(str, words)]
    done = subprocess.run(
        command, cwd=PROJECT, env=runs.environment(), capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def found(pipeline, tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("reports")
    text = folder / "text.yaml"
    text.write_text(yaml.safe_dump(text_run()))
    paths = [*(written(folder, pipeline, kind) for kind in KINDS), text]
    return {Path(each["run"]).stem: each for each in reports(*paths)}


@pytest.mark.parametrize("kind", [*KINDS, "text"])
def test_no_operation_mixes_devices(found, kind):
    assert found[kind]["mixes"] == 0, found[kind]["mixed"]
    assert found[kind]["calls"]["sampling"] > 0 and found[kind]["calls"]["training"] > 0
    assert found[kind]["live_bytes"] > 1e5
    assert found[kind]["whole_iteration"]["float64"] == 0  # mps has none, and others are slow


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_waits_for_nothing_and_an_optimizer_step_once(found, kind):
    """The step waits for the norm of its gradient; the iteration for its metrics, and for whether
    averages are still the trained weights."""
    report = found[kind]
    assert report["syncs_per_call"]["sampling"] == 0, report["by_line"]
    assert report["uploads_per_call"]["sampling"] == 0, report["by_line"]
    assert report["syncs_per_update"] <= 1 + 2 / report["updates"]
    assert report["pinned_per_call"]["sampling"] > 0  # noise does not block


def test_texts_wait_once_a_token(found):
    """For the stopping check, with five checks of arguments in transformers' `generate` and a copy
    of the tokens. In training transformers asks once a call whether texts are packed."""
    report = found["text"]
    calls = report["calls"]
    waits = {phase: round(report["syncs_per_call"][phase] * calls[phase]) for phase in calls}
    assert waits["sampling"] <= calls["sampling"] + 6, report["by_line"]
    assert waits["training"] <= calls["training"] + report["updates"] + 1, report["by_line"]
    assert report["uploads_per_call"]["training"] == 0
    mine = [each for each in report["by_line"] if " > transformers" not in each["line"]]
    assert not any("upload" in each for each in mine), mine


@pytest.mark.parametrize(("kind", "most"), [("chain", 24), ("matching", 24), ("gradient", 16)])
def test_a_sampling_call_has_few_operations_outside_of_the_network(found, kind, most):
    assert found[kind]["kernels_per_call"]["sampling"] <= most, found[kind]["by_line"]


@pytest.mark.parametrize("kind", KINDS)
def test_media_leave_the_device_once(found, kind):
    media = [
        line for line in found[kind]["by_line"] if line["line"].startswith("rewards/types.py:")
    ]
    assert [line["download"] for line in media] == [1]
    most = max(line.get("download_bytes", 0) for line in found[kind]["by_line"])
    assert media[0]["download_bytes"] == most
    assert not any(line["line"].startswith("rewards/guard.py") for line in found[kind]["by_line"])
