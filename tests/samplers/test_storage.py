"""States may be stored in half the bytes, or elsewhere: what is stored is what the sampler used."""

import pytest
import torch

from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.rows import restored, take
from flowrl.likelihoods.transition import Transition
from samplers import Chain, FlowSDE, Latents, Ode, Sampling, Tree, roll
from samplers.storage import Storage
from tests.support.levels import shifted_levels

SHAPE = (2, 5)
LEVELS = shifted_levels(4)
CHAIN, TREE = Chain(FlowSDE(0.7), 4), Tree(FlowSDE(0.7), (0, 1))
WHOLE = Storage()
HALF = Storage(torch.bfloat16)
CPU = torch.device("cpu")
AWAY = Storage(device=torch.device("meta"))  # a device that is not the one of computation


def velocity(x, sigma, prompt):
    return torch.tanh(x) * sigma[:, None, None] + 0.1 * prompt[:, None, None]


def rolled(plan, storage, keep_mean=False):
    latents = Latents(SHAPE, storage=storage)
    plans = plan(LEVELS, 0, 0)
    sampling = Sampling(keep_mean)
    return roll(plans, velocity, latents, (0, 1), seed=0, iteration=0, sampling=sampling)[0]


def credited(likelihood, rollout):
    n, k = len(rollout.x0), len(rollout.plan.steps)
    return likelihood.rows(rollout, torch.ones(n, k), torch.ones(n, k, dtype=torch.bool))


def states(rollout) -> int:
    """Bytes of all stored states, each once."""
    found = {id(x): x for edge in rollout.edges for x in (edge.x, edge.x_next)}
    return sum(x.numel() * x.element_size() for x in found.values())


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_halves_states_and_the_ratio_stays_exactly_one(plan, dtype):
    plain, half = rolled(plan, WHOLE), rolled(plan, Storage(dtype))
    assert states(plain) == 2 * states(half) > 0
    for a, b in zip(half.edges, half.edges[1:], strict=False):
        assert len(b.x) > len(a.x_next) or b.x is a.x_next  # one state, kept once
    for rows in credited(Transition(), half):
        assert rows.x.dtype == rows.x_next.dtype == dtype and rows.sigma.dtype == torch.float32
        found = restored(take(rows, torch.arange(len(rows.x))), CPU)
        again = Transition().evaluate(velocity, found)
        assert torch.equal(again.logp, rows.old.logp)
    moved = (plain.x0 - half.x0).abs().max()
    assert 0 < moved < 0.1  # another sample, by its rounding


def test_evaluations_are_not_rounded():
    assert torch.equal(rolled(Ode(2), WHOLE).x0, rolled(Ode(2), HALF).x0)


def test_matching_rows_are_halved_and_agree_with_themselves():
    plain, half = (
        credited(Matching(levels_per_sample=2), rolled(Ode(2), s)) for s in (WHOLE, HALF)
    )
    for whole, rows in zip(plain, half, strict=True):
        found = restored(rows, CPU)
        for name in ("x", "x0", "noise"):
            few, many = getattr(rows, name), getattr(whole, name)
            assert 2 * few.element_size() == many.element_size()
            torch.testing.assert_close(getattr(found, name), many, rtol=0.01, atol=0.01)
        assert found.x.dtype == torch.float32 and torch.equal(rows.sigma, whole.sigma)
        assert rows.x0 is half[0].x0  # once for all draws


def test_states_wait_elsewhere_and_everything_else_stays():
    plain, away = rolled(CHAIN, WHOLE, True), rolled(CHAIN, AWAY, True)
    assert torch.equal(plain.x0, away.x0)
    likelihood = Transition(means=True)
    for rows, other in zip(credited(likelihood, away), credited(likelihood, plain), strict=True):
        assert rows.x.is_meta and rows.x_next.is_meta and rows.old.out.is_meta
        for name in ("prompt", "advantage", "mask", "sigma", "sigma_next"):
            assert torch.equal(getattr(rows, name), getattr(other, name)), name
        assert torch.equal(rows.old.logp, other.old.logp)
        some = take(rows, torch.tensor([2, 0]))
        assert some.x.is_meta and torch.equal(some.mask, other.mask[[2, 0]])


def test_a_call_of_the_update_takes_its_states_to_where_it_computes():
    (rows, *_) = credited(Transition(means=True), rolled(CHAIN, HALF, True))
    assert restored(take(rows, torch.arange(3)), CPU).x.dtype == torch.float32
    moved = rows.__class__(**{**vars(rows), "sigma": rows.sigma.to("meta")})
    found = restored(moved, torch.device("meta"))
    assert found.x.is_meta and found.x_next.is_meta and found.old.out.is_meta
    (rows, *_) = credited(Transition(), rolled(CHAIN, WHOLE))
    assert restored(rows, CPU) is rows  # nothing is copied where nothing is set
