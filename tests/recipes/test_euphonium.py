"""Euphonium with the reward's own slope as direction, and with its dual credit."""

import json

import pytest
import torch

from flowrl.credit.values import Context
from flowrl.errors import UserError
from flowrl.estimate.time import iteration_work
from flowrl.iteration.features.reward_gradient import RewardPath
from flowrl.recipes.table import RECIPES
from flowrl.session.progress import Progress
from flowrl.settings.read import check_run, run_from
from rewards.types import IntermediateScores, Scores
from samplers import (
    Chain,
    ConstantSDE,
    Guided,
    Latents,
    Looks,
    RewardDrift,
    RewardGuide,
    Rollout,
    Sampling,
    evaluations,
    mean_log_prob,
    roll,
)
from tests.support import runs
from tests.support.iterations import collect, iterate
from tests.support.routes import looks_of
from tests.support.tiny import gaussian_velocity

LEVELS = [1.0, 0.75, 0.5, 0.25, 0.0]
SMALL = {"name": "euphonium", "steps": 4, "group": 4, "first": 1, "fraction": 1.0}


def test_the_slope_moves_the_mean_and_not_the_density():
    """r = |x0|^2 / 2, whose slope is x0 = x - s v: the mean moves by 0.3 of it, nothing else."""
    asked: list[torch.Tensor] = []

    def slope(rollout: Rollout) -> torch.Tensor:
        asked.append(rollout.x0)
        return rollout.x0

    def sampled(planner, **more) -> Rollout:
        (plan,) = planner(LEVELS, 0, 0)
        how = {"seed": 0, "iteration": 0, "sampling": Sampling(**more)}
        return roll((plan,), gaussian_velocity, Latents((2,), dtype=torch.float64), (0, 1), **how)[
            0
        ]

    guide = RewardGuide(RewardDrift(0.3, normalised=False), first=1, by="slope")
    plain = sampled(Chain(ConstantSDE(0.3), 2))
    guided = sampled(Guided(Chain(ConstantSDE(0.3), 2), guide), slope=slope)
    assert evaluations((guided.plan,)) == evaluations((plain.plan,))
    assert len(asked) == 2 and guided.plan.predicted == 2 * 2
    edges, same = guided.edges[1], plain.edges[1]
    assert torch.equal(edges.x, same.x)
    at, to = (torch.full((4,), s, dtype=torch.float64) for s in LEVELS[1:3])
    v = gaussian_velocity(edges.x, at, edges.prompt)
    torch.testing.assert_close(edges.x_next - same.x_next, 0.3 * (edges.x - 0.75 * v))
    torch.testing.assert_close(asked[0], edges.x - 0.75 * v)
    step = ConstantSDE(0.3)(edges.x, v, at, to)
    torch.testing.assert_close(edges.logp, mean_log_prob(step, edges.x_next))
    with pytest.raises(ValueError, match=r"pass Sampling\(slope=...\)"):
        sampled(Guided(Chain(ConstantSDE(0.3), 2), guide))


@pytest.mark.parametrize(("outcome", "process"), [(1.0, 1.0), (0.5, 2.0), (0.0, 1.0)])
def test_dual_credit_adds_two_advantages(outcome, process):
    """The outcome's z-score by group, and at each step that of what it led to."""
    algorithm = RECIPES["euphonium"](
        steps=4, group=4, first=1, fraction=1.0, outcome=outcome, process=process
    )
    (plan,) = algorithm.plan(LEVELS, 0, 0)
    assert looks_of(plan) == Looks((1, 2, 3), 1)
    draw = torch.Generator().manual_seed(0)
    end = torch.randn(8, 1, generator=draw, dtype=torch.float64)
    way = torch.randn(8, 4, 1, generator=draw, dtype=torch.float64)
    known = torch.ones(8, 4, 1, dtype=torch.bool)
    known[:, 0] = False
    known[5, 2] = False  # the process reward abstains
    scores = Scores(
        end, torch.ones_like(end, dtype=torch.bool), ("r",), IntermediateScores(way, known)
    )
    got, mask = algorithm.advantage(scores, Context(plan.columns, torch.ones(1)))
    assert mask.all()
    wanted = torch.zeros(8, 4, dtype=torch.float64)
    for group in (range(4), range(4, 8)):
        own = end[list(group), 0]
        wanted[list(group)] += outcome * ((own - own.mean()) / own.std())[:, None]
        for k in range(3):
            some = [i for i in group if known[i, k + 1]]
            z = way[some, k + 1, 0]
            wanted[some, k] += process * (z - z.mean()) / (z.std(correction=0) + 1e-4)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


@pytest.fixture
def tree(pipeline, tmp_path):
    recipe = SMALL | {"gradient": "reward", "process": 1.0}
    tree = runs.tree(pipeline, tmp_path, recipe, self_test="off", lr=1e-3)
    tree["model"]["sigmas"], tree["evaluate"]["steps"] = LEVELS[:-1], 4
    return tree


@pytest.mark.slow
def test_a_run_is_guided_by_the_slope_at_the_planned_cost(tree, tmp_path):
    run = run_from(tree, "test")
    kept = runs.session_of(run, tmp_path)
    metrics = iterate(kept, Progress()).metrics
    work = iteration_work(run)
    assert metrics["count/scored"] == work.samples == 2 * 4 * (1 + 2 + 3)
    assert metrics["count/sampling"] == work.sampling == 2 * (1 + 4 * 3)
    assert metrics["grad_norm"] > 0 and metrics["guide/moved"] > 0


@pytest.mark.slow
def test_guided_samples_are_brighter(tree, tmp_path):
    weak, strong = (tree | {"recipe": tree["recipe"] | {"scale": scale}} for scale in (0.0, 20.0))
    lit = [collect(runs.opened(each, tmp_path), 0).metrics["reward"] for each in (weak, strong)]
    assert lit[1] > lit[0] + 0.01


def test_the_slope_is_that_of_finite_differences(tree, tmp_path):
    kept = runs.opened(tree, tmp_path)
    batch = kept.learner.policy.open(*kept.prompts.take([0, 1]), 4)
    path = RewardPath.guiding(kept, batch, [0, 1], 0)
    assert path is not None
    (plan,) = kept.algorithm.plan(LEVELS, 0, 0)
    x0 = 0.3 * torch.randn(2, *kept.learner.policy.shape(4), generator=torch.manual_seed(0))
    rollout = Rollout(plan, x0, torch.tensor([0, 1]), (0, 1), (), 0, 0, 0)
    slope, nudge = path.intermediate_slope(rollout), 1e-2
    unit = slope / slope.flatten(1).norm(dim=1).view(-1, 1, 1, 1)

    def score(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return path.total(batch.decode(x, rollout.prompt), rollout.prompt)

    change = (score(x0 + nudge * unit) - score(x0 - nudge * unit)) / (2 * nudge)
    torch.testing.assert_close(change, slope.flatten(1).norm(dim=1), rtol=0.05, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"rewards": ["ocr"]}, "reward ocr: it offers no gradient"),
        ({"intermediate_rewards": ["ocr"]}, "reward ocr: it offers no gradient"),
        ({"model": {"offload": True}}, "needs the decoder on the device"),
    ],
)
def test_what_has_no_slope_is_refused(pipeline, tmp_path, more, sentence):
    tree = runs.tree(pipeline, tmp_path, SMALL | {"gradient": "reward"})
    tree |= {key: tree[key] | value if isinstance(value, dict) else value
             for key, value in more.items()}  # fmt: skip
    with pytest.raises(UserError, match=sentence):
        check_run(run_from(json.loads(json.dumps(tree)), "test"))
