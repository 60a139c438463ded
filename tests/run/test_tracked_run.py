"""Runs whose credit remembers: what a tracker knows is in every checkpoint, and comes back."""

import json

import pytest
import torch

from flowrl.contrib.text_riskpo import ScoreQuantiles
from flowrl.credit.trackers import TRACKER, PromptValues
from flowrl.run.save import checkpoint
from flowrl.run.watch.alarms import Alarms
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from tests.support import text_runs, tiny_lm
from tests.support.iterations import collect, update

STREAM = {"name": "text_stream", "length": 6, "group": 2}
RISK = {"name": "text_riskpo", "length": 6, "group": 4, "bundle": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return tiny_lm.write(tmp_path_factory.mktemp("tracked") / "lm")


def iterate(kept: Session, first: int, count: int) -> list[tuple[int, ...]]:
    drawn = []
    for iteration in range(first, first + count):
        experience = collect(kept, iteration)
        drawn.append(tuple(experience.rows[0].ids.flatten().tolist()))
        update(kept.learner, experience, Progress(iteration))
    return drawn


@pytest.mark.parametrize("recipe", [STREAM, RISK], ids=lambda r: r["name"])
def test_a_resumed_run_knows_what_the_unbroken_one_knows(model, tmp_path, recipe):
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    whole = text_runs.session(model, tmp_path / "whole", recipe)
    unbroken = iterate(whole, 0, 5)
    broken = text_runs.session(model, tmp_path / "broken", recipe)
    assert iterate(broken, 0, 2) == unbroken[:2]
    checkpoint.save_checkpoint(broken, Progress(iteration=2), Alarms())
    saved = checkpoint.newest(broken.folder)
    assert saved is not None
    state = json.loads((saved / "state.json").read_text())["tracker"]
    assert state == broken.table[TRACKER].state() and state

    again = text_runs.session(model, tmp_path / "broken", recipe)
    assert again.table[TRACKER].state() == {}
    checkpoint.restore(again, saved, Alarms())
    assert iterate(again, 2, 3) == unbroken[2:], "the same prompts, the same texts"
    assert again.table[TRACKER].state() == whole.table[TRACKER].state()


@pytest.mark.parametrize("group", [1, 2])
def test_a_tracker_learns_from_what_was_scored(model, tmp_path, group):
    kept = text_runs.session(model, tmp_path, STREAM | {"group": group})
    assert isinstance(kept.table[TRACKER], PromptValues) and not kept.table[TRACKER].known
    experience = collect(kept, 0)
    scores = experience.scores.values[:, 0].double().view(-1, group).mean(1)
    values = [value for value, _ in kept.table[TRACKER].known.values()]
    assert len(values) == 3, "three prompts an iteration, no prompt twice"
    want = [0.5 + group * (float(s) - 0.5) / (0.9 * 10 + group) for s in scores]
    assert sorted(values) == pytest.approx(sorted(want))
    (rows,) = experience.rows
    each = rows.advantage[:, 0].view(-1, group).mean(1)
    assert each.argmax() == scores.argmax() and each.abs().max() > 0


def test_quantiles_reach_the_credit(model, tmp_path):
    kept = text_runs.session(model, tmp_path, RISK)
    assert isinstance(kept.table[TRACKER], ScoreQuantiles) and kept.table[TRACKER].quantiles is None
    first = collect(kept, 0).scores.values[:, 0].double().view(3, 4).sum(0)
    want = torch.quantile(first, torch.tensor([0.2, 0.8], dtype=torch.float64)).tolist()
    assert list(kept.table[TRACKER].quantiles or ()) == pytest.approx(want)
