"""Compiled blocks in a whole run: never given up, and with the same end."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo import config
from torch._dynamo.utils import counters

from flowrl.iteration import ratio_check
from flowrl.models import savings
from flowrl.models.open import compiles
from flowrl.paths import PROJECT
from flowrl.run.evaluate.evaluate import evaluate_held_out
from flowrl.session.progress import Progress
from flowrl.settings.read import dump, read_run, run_from
from tests.support import runs
from tests.support.iterations import collect, iterate


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


def apart(folder: Path) -> torch.Tensor:
    """By how many steps each weight differs, compiled and plain. A step is 5e-5: warm-up."""
    made, plain = (trained(folder / str(c), compiled=c) for c in (True, False))
    return torch.cat([(made[name] - plain[name]).abs().flatten() for name in plain]) / 5e-5


@pytest.mark.slow
def test_a_compiled_demo_is_compiled_to_its_end(tmp_path, monkeypatch):
    """With the graphs run as they are: frozen weights and trained ones, with gradients and without,
    one row and many make more of them than torch's own limit."""
    eager = partial(savings.compile_blocks, backend="eager")
    monkeypatch.setattr(savings, "compile_blocks", eager)
    assert apart(tmp_path).max() < 0.1


@pytest.mark.slow
def test_so_it_is_by_inductor(tmp_path):
    """It rounds otherwise, which Adam enlarges where a gradient is almost 0: one weight was 0.12 of
    a step apart."""
    differences = apart(tmp_path)
    assert differences.max() < 0.5 and (differences > 0.01).float().mean() < 1e-3


@pytest.mark.slow
def test_a_run_with_compiled_blocks_starts_at_ratio_one(pipeline, tmp_path):
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    tree["model"]["compile"] = True
    kept = runs.opened(tree, tmp_path)
    floor = ratio_check.check_ratio(kept.learner, collect(kept, 0), kept.terminal)
    assert floor is not None and floor < 1e-5


@pytest.mark.slow
def test_nothing_is_compiled_again_after_the_first_iteration(pipeline, tmp_path):
    """On the CPU, in float32, with evaluations and the float32 floor of the first ratio."""
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    tree["model"]["compile"] = True
    kept = runs.opened(tree, tmp_path)
    held_out, progress, frames = kept.held_out, Progress(), []
    assert held_out is not None
    floor = ratio_check.check_ratio(kept.learner, collect(kept, 0), kept.terminal)
    assert floor is not None and floor < 1e-5
    for _ in range(3):
        evaluate_held_out(kept.learner, held_out, kept.judges)
        assert iterate(kept, progress).metrics["skipped"] == 0
        frames.append((counters["stats"]["unique_graphs"], counters["frames"]["total"]))
    assert frames[0][0] > 0 and frames[0] == frames[1] == frames[2]


def test_auto_compiles_for_cuda_alone(pipeline, tmp_path):
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    for setting, cpu, cuda in ((False, False, False), ("auto", False, True), (True, True, True)):
        tree["model"]["compile"] = setting
        run = run_from(tree, "test")
        assert compiles(run, torch.device("cpu")) == cpu
        assert compiles(run, torch.device("cuda")) == cuda
    tree["model"]["compile"] = "auto"
    assert "model.compile: auto is off on cpu" in str(runs.opened(tree, tmp_path).learner)


@pytest.mark.slow
def test_auto_is_off_where_the_first_ratio_leaves_its_limit(
    pipeline, tmp_path, monkeypatch, capsys
):
    """A compiled block that is another one in sampling."""
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO | {"clip": 1e-3})
    tree["model"]["compile"] = "auto"
    kept = runs.opened(tree, tmp_path)
    block = kept.learner.policy.roots()["transformer"].transformer_blocks[0]
    wrong, floor = [0.0], ratio_check.noise_floor

    def compiled(*args, **named):
        text, image = block._call_impl(*args, **named)
        return text, image * (1 + wrong[0])

    block._compiled_call_impl = compiled
    experience = collect(kept, 0)
    assert ratio_check.uncompiled_above(kept.learner, experience, kept.terminal) is experience
    assert savings.are_compiled([block])
    wrong[0] = 0.5

    def rightly(*args):
        wrong[0] = 0.0
        return floor(*args)

    monkeypatch.setattr(ratio_check, "noise_floor", rightly)
    metrics = iterate(kept, Progress()).metrics
    assert not savings.are_compiled([block])
    said = capsys.readouterr().out
    assert "model.compile: auto: off, since compiled blocks change log-densities by" in said
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1
