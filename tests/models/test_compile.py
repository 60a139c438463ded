"""Compiled blocks in a whole run: never given up, and with the same end."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo import config

from flowrl.models import savings
from flowrl.paths import PROJECT
from flowrl.run.experience.collect import collect
from flowrl.run.save.checkpoint import Progress
from flowrl.run.train import iterate
from flowrl.run.update import ratio_check
from flowrl.settings.read import dump, read_run
from tests.support import runs


@pytest.fixture(autouse=True)
def strict():
    """torch's own limit of graphs, and an error where it would go on uncompiled."""
    torch.compiler.reset()
    with config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        yield


def trained(folder: Path, *, compiled: bool) -> dict[str, torch.Tensor]:
    """The demo's weights after a short iteration: its blocks are of two kinds."""
    tree = dump(read_run(PROJECT / "configs" / "demo_flow_grpo.yaml"))
    tree["model"] |= {"device": "cpu", "compile": compiled}
    tree["prompts"]["per_iteration"] = 1
    tree["recipe"] |= {"steps": 3, "group": 2}
    tree["rewards"], tree["train"]["self_test"] = [{"name": "brightness"}], "off"
    folder.mkdir()
    kept = runs.opened(tree, folder)
    assert iterate(kept, Progress()).metrics["skipped"] == 0
    return kept.learner.policies.state()


def apart(folder: Path) -> float:
    """By how many steps compiled and plain weights differ at most. A step is 5e-5: warm-up."""
    made, plain = (trained(folder / str(c), compiled=c) for c in (True, False))
    return max(float((made[name] - plain[name]).abs().max()) for name in plain) / 5e-5


@pytest.mark.slow
def test_a_compiled_demo_is_compiled_to_its_end(tmp_path, monkeypatch):
    """With the graphs run as they are: frozen weights and trained ones, with gradients and without,
    one row and many make more of them than torch's own limit."""
    eager = partial(savings.compile_blocks, backend="eager")
    monkeypatch.setattr(savings, "compile_blocks", eager)
    assert apart(tmp_path) < 0.1


@pytest.mark.slow
def test_so_it_is_by_inductor(tmp_path):
    assert apart(tmp_path) < 0.1


@pytest.mark.slow
def test_a_run_with_compiled_blocks_starts_at_ratio_one(pipeline, tmp_path):
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    tree["model"]["compile"] = True
    kept = runs.opened(tree, tmp_path)
    floor = ratio_check.check_ratio(kept.learner, collect(kept, 0), kept.terminal)
    assert floor is not None and floor < 1e-5
