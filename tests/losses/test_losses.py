"""Losses against their formulas, entry by entry."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.rows import Evaluation, MatchingRows, Rows
from flowrl.losses import base
from flowrl.losses.base import Anchor, ClipsRatio, Counts, metric_values
from flowrl.losses.preference import Preference
from flowrl.losses.ratio import Surrogate, clipped_surrogate
from flowrl.losses.regression import NFT, Weighted

finite = st.floats(-2, 2)


class Plain(Matching):
    """A likelihood of any shape whose log-ratio is a difference."""

    def log_ratio(self, new: Evaluation, old: Evaluation, rows: Rows) -> Tensor:
        return new.logp - old.logp


def rows(advantage: Tensor, mask: Tensor | None = None) -> Rows:
    """[b t]."""
    mask = torch.ones_like(advantage, dtype=torch.bool) if mask is None else mask
    return Rows(torch.zeros(len(advantage), dtype=torch.long), advantage, mask, None)


def logp(*values: float) -> Evaluation:
    return Evaluation(torch.tensor(values, dtype=torch.float64)[:, None], None)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


@given(finite, finite, st.floats(0.01, 0.9), st.floats(0.01, 2))
def test_the_surrogate_by_cases(log_ratio, a, low, high):
    r = math.exp(log_ratio)
    want = -a * (min(r, 1 + high) if a >= 0 else max(r, 1 - low))
    got = clipped_surrogate(column(log_ratio), column(a), low, high)
    assert float(got) == pytest.approx(want, abs=1e-12)
    dual = clipped_surrogate(column(log_ratio), column(a), low, high, dual=3.5)
    assert float(dual) == pytest.approx(min(want, -3.5 * a) if a < 0 else want, abs=1e-12)


def test_a_clipped_row_whose_ratio_overflows_has_no_gradient():
    log_ratio = torch.tensor([[120.0], [0.1]], requires_grad=True)
    value = clipped_surrogate(log_ratio, torch.ones(2, 1), 0.2, 0.2)
    value.sum().backward()
    assert value[0].item() == pytest.approx(-1.2)
    assert log_ratio.grad is not None
    assert log_ratio.grad.flatten().tolist() == pytest.approx([0.0, -math.exp(0.1)])


def test_clips_are_counted_where_they_act():
    """Ratios .5 and 2, with advantages of both signs and none; bounds .8 and 1.28."""
    ratio = [0.5, 0.5, 0.5, 2.0, 2.0, 2.0, 4.0]
    says = {"new": logp(*map(math.log, ratio)), "old": logp(*[0.0] * 7)}
    batch = rows(column(1, -1, 0, 1, -1, 0, -1))
    entries = Surrogate(0.2, 0.28, dual=3.0)(Plain(), says, batch)
    m = {name: metric_values(metric) for name, metric in entries.metrics.items()}
    assert m["clipped_low"][:, 0].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert m["clipped_high"][:, 0].tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert m["clipped_dual"][:, 0].tolist() == [0, 0, 0, 0, 0, 0, 1]
    torch.testing.assert_close(m["ratio"][:, 0], torch.tensor(ratio, dtype=torch.float64))
    assert entries.denominator == "tokens"
    assert Surrogate(0.2, 0.28).clip == (0.2, 0.28)


def test_clipped_entries_give_no_gradient():
    new = torch.tensor([[0.5], [-0.5], [0.5], [-0.5]], requires_grad=True)
    says = {"new": Evaluation(new, None), "old": Evaluation(torch.zeros(4, 1), None)}
    batch = rows(torch.tensor([[1.0], [-1.0], [-1.0], [1.0]]))
    Surrogate(0.2, 0.2)(Plain(), says, batch).value.sum().backward()
    assert new.grad is not None and new.grad[:2].eq(0).all() and new.grad[2:].ne(0).all()


def test_advantages_may_differ_by_token():
    says = {"new": Evaluation(torch.zeros(2, 3), None), "old": Evaluation(torch.zeros(2, 3), None)}
    advantage = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    assert torch.equal(Surrogate(0.2, 0.2)(Plain(), says, rows(advantage)).value, -advantage)


def matching_rows(n: int = 4, advantage: Tensor | None = None) -> MatchingRows:
    rng = torch.Generator().manual_seed(2)
    x0, noise = (torch.randn(n, 3, generator=rng, dtype=torch.float64) for _ in range(2))
    sigma = torch.linspace(0.2, 0.9, n, dtype=torch.float64)
    s = sigma[:, None]
    return MatchingRows(
        prompt=torch.zeros(n, dtype=torch.long),
        advantage=torch.zeros(n, 1).double() if advantage is None else advantage,
        mask=torch.ones(n, 1, dtype=torch.bool),
        old=None,
        x=(1 - s) * x0 + s * noise,
        sigma=sigma,
        x0=x0,
        noise=noise,
    )


def velocity(batch: MatchingRows, seed: int) -> Tensor:
    return torch.randn(batch.x.shape, generator=torch.Generator().manual_seed(seed)).double()


def evaluation(v: Tensor, batch: MatchingRows) -> Evaluation:
    return Matching().evaluate(lambda *_: v, batch)


@pytest.mark.parametrize("loss", [Surrogate(0.2, 0.2), Weighted(), NFT(), NFT(0.3)])
def test_anchors_add_their_weighted_divergence(loss):
    batch = matching_rows(advantage=column(0.5, 1.0, 0.2, 2.0))
    v = {role: velocity(batch, i) for i, role in enumerate(("new", "old", "ref", "slow"))}
    says = {role: evaluation(a, batch) for role, a in v.items()}
    plain = loss(Matching(), says, batch)
    anchored = type(loss)(**{**vars(loss), "anchors": (Anchor(0.1), Anchor(2.0, "slow"))})
    assert anchored.roles == loss.roles | {"ref", "slow"}
    entries = anchored(Matching(), says, batch)
    ref, slow = ((v["new"] - v[r]).square().mean(1, keepdim=True) for r in ("ref", "slow"))
    torch.testing.assert_close(entries.value, plain.value + 0.1 * ref + 2.0 * slow)
    torch.testing.assert_close(entries.metrics["kl"], ref)
    torch.testing.assert_close(entries.metrics["kl_slow"], slow)


def test_preference_is_minus_log_sigmoid_of_the_margin():
    """Two pairs of gains 2 - 1 and 0 - 3, beta 0.5; both rows of a pair carry its loss."""
    says = {"new": logp(2, 1, 0, 3), "ref": logp(0, 0, 0, 0)}
    entries = Preference(0.5)(Plain(), says, rows(column(1, -1, 1, -1)))
    want = [math.log(1 + math.exp(-m)) for m in (0.5, 0.5, -1.5, -1.5)]
    assert entries.value[:, 0].tolist() == pytest.approx(want)
    assert entries.metrics["margin"][:, 0].tolist() == pytest.approx([0.5, 0.5, -1.5, -1.5])
    assert entries.metrics["won"][:, 0].tolist() == [1, 1, 0, 0]
    assert (entries.denominator, Preference(0.5).unit) == ("rows", 2)
    assert not isinstance(Preference(0.5), ClipsRatio) and isinstance(
        Surrogate(0.2, 0.2), ClipsRatio
    )


def test_preference_sums_gains_over_unmasked_tokens():
    new = torch.tensor([[1.0, 2.0, 9.0], [0.5, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    says = {"new": Evaluation(new, None), "ref": Evaluation(torch.zeros(2, 3), None)}
    entries = Preference(1.0)(Plain(), says, rows(torch.zeros(2, 3), mask))
    assert entries.metrics["margin"].unique().tolist() == [2.5]
    each = (entries.value * mask).sum(1) / mask.sum(1)  # "rows": a row counts once
    assert each.tolist() == pytest.approx([math.log(1 + math.exp(-2.5))] * 2)


def test_weighted_is_the_weighted_matching_error():
    batch = matching_rows(advantage=column(0.0, 1.0, 2.0, 0.5))
    v = velocity(batch, 0)
    entries = Weighted()(Matching(), {"new": evaluation(v, batch)}, batch)
    error = (v - (batch.noise - batch.x0)).square().mean(1, keepdim=True)
    torch.testing.assert_close(entries.value, batch.advantage * error)
    assert Weighted().roles == frozenset()


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_nft_written_out(beta):
    batch = matching_rows(advantage=column(-7.0, -1.0, 2.5, 0.0))
    v, old = velocity(batch, 0), velocity(batch, 1)
    entries = NFT(beta)(
        Matching(), {"new": evaluation(v, batch), "old": evaluation(old, batch)}, batch
    )
    r = column(0.0, 0.4, 0.75, 0.5)

    def error(moved: Tensor) -> Tensor:
        gap = (batch.x - batch.sigma[:, None] * moved - batch.x0).abs()
        return gap.square().mean(1, keepdim=True) / gap.mean(1, keepdim=True)

    good, bad = error(old + beta * (v - old)), error(old - beta * (v - old))
    torch.testing.assert_close(entries.value, 5 / beta * (r * good + (1 - r) * bad))
    moved = (v - old).square().mean(1, keepdim=True)
    torch.testing.assert_close(entries.metrics["moved"], moved)


def test_nfts_first_gradient_is_that_of_a_weighted_matching_error():
    """At v = v_old it is A sigma^2 / w times the gradient of the error, w = sigma mean|error|."""
    batch = matching_rows(advantage=column(-3.0, -1.0, 2.5, 4.0))
    old = velocity(batch, 1)
    v = old.clone().requires_grad_()
    says = {"new": evaluation(v, batch), "old": evaluation(old, batch)}
    NFT(0.7)(Matching(), says, batch).value.sum().backward()
    got, gap = v.grad, old - (batch.noise - batch.x0)
    s = batch.sigma[:, None]
    weight = batch.advantage * s**2 / (s * gap.abs().mean(1, keepdim=True))
    torch.testing.assert_close(got, weight * 2 * gap / gap.shape[1])


@pytest.mark.parametrize("on_device", [(), (0,), (1,), (0, 1)])
def test_rows_and_tokens_are_counted_wherever_their_masks_are(monkeypatch, on_device):
    """A mask that only the device has is counted there, with all others."""
    masks = [torch.tensor([[True, True], [False, False]]), torch.tensor([[True, False]])]
    alone = [masks[place] for place in on_device]
    here = {id(mask): mask for mask in masks if all(mask is not each for each in alone)}
    monkeypatch.setattr(base, "host_copy", lambda mask: here.get(id(mask)))
    assert Counts.of(masks) == Counts(rows=2.0, tokens=3.0)
