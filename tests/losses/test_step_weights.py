"""Factors on denoising steps that another engine took."""

from dataclasses import replace

import pytest
import torch

from flowrl.likelihoods.rows import ENGINE, Evaluation
from flowrl.likelihoods.transition import Transition
from flowrl.losses.weights import StepMismatch
from samplers import Chain, FlowSDE, Latents, roll

AWAY = (-1.2, -0.1, 0.0, 0.4, 1.5)  # log p_old - log p_engine of each row


@pytest.mark.parametrize("mode", ["truncate", "mask", "none"])
def test_steps_of_an_engine_are_weighed_by_their_own_ratio(mode):
    """Of log-densities, whatever the ratio of the loss is."""
    likelihood, credit = Transition(ratio="ratio_norm"), torch.ones(5, 2)
    plans = Chain(FlowSDE(0.5), 5)((0.9, 0.5, 0.0), 0, 0)
    latents = Latents((3,), dtype=torch.float64)
    (made,) = roll(plans, lambda x, sigma, prompt: -x, latents, (4,), seed=0, iteration=0)
    (rows,) = likelihood.rows(made, credit, credit.bool())
    away = torch.tensor(AWAY, dtype=torch.float64)[:, None]
    old = Evaluation(torch.full_like(away, -0.7), None)
    rule = StepMismatch(likelihood, mode, high=2.0, low=0.5)
    weight, metrics = rule({"old": old}, rows)
    assert weight.eq(1).all() and metrics == {}, "the trainer's own steps"

    engine = Evaluation(old.logp - away, None)
    from_engine = rows.table.with_value(ENGINE, engine)
    weight, metrics = rule({"old": old}, replace(rows, table=from_engine))
    ratio = away.exp()
    inside = (ratio >= 0.5) & (ratio <= 2)
    wanted = {
        "truncate": ratio.clamp(0.5, 2),
        "mask": torch.where(inside, ratio, 0.0),
        "none": torch.ones_like(ratio),
    }[mode]
    torch.testing.assert_close(weight, wanted)
    torch.testing.assert_close(metrics["mismatch"], away.abs())
    torch.testing.assert_close(metrics["mismatch_weight"], wanted)
    for name in ("truncate", "mask"):
        share = metrics["mismatch_truncated" if name == "truncate" else "mismatch_masked"]
        assert share.bool().tolist() == (~inside & (name == mode)).tolist()
    effective = float(wanted.sum()) ** 2 / (5 * float(wanted.square().sum()))
    assert metrics["mismatch_effective"].flatten().tolist() == pytest.approx([effective] * 5)
