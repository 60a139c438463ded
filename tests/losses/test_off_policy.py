"""REC: each bound alone, on both of its sides, and the loss written out, entry by entry."""

import math

import pytest
import torch

from flowrl.likelihoods.rows import Evaluation, TokenRows
from flowrl.likelihoods.token import Token
from flowrl.losses.off_policy import REC

RATIOS = (0.3, 0.7, 0.9, 1.1, 1.5, 3.5)
ADVANTAGES = (-1.5, 0.0, 0.5)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-9},
        {"pull": 0.0},
        {"pull": 0.1},
        {"low": 0.6, "far_low": 0.6},
        {"far_low": 1.0},
        {"high": 2.0, "far_high": 2.0},
    ],
)
def test_settings_at_their_bounds_are_accepted(settings):
    assert REC(**settings)


def kept(keep: str, r: float, a: float) -> bool:
    """Whether an entry is trained on, with the bounds of REC by default."""
    within = 0.8 <= r <= 1.2
    if keep == "one_side":
        return not ((r > 1.2 and a > 0) or (r < 0.8 and a < 0))
    if keep == "two_side":
        return within
    if keep == "ring":
        return within or (r <= 0.4 and a >= 0) or (r >= 3 and a <= 0)
    return True


WEIGHTS = {"none": lambda r, a: 1.0, "ratio": lambda r, a: r, "advantage": lambda r, a: math.exp(a)}


@pytest.mark.parametrize("factor", WEIGHTS)
@pytest.mark.parametrize("keep", ["one_side", "two_side", "ring", "all"])
@pytest.mark.parametrize("pull", [0.0, 0.7])
def test_rec_written_out(keep, factor, pull):
    """The values, and the gradient: neither what is kept nor the weight has one."""
    cases = [(r, a) for r in RATIOS for a in ADVANTAGES]
    ratio, advantage = torch.tensor(cases, dtype=torch.float64).T[..., None]
    mask = torch.ones(len(cases), 1, dtype=torch.bool)
    count, ids = mask.sum(1), mask.long()
    rows = TokenRows(torch.arange(len(cases)), advantage, mask, None, ids, count, 1.0, None)
    logp = ratio.log().requires_grad_()
    evaluations = {
        "new": Evaluation(logp, None),
        "old": Evaluation(torch.zeros_like(logp), None),
    }
    entries = REC(keep=keep, factor=factor, pull=pull)(Token(), evaluations, rows)
    weights = [kept(keep, r, a) * WEIGHTS[factor](r, a) for r, a in cases]
    values, slopes = zip(
        *(
            (-a * w * math.log(r) + pull * math.log(r) ** 2, -a * w + 2 * pull * math.log(r))
            for (r, a), w in zip(cases, weights, strict=True)
        ),
        strict=True,
    )
    assert entries.value[:, 0].tolist() == pytest.approx(values)
    (slope,) = torch.autograd.grad(entries.value.sum(), logp)
    assert slope[:, 0].tolist() == pytest.approx(slopes)
    left_out = [float(not kept(keep, r, a)) for r, a in cases]
    assert entries.metrics["left_out"][:, 0].tolist() == left_out
