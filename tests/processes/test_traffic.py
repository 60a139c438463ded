"""The bytes that an iteration sends, beside those that two processes on a CPU really send."""

from pathlib import Path

import pytest
from traffic import call_counts, traffic

from flowrl.estimate import sizes
from flowrl.settings.read import run_from
from tests.processes.test_processes import REWARDS, job
from tests.support import runs
from tests.support.process_runs import DDP, FSDP2, Job, together, told

CASES = {
    "full": (runs.FLOW_GRPO | {"kl": 0.01}, None),
    "adapters": (runs.FLOW_GRPO, {"rank": 4}),
    "matching": (runs.NFT, None),
}


def jobs_of(pipeline: Path, folder: Path) -> dict[str, Job]:
    (folder / "own.py").write_text(REWARDS)
    made: dict[str, Job] = {}
    for name, (recipe, lora) in CASES.items():
        each = job(pipeline, folder, recipe, rows_per_call=2, updates=2)
        each["settings"]["model"]["lora"] = lora
        each["settings"]["prompts"]["per_iteration"] = 4
        made[name] = {"settings": each["settings"], "iterations": 2, "counts": True}
    return made


@pytest.mark.slow
@pytest.mark.parametrize("config", [DDP, FSDP2], ids=["ddp", "fsdp2"])
def test_the_estimate_is_what_two_processes_send(pipeline, tmp_path, config):
    jobs = jobs_of(pipeline, tmp_path)
    together(config, jobs, tmp_path / "out")
    for name, each in jobs.items():
        run = run_from(each["settings"], "test")
        model = sizes.of(run.trained_model, run.algorithm().steps)
        assert model is not None
        expected = traffic(run, model, 2)
        assert expected is not None
        sent = sum(told(tmp_path / "out", name)["sent"].values())
        wanted = expected.ddp if config == DDP else expected.fsdp2
        assert sent == pytest.approx(wanted, rel=5e-3), name


def test_calls_of_an_iteration_are_counted_by_hand(pipeline, tmp_path):
    """Two draws of 4 samples in 3 steps, of which 2 are trained, in two optimizer steps."""
    recipe = {"name": "flow_grpo", "steps": 3, "group": 4, "kl": 0.0}
    tree = runs.tree(pipeline, tmp_path, recipe, updates=2)
    tree["prompts"]["per_iteration"] = 4
    found = call_counts(run_from(tree, "test"), 2, 3, 3)
    assert found.plain == 3 * 3, "8 states a step, 3 in a call"
    assert found.graded == 2 * 2 * 2, "4 inputs of each trained step in each optimizer step"
