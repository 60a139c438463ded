"""The share of uncertain tokens is one of the whole iteration, however its rows are split up."""

import pytest
import torch
from torch import Tensor

from flowrl.iteration import update
from flowrl.losses.weights import share_bound
from flowrl.session.progress import Progress
from tests.support import iterations, text_runs, tiny_lm
from tests.support.iterations import collect

RECIPE = {"name": "text_forking", "length": 6, "group": 6, "share": 0.3}


def gradients(model, folder, monkeypatch, rows: int, **train) -> list[list[Tensor]]:
    """The gradients of an iteration's optimizer steps, whose weights hardly move."""
    session = text_runs.session(model, folder, RECIPE, rows_per_call=rows, lr=1e-9, **train)
    steps: list[list[Tensor]] = []
    step = update.optimizer_step

    def recorded(learner, progress, tally):
        parameters = learner.policies.parameters.values()
        steps.append([p.grad.clone() for p in parameters if p.grad is not None])
        return step(learner, progress, tally)

    monkeypatch.setattr(update, "optimizer_step", recorded)
    metrics = iterations.update(session.learner, collect(session, 0), Progress()).metrics
    monkeypatch.setattr(update, "optimizer_step", step)
    assert 0.25 < metrics["uncertain"] < 0.4
    return steps


@pytest.mark.long
def test_the_gradient_does_not_depend_on_the_rows_of_a_call(tmp_path, monkeypatch):
    model = tiny_lm.write(tmp_path)
    for train in ({"updates": 2}, {"recompute_old": True}):
        whole = gradients(model, tmp_path, monkeypatch, 64, **train)
        for rows in (5,):
            parts = gradients(model, tmp_path, monkeypatch, rows, **train)
            for step, other in zip(whole, parts, strict=True):
                size = torch.cat([g.flatten() for g in step]).norm()
                difference = torch.cat(
                    [(g - o).flatten() for g, o in zip(step, other, strict=True)]
                )
                assert float(difference.norm() / size) < 1e-5


def test_the_bound_is_the_published_quantile():
    rng = torch.Generator().manual_seed(0)
    for n in (1, 2, 7, 10, 11, 64):
        values = torch.randn(n, generator=rng, dtype=torch.float64)
        for share in (0.1, 0.2, 0.5, 1.0):
            kept = values >= share_bound(values, share)
            quantile = torch.quantile(values, 1 - share)
            assert torch.equal(kept, values >= quantile - 1e-12)
