"""Credit by how often a prompt succeeds, against subsets, densities and hand-made cases."""

from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta as beta_law

from flowrl.contrib.text_riskpo import RiskPO
from flowrl.credit.advantages import LeaveOneOut
from flowrl.credit.success import BestGap, BetaNormalize, MaxRL, PassAtK
from flowrl.errors import UserError
from tests.credit.test_text_credit import GROUP, credit, rewards
from tests.support.golden_tools import close


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_over_all_subsets(k):
    r = torch.tensor([1.0, 0, 0, 1, 0, 0], dtype=torch.float64)
    subsets = list(combinations(range(6), k))
    best = np.array([max(r[list(s)]) for s in subsets])
    loo = credit((PassAtK(k),), r, (6,))[0][:, 0]
    want = []
    for i in range(6):
        others = [j for j in range(6) if j != i]
        with_it = np.mean([max([r[i], *r[list(s)]]) for s in combinations(others, k - 1)])
        without = np.mean([max(r[list(s)]) for s in combinations(others, k)])
        want.append(k / 6 * float(with_it - without))
    assert loo.tolist() == pytest.approx(want)
    analytic = credit((PassAtK(k, "analytic", eps=0.0),), r, (6,))[0][:, 0]
    if best.std() == 0:
        assert analytic.eq(0).all()
        return
    z = (best - best.mean()) / best.std()
    want = [np.mean([z[m] for m, s in enumerate(subsets) if i in s]) for i in range(6)]
    assert analytic.tolist() == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("p", [0.1, 0.6])
@pytest.mark.parametrize(("n", "k"), [(4, 1), (5, 2), (6, 3), (6, 5), (8, 4)])
def test_pass_at_k_is_unbiased_over_all_outcomes(n, k, p):
    """The exact expectation of sum_i A_i d log P(r_i) / dp is d pass@k / dp = k (1 - p)^(k - 1)."""
    every = torch.tensor(list(product((0.0, 1.0), repeat=n)), dtype=torch.float64)
    chance = (every * p + (1 - every) * (1 - p)).prod(1)
    slope = every / p - (1 - every) / (1 - p)
    a = credit((PassAtK(k),), every.flatten(), (n,))[0][:, 0].view_as(every)
    got = (chance * (a * slope).sum(1)).sum()
    assert got.item() == pytest.approx(k * (1 - p) ** (k - 1), rel=1e-12)


def test_pass_at_k_leaves_out_groups_without_enough_scores():
    r = torch.tensor([0.0, 0, 0, 1, 1, 0, 0, 1], dtype=torch.float64)
    scored = torch.tensor([True, True, False, False, True, True, True, False])
    a = credit((PassAtK(2),), r, (4,), scored=scored)[0][:, 0]
    assert a[:4].eq(0).all(), "two scores of four: the baseline of pass@2 needs two others"
    want = credit((PassAtK(2),), r[4:7], (3,))[0][:, 0]
    close(a[4:7], want, 1e-12)


def test_pass_at_1_is_leave_one_out():
    r = (rewards() > 0.5).double()
    close(GROUP * credit((PassAtK(1),), r)[0], credit((LeaveOneOut(),), r)[0], 1e-12)
    with pytest.raises(UserError, match="reward of 0 or 1"):
        credit((PassAtK(2),), rewards())
    with pytest.raises(UserError, match="group of at least 10"):
        credit((PassAtK(9),), r)
    with pytest.raises(UserError, match="group of at least 5, not 4"):
        credit((PassAtK(4),), r)
    credit((PassAtK(4, "analytic"),), r)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=12, max_size=12))
def test_maxrl_is_the_gradient_of_log_success(outcomes):
    """The mean of A r over a group is p (1 - p) / p; groups of one outcome give exactly 0."""
    r = torch.tensor(outcomes, dtype=torch.float64)
    a = credit((MaxRL(eps=0.0),), r)[0][:, 0].view(-1, GROUP)
    for values, own in zip(r.view(-1, GROUP), a, strict=True):
        p = values.mean()
        if p in (0, 1):
            assert own.eq(0).all()
        else:
            close((own * values).mean(), 1 - p, 1e-12)
            close(own.sum(), torch.zeros(()), 1e-12)


def test_bnpo_divides_by_a_beta_density():
    r = (rewards(24, 4) > torch.tensor([0.2, 0.5, 0.8]).repeat_interleave(8)).double()
    p = r.view(3, 8).mean(1)
    size = p.mean() * (1 - p.mean()) / p.var(correction=0) - 1
    a, b = (1 + max(float(size * m) / 3, 0) for m in (p.mean(), 1 - p.mean()))
    weight = 1 / torch.as_tensor(beta_law.pdf(p.numpy(), a, b))
    assert p.min() == 0, "a group whose rate has no density"
    weight[p == 0] = 0.0
    want = (r.view(3, 8) - p[:, None]) * weight[:, None]
    got = credit((BetaNormalize(most=1e6),), r, (8,))[0][:, 0]
    close(got, want.flatten(), 1e-9)
    tight = credit((BetaNormalize(most=0.5),), r, (8,))[0][:, 0]
    close(tight, ((r.view(3, 8) - p[:, None]) * weight.clamp(max=0.5)[:, None]).flatten(), 1e-9)


def test_the_best_of_a_group_gets_its_lead():
    r = torch.tensor([0.1, 0.9, 0.4, 0.2, 0.5, 0.5, 0.1, 0.0, 1, 0, 0, 0], dtype=torch.float64)
    got = credit((BestGap(scaled=False),), r)[0][:, 0]
    want = [0, 0.5, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]
    assert got.tolist() == pytest.approx(want)
    scaled = credit((BestGap(eps=0.0),), r)[0][1, 0]
    assert scaled.item() == pytest.approx(0.5 / r[:4].std().item())


def test_riskpo_needs_whole_bundles():
    with pytest.raises(UserError, match="is not a multiple"):
        credit((RiskPO(bundle=2),), rewards())
    scored = torch.ones(12).bool()
    scored[5] = False
    with pytest.raises(UserError, match="one of its samples is unscored"):
        credit((RiskPO(bundle=3),), rewards(), scored=scored)


def test_riskpos_quantiles_are_halfway_between_the_bundles_and_the_trackers():
    """Bundles of one draw with scores 0 to 4: their 0.25 and 0.75 quantiles are 1 and 3."""
    score = torch.arange(5.0, dtype=torch.float64).view(5, 1, 1)
    rule = RiskPO(bundle=1, low=0.25, high=0.75)
    low, high = (float(part) for part in rule._quantiles(score, None))
    assert (low, high) == (1.0, 3.0)
    low, high = (float(part) for part in rule._quantiles(score, (-2.0, 7.0)))
    assert (low, high) == (-0.5, 5.0)
