"""Losses on groups and trust regions, against formulas written out."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowrl.contrib.fdfo import Quadratic
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.rows import Evaluation, MatchingRows, TransitionRows
from flowrl.likelihoods.transition import Transition
from flowrl.losses.divergence import TrustRegion
from flowrl.losses.preference import CentredReward, GroupPreference
from samplers import CPS, FlowSDE

RNG = torch.Generator().manual_seed(5)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RNG, dtype=torch.float64)


def matching_rows(n: int) -> MatchingRows:
    mask = torch.ones(n, 1, dtype=torch.bool)
    x0, eps, sigma = noise(n, 3, 2), noise(n, 3, 2), torch.full((n,), 0.6, dtype=torch.float64)
    return MatchingRows(
        torch.zeros(n, dtype=torch.long), noise(n, 1), mask, None, x0, sigma, x0, eps
    )


def says(likelihood, rows, v: Tensor) -> Evaluation:
    return likelihood.evaluate(lambda *_: v, rows)


def test_the_gradient_is_that_of_the_groups_logistic_loss():
    """softplus(beta / G sum A (d - d_ref)) per group, with beta / G left out and the mean over rows
    for the sum over groups."""
    rows, likelihood = matching_rows(8), Matching(together=4, same_noise=True)
    v, ref = noise(8, 3, 2).requires_grad_(), noise(8, 3, 2)
    given = {"new": says(likelihood, rows, v), "ref": says(likelihood, rows, ref)}
    GroupPreference(4, beta=2.0, clip_at=None)(likelihood, given, rows).value.mean().backward()
    target = rows.noise - rows.x0
    w = v.detach().clone().requires_grad_()
    d, d_ref = ((each - target).square().flatten(1).mean(1) for each in (w, ref))
    margin = 2.0 / 4 * (rows.advantage[:, 0] * (d - d_ref)).view(2, 4).sum(1)
    (torch.nn.functional.softplus(margin).sum() * (4 / 2.0) / 8).backward()
    torch.testing.assert_close(v.grad, w.grad)


def test_a_masked_sample_is_in_neither_sum():
    """Of a group of three, the third is not scored."""
    rows = matching_rows(3)
    rows = replace(rows, mask=torch.tensor([[True], [True], [False]]))
    for loss in (GroupPreference(3, clip_at=None), CentredReward(3, kl=0.0, temperature=0.3)):
        values = []
        for size in (1.0, 9.0):
            like = Matching(together=3)
            v = torch.cat([rows.noise[:2], rows.noise[2:] * size])
            given = {role: says(like, rows, v if role == "new" else rows.x0) for role in
                     ("new", "ref", "slow")}  # fmt: skip
            values.append(loss(like, given, rows).value[:2])
        torch.testing.assert_close(*values)


@pytest.mark.parametrize("kind", ["mse", "bce"])
@pytest.mark.parametrize("temperature", [None, 0.5])
def test_a_constant_in_all_advantages_or_rewards_changes_nothing(kind, temperature):
    rows, likelihood = matching_rows(6), Matching(together=6)
    loss = CentredReward(6, kl=0.0, kind=kind, temperature=temperature, adaptive=False)
    v, slow = noise(6, 3, 2), noise(6, 3, 2)
    given = {"new": says(likelihood, rows, v), "slow": says(likelihood, rows, slow)}
    plain = loss(likelihood, given, rows).value
    higher = replace(rows, advantage=rows.advantage + 1.5)
    torch.testing.assert_close(loss(likelihood, given, higher).value, plain)
    implicit = loss.implicit(given, rows.noise - rows.x0)
    errors = [(u - rows.noise + rows.x0).square().flatten(1).mean(1) for u in (slow, v)]
    torch.testing.assert_close(implicit[:, 0], errors[0] - errors[1])
    still = loss(likelihood, {"new": given["slow"], "slow": given["slow"]}, rows)
    assert still.metrics["implicit_reward"].eq(0).all()


def test_the_hard_choice_is_a_softmax_and_equal_weights():
    rows, likelihood = matching_rows(4), Matching(together=4)
    rows = replace(rows, advantage=torch.tensor([[-6.0], [2.0], [1.0], [3.0]]).double())
    given = {r: says(likelihood, rows, noise(4, 3, 2)) for r in ("new", "slow")}
    loss = CentredReward(4, kl=0.0, temperature=0.0)
    r, a = (part[:, 0].detach() for part in (
        loss.implicit(given, rows.noise - rows.x0), loss.wanted(rows.advantage)))  # fmt: skip
    assert a[0] == 0
    want = 0.0
    for weight in (torch.cat([a[:1] * 0, a[1:].softmax(0)]), torch.full_like(a, 0.25)):
        centred = [part - (weight * part).sum() for part in (r, a)]
        want = want + 0.5 * 5 * (centred[0] - centred[1]).square()
    torch.testing.assert_close(loss(likelihood, given, rows).value[:, 0], want)


def transition_rows(kernel, advantage: Tensor) -> TransitionRows:
    n = len(advantage)
    at, to = (torch.full((n,), s, dtype=torch.float64) for s in (0.7, 0.5))
    mask = torch.ones(n, 1, dtype=torch.bool)
    x, v = noise(n, 3, 2), noise(n, 3, 2)
    g = kernel(x, v, at, to)
    x_next = g.mean + g.std.view(-1, 1, 1) * noise(n, 3, 2)
    rows = TransitionRows(
        torch.zeros(n, dtype=torch.long), advantage[:, None], mask, None, x, x_next, at, to, kernel
    )
    return replace(rows, old=Transition(means=True).evaluate(lambda *_: v, rows))


@pytest.mark.parametrize("kernel", [FlowSDE(0.7), CPS(0.6)])
def test_a_trust_region_stops_what_leads_out_of_it(kernel):
    """Two rows are moved towards what they drew (the ratio rises) and two away from it, each with a
    good and a bad advantage: the good one that rises and the bad one that falls are stopped."""
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    rows, likelihood = transition_rows(kernel, advantage), Transition(means=True)
    old = rows.old
    assert old is not None and old.out is not None
    step = torch.tensor([0.1, 0.1, -0.1, -0.1], dtype=torch.float64).view(-1, 1, 1)
    mean = old.out + step * (rows.x_next - old.out)
    q = kernel(rows.x, rows.x, rows.sigma, rows.sigma_next).std
    logp = -((rows.x_next - mean) / q.view(-1, 1, 1)).square().flatten(1).mean(1)[:, None] / 2
    logp = logp - q.log()[:, None] - 0.5 * torch.log(torch.tensor(2 * torch.pi))
    new = Evaluation(logp, mean)
    apart = (mean - old.out).square().flatten(1).mean(1) / (2 * q**2)
    for most, stopped in ((float(apart.min()) / 2, [True, False, False, True]), (1e9, [False] * 4)):
        entries = TrustRegion(most=most)(likelihood, {"new": new, "old": old}, rows)
        torch.testing.assert_close(entries.metrics["divergence"][:, 0], apart)
        want = -advantage * (logp - old.logp)[:, 0].exp()
        want = torch.where(torch.tensor(stopped), 0.0, want)
        torch.testing.assert_close(entries.value[:, 0], want)
    near = TrustRegion(most=1e-12)(likelihood, {"new": old, "old": old}, rows)
    torch.testing.assert_close(near.value[:, 0], -advantage)


def test_a_stopped_row_whose_ratio_overflows_has_no_gradient():
    rows = transition_rows(FlowSDE(0.7), torch.ones(1, dtype=torch.float64))
    old = rows.old
    assert old is not None and old.out is not None
    logp = (old.logp + 800).requires_grad_()
    given = {"new": Evaluation(logp, old.out + 1.0), "old": old}
    TrustRegion(most=1e-6)(Transition(means=True), given, rows).value.sum().backward()
    assert logp.grad is not None and logp.grad.item() == 0


def test_the_first_order_test_reads_the_change_of_the_divergence():
    """log r a little above 0, but below D: by the ratio a good sample leads away, by D it does
    not."""
    rows = transition_rows(FlowSDE(0.7), torch.ones(1, dtype=torch.float64))
    likelihood = Transition(means=True)
    old = rows.old
    assert old is not None and old.out is not None
    new = Evaluation(old.logp + 1e-3, old.out + 1.0)
    given = {"new": new, "old": old}
    assert TrustRegion(most=1e-6)(likelihood, given, rows).value.item() == 0
    kept = TrustRegion(most=1e-6, away="first_order")(likelihood, given, rows)
    assert kept.metrics["divergence"].item() > 1e-3 and kept.value.item() < 0


def test_the_quadratic_penalty_has_its_minimum_at_the_bound():
    rows = matching_rows(2)
    rows = replace(rows, advantage=torch.tensor([[2.0], [-0.5]], dtype=torch.float64))
    old = Evaluation(torch.zeros(2, 1, dtype=torch.float64), None)
    for r, flat in ((1.0, False), (1.3, True), (0.7, True)):
        logp = torch.full((2, 1), r, dtype=torch.float64).log().requires_grad_()
        given = {"new": Evaluation(logp, None), "old": old}
        value = Quadratic(bound=0.3)(Matching(), given, rows).value
        want = [-r * a + abs(a) / 0.6 * (r - 1) ** 2 for a in (2.0, -0.5)]
        assert value[:, 0].tolist() == pytest.approx(want)
        (gradient,) = torch.autograd.grad(value.sum(), logp)
        still = gradient[0 if r > 1 else 1].abs() < 1e-9
        assert bool(still) == flat and (flat or torch.allclose(gradient, -rows.advantage))
