"""Densities and matching errors: what each compares, and that rows are the sampler's own."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit
from scipy.stats import norm
from torch import Tensor

from flowrl.likelihoods.matching import Matching, Weighting, weighting
from flowrl.likelihoods.noise_levels import Discrete, LogitNormal, PermutedGrid, Times, Uniform
from flowrl.likelihoods.rows import Evaluation, Rows, TransitionRows, equal_before, input_of, take
from flowrl.likelihoods.transition import Transition
from samplers import (
    CPS,
    DDIM,
    Chain,
    ConstantSDE,
    FlowSDE,
    Fork,
    Gaussian,
    Kernel,
    Latents,
    Ode,
    Planner,
    Rollout,
    Sampling,
    Tree,
    WanSDE,
    mean_log_prob,
    roll,
)
from tests.support.tiny import TinyFlow

SIGMAS = (0.96, 0.8, 0.55, 0.3, 0.1, 0.0)
KERNELS = [FlowSDE(0.7), ConstantSDE(0.3), CPS(0.6), WanSDE(), DDIM(1.0)]
PLANNERS = [
    Chain(FlowSDE(), 4),
    Chain(ConstantSDE(), 4, 0.5, shared_noise=True),
    Fork(FlowSDE(), 3, roots=2),
    Tree(ConstantSDE(), (0, 2), 2),
]


def model(std: float = 0.3) -> TinyFlow:
    flow = TinyFlow(3)
    torch.nn.init.normal_(flow.shift, std=std, generator=torch.Generator().manual_seed(0))
    return flow


def rolled(
    planner: Planner, draws=(5, 7, 9), keep_mean: bool = True, dtype=torch.float32
) -> Rollout:
    def velocity(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        return flow(x, sigma, torch.tensor(draws)[prompt] % 3)

    flow = model().to(dtype)
    plans = planner(SIGMAS, 3, 0)
    return roll(
        plans,
        velocity,
        Latents((2,), dtype=dtype),
        draws,
        seed=0,
        iteration=3,
        sampling=Sampling(keep_mean),
    )[0]


def rows_of(likelihood, rollout: Rollout, mask: Tensor | None = None) -> list[Rows]:
    """With random advantages that the leaves of a node share."""
    draws, columns = len(rollout.draws), []
    rng = torch.Generator().manual_seed(1)
    for nodes in rollout.columns.nodes:
        each = torch.randn(draws * nodes, generator=rng)
        columns.append(each.repeat_interleave(rollout.plan.group // nodes))
    advantage = torch.stack(columns, 1)
    mask = torch.ones_like(advantage, dtype=torch.bool) if mask is None else mask
    return list(likelihood.rows(rollout, advantage, mask))


@pytest.mark.parametrize("planner", PLANNERS)
def test_transition_rows_are_the_rollouts_edges(planner):
    rollout = rolled(planner)
    parts = rows_of(Transition(), rollout)
    trained = [k for k, step in enumerate(rollout.plan.steps) if step.train]
    assert len(parts) == len(trained) == len(rollout.edges)
    for k, edges, rows in zip(trained, rollout.edges, parts, strict=True):
        step = rollout.plan.steps[k]
        assert len(rows.prompt) == len(rollout.draws) * rollout.columns.nodes[k]
        assert rows.sigma.unique().tolist() == pytest.approx([step.sigma])
        assert rows.sigma_next.unique().tolist() == pytest.approx([step.sigma_next])
        assert torch.equal(rows.x_next, edges.x_next) and rows.old.out is None
        assert torch.equal(rows.prompt, rows.prompt.sort().values)


def test_a_row_has_its_own_nodes_advantage_and_mask():
    rollout = rolled(Tree(ConstantSDE(), (0, 2), 2), draws=(1, 2))
    advantage = torch.arange(8.0)[:, None].expand(8, 5).clone()
    advantage[:, :2] = torch.tensor([0.0, 0, 1, 1, 2, 2, 3, 3])[:, None]
    mask = torch.ones(8, 5, dtype=torch.bool)
    mask[3, 2:] = False
    parts = Transition().rows(rollout, advantage, mask)
    assert parts[0].advantage[:, 0].tolist() == [0, 1, 2, 3]
    assert parts[2].advantage[:, 0].tolist() == list(range(8))
    assert [int((~rows.mask).sum()) for rows in parts] == [0, 0, 1, 1]
    assert not parts[2].mask[3, 0]


@pytest.mark.parametrize("ratio", ["density", "ratio_norm", "cps"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_log_ratios_by_their_formulas(kernel: Kernel, ratio):
    """In terms of the noise e that was drawn and the shift d of the mean, with q the std:
    -(e d)/q ... : density mean(e d)/q - mean(d^2)/2q^2; times 2 q^2; and guard's mean(e d)."""
    rollout = rolled(Chain(kernel, 4), dtype=torch.float64)
    likelihood, other = Transition(ratio), model(0.4).double()
    for rows in rows_of(likelihood, rollout):
        assert isinstance(rows, TransitionRows) and rows.old is not None
        new = likelihood.evaluate(other, rows)
        zero = torch.zeros_like(rows.x)
        q = rows.kernel(zero, zero, rows.sigma, rows.sigma_next).std[:, None]
        old_mean = likelihood.evaluate(same(rollout), rows).out
        e, d = (rows.x_next - old_mean) / q, new.out - old_mean
        product, square = (a.mean(1, keepdim=True) for a in (e * d, d**2))
        density = product / q - square / (2 * q**2)
        want = {"density": density, "cps": 2 * q**2 * density, "ratio_norm": product}[ratio]
        got = likelihood.log_ratio(new, rows.old, rows)
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-6)


def same(rollout: Rollout):
    """The velocity that drew it."""
    flow = model().to(rollout.x0.dtype)
    return lambda x, sigma, prompt: flow(x, sigma, torch.tensor(rollout.draws)[prompt] % 3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_divergences_by_their_formulas(kernel: Kernel):
    rollout = rolled(Chain(kernel, 4), dtype=torch.float64)
    one, two = same(rollout), model(0.4).double()
    for rows in rows_of(Transition(), rollout):
        a, b = (Transition().evaluate(policy, rows) for policy in (one, two))
        g = [rows.kernel(rows.x, p(rows.x, rows.sigma, rows.prompt), rows.sigma, rows.sigma_next)
             for p in (one, two)]  # fmt: skip
        q = g[0].std[:, None]
        exact = torch.distributions.kl_divergence(
            *(torch.distributions.Normal(part.mean, q) for part in g)
        ).mean(1, keepdim=True)
        h = (rows.sigma - rows.sigma_next)[:, None]
        v = [p(rows.x, rows.sigma, rows.prompt) for p in (one, two)]
        wants = {
            "exact": exact,
            "published": exact * h,
            "velocity": (v[0] - v[1]).square().mean(1, keepdim=True),
        }
        for form, want in wants.items():
            got = Transition(kl_form=form).kl(a, b, rows)
            torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-9)


def test_ratio_norm_is_noise_times_shift():
    """Hence it has mean 0 under the old policy, and a spread that does not grow as 1 / std."""
    rows = rows_of(Transition("ratio_norm"), rolled(Chain(ConstantSDE(), 4)))[1]
    assert isinstance(rows, TransitionRows) and rows.old is not None and rows.old.out is not None
    shift = 0.01 * torch.randn(rows.x.shape, generator=torch.Generator().manual_seed(0))
    zero = torch.zeros_like(rows.x)
    std = rows.kernel(zero, zero, rows.sigma, rows.sigma_next).std
    new = mean_log_prob(Gaussian(rows.old.out + shift, std), rows.x_next)
    noise = (rows.x_next - rows.old.out) / std[:, None]
    got = Transition("ratio_norm").log_ratio(
        Evaluation(new[:, None], rows.old.out + shift), rows.old, rows
    )
    torch.testing.assert_close(got[:, 0], (noise * shift).mean(1), atol=2e-5, rtol=1e-3)


def test_only_ratio_norm_asks_for_old_means():
    assert Transition("ratio_norm").keep_mean
    assert not Transition("density").keep_mean and not Transition("cps").keep_mean
    assert not Matching().keep_mean


@pytest.mark.parametrize("likelihood", [Matching(3), Matching(3, share="sample")])
def test_matching_rows_lie_between_noise_and_sample(likelihood):
    rollout = rolled(Ode(4))
    parts = rows_of(likelihood, rollout)
    assert len(parts) == 3 and all(len(rows.prompt) == 12 for rows in parts)
    for rows in parts:
        s = rows.sigma[:, None]
        torch.testing.assert_close(rows.x, (1 - s) * rollout.x0 + s * rows.noise)
        assert torch.equal(rows.x0, rollout.x0) and rows.old is None
        assert (len(rows.sigma.unique()) == 1) == (likelihood.share == "batch")
        assert rows.sigma.max() <= SIGMAS[0]
    noises = torch.cat([rows.noise for rows in parts])
    assert len(noises.unique(dim=0)) == 36, "every row its own noise"


@pytest.mark.parametrize(
    "likelihood", [Matching(2), Matching(2, share="sample"), Matching(2, paired=True)]
)
def test_noise_and_levels_do_not_depend_on_the_batch(likelihood):
    """A draw alone, or among others: the same bits. Another iteration or seed: others."""
    credit = torch.tensor([0.0, 1.0, -1.0, 0.0])[:, None].expand(4, 5)
    whole, alone = rolled(Ode(4)), rolled(Ode(4), draws=(7,))
    mask = torch.ones(4, 5, dtype=torch.bool)
    parts = likelihood.rows(whole, credit.repeat(3, 1), mask.repeat(3, 1))
    for rows, own in zip(parts, likelihood.rows(alone, credit, mask), strict=True):
        mine = take(rows, torch.nonzero(rows.prompt == 1)[:, 0])
        assert torch.equal(mine.noise, own.noise) and torch.equal(mine.sigma, own.sigma)
        for other in (replace(alone, iteration=4), replace(alone, seed=1), replace(alone, index=1)):
            assert not torch.equal(likelihood.rows(other, credit, mask)[0].noise, own.noise)


def test_pairs_are_best_and_worst_at_one_noise_and_level():
    credit = torch.tensor([1.0, 0, -1, 0, 0, -1, 1, 0, 0, 0, 0, 0])[:, None].expand(-1, 5)
    mask = torch.ones(12, 5, dtype=torch.bool)
    rollout = rolled(Ode(4))
    parts = Matching(3, paired=True, share="sample").rows(rollout, credit, mask)
    for rows in parts:
        assert rows.advantage[:4, 0].tolist() == [1, -1, 1, -1]
        assert rows.prompt.tolist() == [0, 0, 1, 1, 2, 2]
        assert rows.mask[:, 0].tolist() == [True] * 4 + [False] * 2, "a tie is masked, not dropped"
        assert torch.equal(rows.x0[:4], rollout.x0[[0, 2, 6, 5]])
        assert torch.equal(rows.noise[::2], rows.noise[1::2])
        assert torch.equal(rows.sigma[::2], rows.sigma[1::2])
    assert len(parts[0].sigma.unique()) == 3


@given(st.sampled_from(["uniform", "t", "t2", "huber", "ghuber", "epsilon"]), st.floats(0.05, 0.95))
def test_weightings_written_out(name, t):
    e = torch.tensor([[0.0], [1e-6], [0.3], [4.0]], dtype=torch.float64)
    want = {
        "uniform": e,
        "t": t * e,
        "t2": t * t * e,
        "huber": t * ((e + 1e-10).sqrt() - 1e-5),
        "ghuber": t / 0.3 * ((e + 1e-10) ** 0.3 - 1e-10**0.3),
        "epsilon": (1 - t) ** 2 * e,
    }[name]
    got = weighting(name, 0.3)(e, torch.full((4,), t, dtype=torch.float64))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-9)


def test_the_epsilon_weighting_is_the_error_of_the_predicted_noise():
    """noise_hat = x + (1 - sigma) v, so its error is (1 - sigma) times the velocity's."""
    rows = rows_of(Matching(weight=weighting("epsilon")), rolled(Ode(4)))[0]
    got = Matching(weight=weighting("epsilon")).evaluate(model(), rows).logp[:, 0]
    v = model()(rows.x, rows.sigma, rows.prompt)
    predicted = rows.x + (1 - rows.sigma)[:, None] * v
    torch.testing.assert_close(got, -(predicted - rows.noise).square().mean(1))


def test_matching_is_done_in_the_rows_precision():
    rows = rows_of(Matching(), rolled(Ode(4)))[0]
    low = Matching().evaluate(lambda x, s, p: model()(x, s, p).bfloat16(), rows)
    assert low.logp.dtype == low.out.dtype == torch.float32
    assert Matching(weight=Weighting()).kl(low, low, rows).eq(0).all()


TIMES = [Uniform(), Uniform(0.2, 3.0), LogitNormal(), PermutedGrid()]
TIMES += [Discrete(1.0, init) for init in ("any", "with", "without")]


@given(st.sampled_from(TIMES), st.integers(1, 4), st.integers(0, 99))
def test_times_are_stratified_and_in_the_models_range(times: Times, count, seed):
    got = times(SIGMAS[:-1], count, torch.Generator().manual_seed(seed))
    assert got.shape == (count,) and got.dtype == torch.float32
    assert got.max() <= torch.tensor(SIGMAS[0]) and got.min() > 0
    if isinstance(times, Discrete | PermutedGrid):
        assert len(got.unique()) == count
        assert set(got.tolist()) <= set(torch.tensor(SIGMAS[:-1]).tolist())
    first = torch.tensor(SIGMAS[0])
    if isinstance(times, Discrete):
        assert not (times.init == "without" and (got == first).any())
        assert not (times.init == "with" and not (got == first).any())
    if times == Uniform():
        strata = (got.clamp(max=0.9599) * count).floor()
        assert strata.unique().numel() == count or SIGMAS[0] < 1 - 1 / count


def by_shift(t: np.ndarray, shift: float) -> np.ndarray:
    return shift * t / (1 + (shift - 1) * t)


@pytest.mark.parametrize(
    ("times", "quantile"),
    [
        (Uniform(), lambda q: q),
        (Uniform(0.2, 3.0), lambda q: by_shift(0.2 + 0.8 * q, 3.0)),
        (LogitNormal(3.0), lambda q: by_shift(expit(norm.ppf(q)), 3.0)),
        (LogitNormal(1.0, 0.3), lambda q: np.maximum(0.3, expit(norm.ppf(q)))),
    ],
)
def test_times_have_their_distribution(times: Times, quantile):
    """With many levels, one from each stratum, the sorted ones lie between the quantiles."""
    count = 200
    got = np.sort(times([1.0, 0.5], count, torch.Generator().manual_seed(0)).double().numpy())
    edges = quantile(np.linspace(1e-6, 1 - 1e-6, count + 1))
    assert (edges[:-1] - 1e-5 <= got).all() and (got <= edges[1:] + 1e-5).all()


def test_neighbours_with_the_same_bits_have_the_same_number():
    a, b = torch.tensor([[1.0, 2.0], [1.0, 3.0]])
    assert equal_before(torch.stack([a, a, b, b, b, a])).tolist() == [0, 0, 1, 1, 1, 2]
    assert equal_before(a[None]).tolist() == [0] and equal_before(torch.empty(0, 2)).tolist() == []


def test_rows_of_one_state_share_an_input_but_not_where_rows_belong_together():
    rows = rows_of(Transition(), rolled(Fork(FlowSDE(), 3, roots=2)))[0]
    state = torch.tensor([5, 5, 7, 5, 7, 7])
    rows = replace(take(rows, torch.zeros(6, dtype=torch.long)), state=state)
    assert input_of(rows).tolist() == [0, 0, 1, 0, 1, 1]
    assert input_of(rows, together=2).tolist() == [0, 0, 1, 1, 2, 2]
    assert input_of(replace(rows, state=None)).tolist() == [0, 1, 2, 3, 4, 5]


def test_take_goes_through_every_tensor():
    rows = rows_of(Transition("ratio_norm"), rolled(Chain(FlowSDE(), 4)))[0]
    part = take(rows, torch.tensor([3, 1]))
    assert torch.equal(part.x, rows.x[[3, 1]]) and part.kernel == rows.kernel
    assert torch.equal(part.old.logp, rows.old.logp[[3, 1]])
    assert torch.equal(part.old.out, rows.old.out[[3, 1]])


def test_the_ratio_of_matching_is_fpos_of_one_pair():
    """exp(loss_old - loss_new) at the same noise and level (arXiv:2507.21053, eq. 6 with N = 1), in
    plain float64 loops over a sample's numbers."""
    rows, old, new = rows_of(Matching(share="sample"), rolled(Ode(4)))[0], model(), model(0.9)
    with torch.no_grad():
        first, second = (
            Matching().evaluate(lambda x, s, p, flow=flow: flow(x, s, p % 3), rows)
            for flow in (old, new)
        )
        velocities = [flow(rows.x, rows.sigma, rows.prompt % 3).double() for flow in (old, new)]
    ratio = Matching().log_ratio(second, first, rows)[:, 0].exp()
    for i in range(len(ratio)):
        x0, noise = (a[i].double().flatten().tolist() for a in (rows.x0, rows.noise))
        losses = []
        for v in velocities:
            each = zip(v[i].flatten().tolist(), x0, noise, strict=True)
            errors = [(found - (e - clean)) ** 2 for found, clean, e in each]
            losses.append(sum(errors) / len(errors))
        assert float(ratio[i]) == pytest.approx(math.exp(losses[0] - losses[1]), rel=1e-4)
    assert float((ratio - 1).abs().max()) > 0.01


def test_a_pair_of_equal_samples_is_masked_whatever_its_credit():
    """Its gradients cancel but for rounding: the only signal in the data is none."""
    rollout = rolled(Ode(4))
    x0 = rollout.x0.clone()
    x0[2] = x0[0]
    credit = torch.tensor([1.0, 0, -1, 0] * 3)[:, None].expand(-1, 5)
    mask = torch.ones(12, 5, dtype=torch.bool)
    for rows in Matching(2, paired=True).rows(replace(rollout, x0=x0), credit, mask):
        assert rows.mask[:, 0].tolist() == [False] * 2 + [True] * 4
