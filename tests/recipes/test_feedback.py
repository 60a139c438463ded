"""Parts of the recipes with other feedback: noise of a group, placed steps, weights of steps."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flowrl.contrib.e_grpo import Merged, step_entropy
from flowrl.contrib.fdfo import Churn, Directional, Quadratic
from flowrl.contrib.g2rpo import Granular
from flowrl.credit.advantages import Context, Estimator, Standardize
from flowrl.credit.augmented import Augmented
from flowrl.credit.comparisons import PruneWidth
from flowrl.credit.steps import EvenDepths, EvenGradients
from flowrl.credit.trackers import NoTracker, PromptValues
from flowrl.credit.values import Credit, LikelyPaths, TrackedStatistics, node_values
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.rows import Evaluation
from flowrl.losses.base import metric_values
from flowrl.losses.preference import GroupPreference
from flowrl.recipes.table import IMAGE_RECIPES as RECIPES
from rewards import Scores
from samplers import (
    CPS,
    Chain,
    ConstantSDE,
    Edges,
    FlowSDE,
    Fork,
    Frozen,
    Guided,
    Latents,
    Moving,
    Ode,
    Progressive,
    RewardDrift,
    RewardGuide,
    Rollout,
    Sampling,
    Scattered,
    Tree,
    evaluations,
    mean_log_prob,
    roll,
)
from samplers.routes.guiding import GuidedEdges
from tests.support.credit_context import context_of as context_with
from tests.support.tiny import TinyFlow

LEVELS = (*(3 * t / (1 + 2 * t) for t in [1 - k / 8 for k in range(8)]), 0.0)


def rolled(planner, draws=range(2), iteration: int = 0) -> tuple[Rollout, ...]:
    model = TinyFlow(2)
    torch.nn.init.normal_(model.shift, generator=torch.Generator().manual_seed(0))
    plans = planner(LEVELS, iteration, 0)
    return roll(plans, model, Latents((2,)), draws, seed=0, iteration=iteration)


def test_a_group_has_one_noise_and_stays_together():
    (rollout,) = rolled(Ode(3))
    ones = torch.ones(6, 1)
    for share in ("batch", "sample"):
        same = Matching(2, share=share, together=3, same_noise=True)
        for rows in same.rows(rollout, ones, ones > 0):
            noise, sigma = rows.noise.view(2, 3, 2), rows.sigma.view(2, 3)
            assert (noise == noise[:, :1]).all() and (noise[0] != noise[1]).all()
            assert (sigma == sigma[:, :1]).all()
    own = Matching(2, together=3).rows(rollout, ones, ones > 0)[0]
    plain = Matching(2).rows(rollout, ones, ones > 0)[0]
    assert torch.equal(own.noise, plain.noise) and len(own.noise.unique(dim=0)) == 6


def algorithm(name: str, **parts):
    return replace(RECIPES[name](group=12), **parts)


def test_scattered_steps_are_drawn_from_the_first_share():
    seen = set()
    for iteration in range(40):
        (plan,) = Scattered(FlowSDE(), 4, 2, 0.5)(LEVELS, iteration, 0)
        noisy = tuple(k for k, step in enumerate(plan.steps) if step.noisy and step.train)
        assert len(noisy) == 2 == sum(step.noisy for step in plan.steps)
        seen.add(noisy)
    assert seen == {(a, b) for a in range(4) for b in range(a + 1, 4)}


def test_steps_of_low_entropy_are_merged():
    kernel = FlowSDE(0.7)
    alone = Merged(kernel, 3, share=0.75, least=-100.0)(LEVELS, 0, 0)
    assert alone == Fork(kernel, 3, at=tuple(range(6)))(LEVELS, 0, 0)
    plans = Merged(kernel, 3, share=0.75)(LEVELS, 0, 0)
    least = sum(step_entropy(kernel, *pair) for pair in list(pairwise(LEVELS))[:6]) / 6
    ends, start = [], 0
    for plan in plans:
        (k,) = [k for k, step in enumerate(plan.steps) if step.noisy]
        step = plan.steps[k]
        assert step.sigma == LEVELS[start]
        start = LEVELS.index(step.sigma_next)
        ends.append(start)
        assert set(plan.sigmas) <= set(LEVELS) and plan.sigmas[-1] == 0
        reached = step_entropy(kernel, step.sigma, step.sigma_next)
        assert reached >= least - 1e-9 or start == 6, "the last may run into the end"
    assert ends[-1] == 6 and len(ends) < 6
    want = torch.distributions.Normal(0.0, float(kernel(*map(torch.tensor, ([[0.0]], [[0.0]], [0.9],
        [0.8]))).std)).entropy()  # fmt: skip
    assert step_entropy(kernel, 0.9, 0.8) == pytest.approx(float(want), abs=1e-6)


def test_a_child_is_finished_on_every_grid():
    rollouts = rolled(Granular(FlowSDE(0.7), 4, at=(0, 2), grids=(1, 2, 3)))
    assert [len(r.plan.steps) for r in rollouts] == [8, 5, 4, 8, 6, 5]
    for first in (0, 3):
        (one,) = rollouts[first].edges
        for other in rollouts[first + 1 : first + 3]:
            (edges,) = other.edges
            assert torch.equal(edges.x_next, one.x_next) and torch.equal(edges.logp, one.logp)
            assert not torch.equal(other.x0, rollouts[first].x0)
    assert not torch.equal(rollouts[0].edges[0].x_next, rollouts[3].edges[0].x_next)
    plain = Granular(FlowSDE(0.7), 4, at=(0, 1), grids=(1,))
    for ours, fork in zip(rolled(plain), rolled(Fork(FlowSDE(0.7), 4, at=(0, 1))), strict=True):
        assert torch.equal(ours.x0, fork.x0)


@pytest.mark.parametrize("kernel", [FlowSDE(0.7), ConstantSDE(0.3), CPS(0.5)])
def test_even_gradients_are_even(kernel):
    """The gradient of A log p in v has the same size at every step, for noise that does not depend
    on v: A grad log p = A z slope / q."""
    (plan,) = Scattered(kernel, 2, 3, 0.5)(LEVELS, 0, 0)
    columns, sizes = plan.columns, []
    credit = Credit(torch.ones(2, 8, 1), torch.ones(2, 8, 1, dtype=torch.bool))
    weights = EvenGradients(0.5)(credit, Context(columns, torch.ones(1))).value[0, :, 0]
    for k in range(4):
        at, to = (torch.tensor([s], dtype=torch.float64) for s in LEVELS[k : k + 2])
        v, x = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True), torch.ones(1, 1).double()
        mean, std = kernel(x, v, at, to)
        logp = -((mean.detach() + std - mean) / std).square() / 2
        (gradient,) = torch.autograd.grad(logp.sum(), v)
        sizes.append(float(gradient.abs() * weights[k]))
    assert sizes == pytest.approx([sizes[0]] * 4)
    assert float(weights[:4].mean()) == pytest.approx(1.0)


def test_depths_weigh_the_same():
    (plan,) = Tree(ConstantSDE(), (0, 2), 2)(LEVELS, 0, 0)
    assert plan.nodes == (2, 2, 4, 4, 4, 4, 4, 4)
    credit = Credit(torch.ones(4, 8, 1), torch.ones(4, 8, 1, dtype=torch.bool))
    context = Context(plan.columns, torch.ones(1))
    weights = EvenDepths()(credit, context).value[0, :, 0]
    edges = torch.tensor(plan.nodes[:7])
    assert (weights[:7] * edges).tolist() == pytest.approx([24 / 7] * 7), "24 edges, 7 depths"
    assert torch.equal(EvenDepths(0.0)(credit, context).value, credit.value.double())


def test_a_moving_window_of_a_tree():
    tree = Tree(ConstantSDE(), (0, 1), 2, stripes=Moving(2, Progressive(30)))
    for iteration, window in ((0, {0, 1}), (60, {2, 3}), (149, {4, 5})):
        (plan,) = tree(LEVELS, iteration, 0)
        assert {k for k, step in enumerate(plan.steps) if step.noisy} == {0, 1} | window
    frozen = Tree(ConstantSDE(), (0,), 2, stripes=Moving(3, Frozen(2)))(LEVELS, 500, 0)[0]
    assert [step.noisy for step in frozen.steps] == [True, False, *[True] * 3, *[False] * 3]


def test_dgpos_average_samples_from_the_switch_on():
    averages = RECIPES["dgpo"](switch=200).averages
    slow, trailing = (each.decay for each in averages)
    assert [trailing(s) for s in (0, 199)] == [0, 0]
    assert [trailing(s) for s in (200, 250, 900)] == pytest.approx(
        [slow(s) for s in (200, 250, 900)]
    )
    assert isinstance(RECIPES["dgpo"](reference="average").loss, GroupPreference)
    assert "ref" not in RECIPES["dgpo"](reference="average", kl=0.0).roles


def test_leaves_are_fused_by_the_densities_of_their_paths():
    """Two draws of 2 x 2 leaves; the weights of a node's leaves are a softmax of summed edges."""
    (plan,) = Tree(ConstantSDE(), (0, 2), 2)(LEVELS, 0, 0)
    rng = torch.Generator().manual_seed(1)
    logp = {k: torch.randn(2 * plan.nodes[k], generator=rng) for k in range(6)}
    values = torch.randn(8, 1, generator=rng)
    scored = torch.ones(8, 1, dtype=torch.bool)
    scored[5] = False
    context = Context(plan.columns, torch.ones(1), logp)
    got = node_values(Scores(values, scored, ("r",)), context, LikelyPaths(0.7))
    leaf = [sum(logp[k][i * plan.nodes[k] // 4] for k in range(6)) for i in range(8)]
    for k, leaves in ((0, (0, 1)), (1, (6, 7)), (0, (4, 5)), (2, (3,)), (7, (5,))):
        kept = [i for i in leaves if scored[i]]
        weight = (0.7 * torch.stack([leaf[i] for i in kept])).softmax(0) if kept else None
        want = 0.0 if weight is None else float((weight * values[kept, 0]).sum())
        assert float(got.value[leaves[0], k, 0]) == pytest.approx(want, abs=1e-6)
        assert bool(got.mask[leaves[0], k, 0]) == bool(kept)
    even = node_values(Scores(values, scored, ("r",)), context, LikelyPaths(0.0))
    assert torch.allclose(even.value, node_values(Scores(values, scored, ("r",)), context).value)


def test_branch_grpo_as_its_paper_has_it():
    """Of 20 steps with the last split at 9, the steps 10 to 13 are not trained; the window moves to
    later steps every 30 iterations, up to the last trained step."""
    paper = RECIPES["branch_grpo"](
        prune="deeper", fusion="likely_paths", split=4.0, depth_weight=1.0, fusion_beta=2.0
    )
    levels = [1 - k / 20 for k in range(20)] + [0.0]
    for iteration, pruned in ((0, range(10, 14)), (60, range(12, 16)), (900, range(15, 19))):
        (plan,) = paper.plan(levels, iteration, 0)
        assert {k for k in range(19) if not plan.steps[k].train} == set(pruned)
        assert plan.split == 4.0
    assert paper.advantage.fusion == LikelyPaths(2.0)
    assert paper.transforms[-1] == EvenDepths(1.0)
    extremes = RECIPES["branch_grpo"](prune="extremes", keep=0.25)
    assert PruneWidth("extremes", 0.25) in extremes.transforms
    moving = RECIPES["branch_grpo_mix"](moving=True).plan
    assert moving.stripes == Moving(4, Progressive(30))


def test_a_lead_over_the_prompts_mean_is_bounded():
    """Two groups of three; the first does far better than its prompt's mean, the second worse."""
    columns = Ode(3)(LEVELS, 0, 0)[0].columns
    values = torch.tensor([1.0, 1.0, 1.0, 0.1, 0.5, 0.6]).view(6, 1)
    tracked = TrackedStatistics(torch.tensor([0.5, 0.7]))
    context = context_with(columns, torch.ones(1), tracked=tracked)
    scores = Scores(values, torch.ones(6, 1, dtype=torch.bool), ("r",))
    got = Estimator((Augmented(Standardize(None), 0.2, 0.28),))(scores, context)[0][:, 0]
    want = [0.28, 0.28, 0.28, -0.3 - 0.2, 0.1 - 0.2, 0.2 - 0.1]
    assert got.tolist() == pytest.approx(want)


@pytest.mark.parametrize("name", ["flow_grpo", "nft", "flow_dppo"])
def test_credit_by_name(name):
    """GDPO tells (0, 1) from (0, 2), the sum's z-score does not; AAPO keeps the prompts' means."""
    gdpo, aapo, gap = (RECIPES[name](credit=c) for c in ("gdpo", "aapo", "best_gap"))
    assert [type(t).__name__ for t in gdpo.transforms] == [
        "Standardize",
        "Sum",
        "Standardize",
        "Clip",
    ]
    two = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    scores = Scores(two, torch.ones(4, 2, dtype=torch.bool), ("a", "b"))
    columns = Ode(2)(LEVELS, 0, 0)[0].columns
    credit = gdpo.advantage(scores, Context(columns, torch.ones(2)))[0][:, -1]
    assert float(credit[3] / credit[1]) == pytest.approx(2.0, abs=1e-2)
    assert isinstance(aapo.tracker(), PromptValues) and isinstance(gap.tracker(), NoTracker)
    lead = gap.advantage(Scores(two[:, 1:], scores.scored[:, 1:], ("b",)),
                         Context(columns, torch.ones(1)))[0][:, -1]  # fmt: skip
    assert lead.tolist() == pytest.approx([0, 2**0.5, 0, 2**0.5], abs=1e-4)


def test_a_window_rolls_back():
    for schedule in ("progressive", "decaying", "exponential"):
        plan = RECIPES["mix_grpo"](steps=8, schedule=schedule, every=1, roll_back=True).plan
        starts = [plan.position(i, 0, 6, 4) for i in range(60)]
        assert starts[0] == 0 and max(starts) == 5 and starts.count(0) >= 2


def test_the_best_and_worst_of_all_prompts():
    """The second prompt has the two best and the two worst of all samples."""
    columns = Ode(4)(LEVELS, 0, 0)[0].columns
    values = torch.tensor([0.1, 0.2, -0.1, -0.2, 3.0, 2.0, -2.0, -3.0]).view(8, 1, 1)
    credit = Credit(values.expand(8, 8, 1), torch.ones(8, 8, 1, dtype=torch.bool))
    context = Context(columns, torch.ones(1))
    over = PruneWidth("extremes", 0.5, "batch")(credit, context).mask[:, -1, 0]
    assert over.tolist() == [False] * 4 + [True] * 4
    within = PruneWidth("extremes", 0.5)(credit, context).mask[:, -1, 0]
    assert within.view(2, 4).sum(1).tolist() == [2, 2]
    assert RECIPES["dance_grpo"](train_share=0.5, best_over="batch").transforms[-1].over == "batch"


def test_churn_keeps_the_level():
    """From x at level s with a right velocity: signal 1 - s' and noise s', for any gamma."""
    for gamma in (0.0025, 0.3):
        at, to = (torch.tensor([s], dtype=torch.float64) for s in (0.8, 0.5))
        parts = []
        for x0, eps in ((1.0, 0.0), (0.0, 1.0)):
            x = torch.full((1, 1), 0.2 * x0 + 0.8 * eps, dtype=torch.float64)
            g = Churn(gamma)(x, torch.full_like(x, eps - x0), at, to)
            parts.append(float(g.mean))
        assert parts[0] == pytest.approx(0.5)
        assert parts[1] ** 2 + float(g.std) ** 2 == pytest.approx(0.25)
    assert float(g.std) > 0


def test_finite_differences_move_the_sample_towards_the_better_one():
    """The gradient is 2 A mean(delta . dv) per row, the same for both samples of a pair, whichever
    is named first; equal rewards leave none."""
    (rollout,) = rolled(Chain(Churn(0.02), 2, shared_noise=True))
    likelihood, loss = Directional(), Quadratic(bound=0.03)
    half = torch.tensor([0.3, -0.3, 0.0, 0.0])[:, None].expand(-1, 8)
    for rows in likelihood.rows(rollout, half, torch.ones(4, 8, dtype=torch.bool)):
        v = torch.randn(4, 2, generator=torch.Generator().manual_seed(2)).requires_grad_()
        rows = replace(rows, state=None)  # each row has a velocity of its own here
        new = likelihood.evaluate(lambda *_, v=v: v, rows)
        old = Evaluation(new.logp, v.detach())
        entries = loss(likelihood, {"new": new, "old": old}, rows)
        assert metric_values(entries.metrics["ratio"]).eq(1).all()
        (got,) = torch.autograd.grad(entries.value.sum(), v)
        pair = rollout.x0.view(2, 2, 2)
        apart = (pair[:, :1] - pair[:, 1:]).expand(-1, 2, -1) / 2 * torch.tensor([[[1.0], [-1.0]]])
        delta = (apart / (apart.square().mean(2, keepdim=True) + 1e-6)).flatten(0, 1)
        torch.testing.assert_close(got, 2 * half[:, :1] * delta / 2)
        torch.testing.assert_close(got[0], got[1])
        assert got[2:].eq(0).all() and got[0].abs().max() > 0
        assert (got[0] * (rollout.x0[0] - rollout.x0[1])).sum() > 0, (
            "v falls, and x0 = x - s v rises"
        )


def test_a_guided_step_is_scored_by_the_plain_kernel():
    """The reward is linear in the predicted sample: SPSA along u then is (gradient . u) u. The
    gradient of r = w . x0 with x0 = x - s v(x) is found by autograd."""
    guide = RewardGuide(RewardDrift(0.3, normalised=False), first=1, probe=0.01)
    planner = Chain(ConstantSDE(0.3), 2)
    model = TinyFlow(2).double()
    torch.nn.init.normal_(model.shift, generator=torch.Generator().manual_seed(0))
    w, seen = torch.tensor([0.5, -2.0], dtype=torch.float64), []

    def score(rollout: Rollout) -> torch.Tensor:
        seen.append(rollout.x0)
        return rollout.x0 @ w

    def samples(planner, score=None) -> Rollout:
        (plan,) = planner(LEVELS, 0, 0)
        at = {"seed": 0, "iteration": 0, "sampling": Sampling(score=score)}
        return roll((plan,), model, Latents((2,), dtype=torch.float64), range(2), **at)[0]

    plain, guided = samples(planner), samples(Guided(planner, guide), score)
    assert evaluations((guided.plan,)) == evaluations((plain.plan,)) + 2 * 2 * 6
    assert len(seen) == 12, "two per guided step of the seven noisy ones but the first"
    assert torch.equal(plain.edges[0].x_next, guided.edges[0].x_next)
    assert type(guided.edges[0]) is Edges
    edges = guided.edges[1]
    assert isinstance(edges, GuidedEdges)
    sigma, to = (torch.full((4,), s, dtype=torch.float64) for s in LEVELS[1:3])
    x = edges.x.clone().requires_grad_()
    v = model(x, sigma, edges.prompt)
    g = ConstantSDE(0.3)(edges.x, v.detach(), sigma, to)
    torch.testing.assert_close(edges.logp, mean_log_prob(g, edges.x_next))
    (gradient,) = torch.autograd.grad(((x - sigma[:, None] * v) @ w).sum(), x)
    noise = (plain.edges[1].x_next - kernel_mean(plain, 1, model)) / g.std[:, None]
    push = edges.x_next - g.mean - g.std[:, None] * noise
    u = push.sign()  # or its negative, which is the same estimate
    along = (gradient * u).sum(1, keepdim=True) * u
    torch.testing.assert_close(push, 0.3 * along, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(edges.moved, push.square().mean(1).sqrt() / g.std)
    with pytest.raises(ValueError, match="pass Sampling"):
        samples(Guided(planner, guide))


def kernel_mean(rollout: Rollout, k: int, model: TinyFlow) -> torch.Tensor:
    edges, step = rollout.edges[k], rollout.plan.steps[k]
    at, to = (torch.full((len(edges.x),), s, dtype=torch.float64) for s in step_levels(step))
    return rollout.plan.kernel(edges.x, model(edges.x, at, edges.prompt).detach(), at, to).mean


def step_levels(step) -> tuple[float, float]:
    return step.sigma, step.sigma_next
