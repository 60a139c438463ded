"""An iteration waits for a GPU a known number of times. What stands for the GPU is in
tests/support/transfers.py."""

from dataclasses import replace

import pytest
import torch

from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.run.save.checkpoint import Progress
from flowrl.run.state.session import Session
from flowrl.run.train import iterate
from flowrl.run.watch.alarms import Alarms
from tests.support import runs
from tests.support.transfers import DEVICE, Transfers


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return runs.write_pipeline(tmp_path_factory.mktemp("pipeline"))


def transfers(kept: Session) -> Transfers:
    """Those of an iteration behind the first, which proves the pipeline."""
    progress, alarms, policy = Progress(), Alarms(), kept.learner.policy
    iterate(kept, progress, alarms)
    assert isinstance(policy, PipelinePolicy)
    policy.device, starts = DEVICE, policy.loop._starts
    starts |= {steps: replace(start, device=DEVICE) for steps, start in starts.items()}
    modules = [m for m in policy.pipe.components.values() if isinstance(m, torch.nn.Module)]
    with Transfers(p for m in modules for p in (*m.parameters(), *m.buffers())) as seen:
        iterate(kept, progress, alarms)
    return seen


def test_the_count_sees_what_waits():
    weight = torch.ones(3)
    with Transfers([weight]) as seen:
        here = torch.ones(3)
        assert float(here.sum()) == 3 and here.device != weight.device == DEVICE
        value = (here.to(weight.device) * 2 + weight).sum()
        float(value)
        weight[weight > 0].cpu().tolist()
    assert [sum(seen.read.values()), sum(seen.sent.values())] == [3, 1]


@pytest.mark.parametrize(
    ("recipe", "rows", "waits"),
    [
        (runs.FLOW_GRPO, 64, 66),
        pytest.param(runs.FLOW_GRPO, 4, 70, marks=pytest.mark.slow),
        pytest.param(runs.NFT, 64, 64, marks=pytest.mark.slow),
    ],
)
def test_an_iteration_waits_a_known_number_of_times(pipeline, tmp_path, recipe, rows, waits):
    """Two for each velocity (its levels, its rows' prompts) and one for each further call of the
    network; all others are of the iteration, its optimizer steps and its rows."""
    kept = runs.session(pipeline, tmp_path, recipe, updates=2, rows_per_call=rows)
    seen = transfers(kept)
    assert seen.read.total() == waits, seen.read.most_common()
