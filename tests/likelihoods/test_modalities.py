"""States with parts: noise, densities, matching errors and credit by part, beside plain loops."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.credit.advantages import Estimator, Standardize
from flowrl.credit.values import Context
from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching, Weighting
from flowrl.likelihoods.rows import MatchingRows, TransitionRows
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.losses.regression import NFT
from flowrl.settings.sections.recipe_kinds import recipe_kind
from rewards.types import Scores
from samplers import Chain, FlowSDE, Latents, Ode, Rollout, roll
from samplers.kernels import mean_over
from samplers.layout import Layout
from samplers.noise import cpu_noise, normal

AV = Layout(("video", "audio"), ((2, 3), (4,)))
SIZES, DRAWS, STEPS = (6, 4), (5, 9), (1.0, 0.7, 0.4, 0.0)


def field(scale: float) -> Any:
    """A velocity whose parts do not see each other."""

    def velocity(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        return scale * x.sin() * sigma.view(-1, *[1] * (x.ndim - 1)) + 0.1 * prompt.view(
            -1, *[1] * (x.ndim - 1)
        ).to(x)

    return velocity


def rolled(plan: Any, layout: Layout | None = AV, size: tuple[int, ...] = (10,)) -> Rollout:
    latents = Latents(size, dtype=torch.float64, layout=layout)
    (made,) = roll(plan(STEPS, 0, 0), field(0.7), latents, DRAWS, seed=3, iteration=2)
    return made


def test_a_state_is_packed_and_unpacked_in_order():
    parts = [torch.randn(3, 2, 3), torch.randn(3, 4)]
    x = AV.pack(parts)
    assert x.shape == (3, 10) and AV.size == 10
    assert all(torch.equal(a, b) for a, b in zip(AV.unpack(x), parts, strict=True))
    assert torch.allclose(AV.means(x), torch.stack([p.flatten(1).mean(1) for p in parts], 1))


def test_noise_belongs_to_a_sample_and_a_part():
    """A longer video, or no other samples, leave the sound's noise as it is."""
    keys = [(0, 1, "root", 0), (0, 2, "root", 0)]
    x = cpu_noise(keys, (AV.size,), AV)
    longer = cpu_noise(keys[1:], (25,), Layout(AV.names, ((7, 3), (4,))))
    assert torch.equal(x[1, 6:], longer[0, 21:])
    assert torch.equal(x[:, 6:], normal([(*key, "audio") for key in keys], (4,)))
    assert not torch.equal(x[0, :4], x[0, 6:])


@pytest.mark.parametrize("plan", [Ode(2), Chain(FlowSDE(0.5), 2)], ids=["ode", "sde"])
def test_parts_that_do_not_see_each_other_walk_alone(plan: Any):
    """The walk of a packed state is the walks of its parts, with their own noise."""
    whole = AV.unpack(rolled(plan).x0)
    for at, (name, shape) in enumerate(zip(AV.names, AV.shapes, strict=True)):
        alone = rolled(plan, Layout((name,), (shape,)), (math.prod(shape),)).x0
        torch.testing.assert_close(whole[at].flatten(1), alone, rtol=1e-12, atol=1e-12)


def test_means_of_parts_leave_given_entries_out():
    values = torch.arange(10.0).view(1, 10)
    free = torch.ones(1, 10, dtype=torch.bool)
    free[0, [0, 1, 9]] = False
    torch.testing.assert_close(mean_over(values, free, AV), torch.tensor([[3.5, 7.0]]))


def log_density(row: int, part: slice, rows: TransitionRows, v: Tensor, eta: float) -> float:
    """Flow-GRPO's step (arXiv:2505.05470, eq. 8-9), number by number: mean over a part's dims."""
    s, n = float(rows.sigma[row]), float(rows.sigma_next[row])
    g = eta * math.sqrt(s / (1 - (n if s == 1 else s)))
    h, total = s - n, 0.0
    places = range(part.start, part.stop)
    for i in places:
        x, u, y = (float(t[row, i]) for t in (rows.x, v, rows.x_next))
        mean = x - h * (u + g**2 * (x + (1 - s) * u) / (2 * s))
        std = g * math.sqrt(h)
        total += -((y - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2
    return total / len(places)


CUTS = (slice(0, 6), slice(6, 10))


@pytest.mark.parametrize("parts", [(), ("video", "audio"), ("audio", "video")])
def test_log_probabilities_and_their_gradient_are_those_of_plain_loops(parts: tuple[str, ...]):
    """Of all dims for one advantage, of each part's own for one each, in the layout's order."""
    made = rolled(Chain(FlowSDE(0.5), 2))
    columns = max(1, len(parts))
    advantage = torch.randn(4, 3 * columns, dtype=torch.float64)
    likelihood = Transition(parts=parts)
    edge = made.edges[1]
    rows = likelihood.rows(made, advantage, torch.ones_like(advantage).bool())[1]
    assert rows.old is not None
    v = field(0.9)(rows.x, rows.sigma, rows.prompt).requires_grad_()
    new = likelihood.evaluate(lambda *_: v, rows)
    same = likelihood.evaluate(field(0.7), rows)
    torch.testing.assert_close(same.logp, rows.old.logp, rtol=1e-12, atol=1e-12)  # ratio 1
    cuts = CUTS if parts else (slice(0, 10),)
    wanted = [[log_density(r, cut, rows, v, 0.5) for cut in cuts] for r in range(4)]
    torch.testing.assert_close(new.logp, torch.tensor(wanted, dtype=torch.float64))
    order = [parts.index(name) for name in AV.names] if parts else [0]
    mine = advantage.view(4, 3, columns)[:, edge.step][:, order]
    assert torch.equal(rows.advantage, mine)
    value = Surrogate(0.5, 0.5)(likelihood, {"new": new, "old": rows.old}, rows).value
    value.sum().backward()
    slope = torch.zeros_like(v)
    for r in range(4):
        s, n = float(rows.sigma[r]), float(rows.sigma_next[r])
        g = 0.5 * math.sqrt(s / (1 - s))
        for c, cut in enumerate(cuts):
            ratio, a = math.exp(wanted[r][c] - float(rows.old.logp[r, c])), float(mine[r, c])
            assert 0.5 < ratio < 1.5
            for i in range(cut.start, cut.stop):
                x, u, y = (float(t[r, i]) for t in (rows.x, v, rows.x_next))
                h = s - n
                mean = x - h * (u + g**2 * (x + (1 - s) * u) / (2 * s))
                by = -h * (1 + g**2 * (1 - s) / (2 * s))
                slope[r, i] = -a * ratio * (y - mean) / (g**2 * h) * by / (cut.stop - cut.start)
    torch.testing.assert_close(v.grad, slope)


def matching_rows(likelihood: Matching, advantage: Tensor) -> MatchingRows:
    made = rolled(Ode(2))
    (rows, *_) = likelihood.rows(made, advantage, torch.ones_like(advantage).bool())
    return rows


def test_nft_by_part_is_two_regressions():
    """arXiv:2509.16117 with its own r for each part (arXiv:2605.12480), and its slope in the
    velocity, where the size of an error is a constant, number by number."""
    torch.manual_seed(0)
    likelihood = Matching(1, parts=("video", "audio"))
    advantage = torch.randn(4, 6, dtype=torch.float64)
    rows = matching_rows(likelihood, advantage)
    assert torch.equal(rows.advantage, advantage.view(4, 3, 2)[:, -1])
    v, old = (torch.randn(4, 10, dtype=torch.float64, requires_grad=True) for _ in range(2))
    evaluated = {"new": likelihood.evaluate(lambda *_: v, rows)}
    evaluated["old"] = likelihood.evaluate(lambda *_: old, rows)
    beta, most = 0.3, 5.0
    found = NFT(beta, most)(likelihood, evaluated, rows).value
    found.sum().backward()
    slope, now, before = torch.zeros_like(v), v.tolist(), old.tolist()
    for r in range(4):
        s = float(rows.sigma[r])
        for c, cut in enumerate(CUTS):
            good, wanted = 0.5 + float(rows.advantage[r, c]) / (2 * most), 0.0
            for sign, share in ((1, good), (-1, 1 - good)):
                errors = {}
                for i in range(cut.start, cut.stop):
                    mixed = before[r][i] + sign * beta * (now[r][i] - before[r][i])
                    errors[i] = float(rows.x[r, i]) - s * mixed - float(rows.x0[r, i])
                size = sum(map(abs, errors.values()))
                wanted += share * sum(e**2 for e in errors.values()) / size * most / beta
                for i, e in errors.items():
                    slope[r, i] += share * 2 * e * -s * sign * beta / size * most / beta
            assert float(found[r, c].detach()) == pytest.approx(wanted, rel=1e-10)
    torch.testing.assert_close(v.grad, slope, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("likelihood", [Matching(1, weight=Weighting(1.0)), Transition()])
def test_a_part_without_rewards_is_not_trained(likelihood: Any):
    """Its entries are masked, and its dims have no gradient."""
    from dataclasses import replace

    by = replace(likelihood, parts=("audio",))
    made = rolled(Ode(2) if isinstance(by, Matching) else Chain(FlowSDE(0.5), 2))
    advantage = torch.randn(4, 3, dtype=torch.float64)
    rows = by.rows(made, advantage, torch.ones_like(advantage).bool())[0]
    assert rows.mask.tolist() == [[False, True]] * 4
    v = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    logp = by.evaluate(lambda *_: v, rows).logp
    torch.where(rows.mask, rows.advantage * logp, 0.0).sum().backward()
    assert v.grad is not None
    assert not v.grad[:, :6].any() and v.grad[:, 6:].all()


def test_each_part_is_compared_by_its_own_rewards():
    """The advantages of a part are those of a run that has its rewards alone."""
    torch.manual_seed(1)
    values = torch.randn(8, 3, dtype=torch.float64)
    scored = torch.ones(8, 3, dtype=torch.bool)
    scored[2, 1] = False  # a video that one reward could not score
    scores = Scores(values, scored, ("look", "match", "sound"))
    plan = Ode(4)(STEPS, 0, 0)[0]
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    plain = Estimator((Standardize(),))
    routes = (("video", ("look", "match")), ("audio", ("match", "sound")))
    value, mask = Estimator((Standardize(),), routes=routes)(scores, Context(plan.columns, weights))
    steps = len(plan.columns.nodes)
    assert value.shape == (8, 2 * steps)
    for part, at in enumerate(([0, 1], [1, 2])):
        names = tuple(scores.names[i] for i in at)
        own = Scores(values[:, at], scored[:, at], names)
        a, m = plain(own, Context(plan.columns, weights[at]))
        assert torch.equal(value.view(8, steps, 2)[..., part], a)
        assert torch.equal(mask.view(8, steps, 2)[..., part], m)


def test_a_recipe_takes_modalities_as_a_setting():
    given = {"name": "nft", "modalities": {"video": ["look"], "audio": ["sound"]}}
    made = recipe_kind("nft").model_validate(given).algorithm()
    assert made.advantage.routes == (("video", ("look",)), ("audio", ("sound",)))
    assert isinstance(made.likelihood, Matching) and made.likelihood.parts == ("video", "audio")
    for name, reason in (("dpo", "one advantage for all"), ("refl", "has no parts")):
        with pytest.raises(UserError, match=reason):
            recipe_kind(name).model_validate({**given, "name": name}).algorithm()


def test_columns_of_some_rewards_keep_their_own_marks() -> None:
    scored = torch.tensor([[True, False, True], [False, True, True]])
    scores = Scores(torch.arange(6.0).view(2, 3), scored, ("look", "match", "sound"))
    own = scores.of([2, 0])
    assert own.names == ("sound", "look") and own.values.tolist() == [[2.0, 0.0], [5.0, 3.0]]
    assert own.scored.tolist() == [[True, True], [True, False]]
