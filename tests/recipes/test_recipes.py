"""Every recipe must teach a tiny model in a second; every impossible mixture is refused."""

import inspect
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from flowrl.algorithm import Algorithm, Decay
from flowrl.credit.advantages import Context
from flowrl.credit.choices import named_rewards
from flowrl.credit.proxies import GATE, gate_of
from flowrl.iteration.features.intermediate import intermediate_scores
from flowrl.likelihoods.rows import Evaluation, Rows, with_table
from flowrl.likelihoods.transition import Transition
from flowrl.losses.base import Entries
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.table import IMAGE_RECIPES
from flowrl.table import EMPTY, Table
from rewards import Scores
from samplers import (
    Latents,
    Rollout,
    Sampling,
    roll,
)
from tests.support.tiny import TinyFlow

SHORTCUTS = ("leap_align", "flow_bp", "flow_bp_lagrange")
THROUGH = ("refl", "draft", "draft_lv", "srpo", *SHORTCUTS)  # tests/run/test_through.py has these
ELSEWHERE = (*THROUGH, "opd")  # which tests/run/test_teachers.py has
RECIPES = {name: recipe for name, recipe in IMAGE_RECIPES.items() if name not in ELSEWHERE}
CORNERS = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])

SMALL = {
    "flow_grpo": {"steps": 6, "group": 12, "clip": 0.2, "kl": 0.01},
    "flow_grpo_fast": {"steps": 6, "group": 12, "clip": 0.2, "window": 2},
    "dance_grpo": {"steps": 6, "group": 12, "clip": 0.2, "eta": 0.7},
    "mix_grpo": {"steps": 6, "group": 12, "clip": 0.2, "window": 3, "every": 5},
    "mix_grpo_flash": {"steps": 6, "group": 12, "clip": 0.2, "window": 3, "every": 5},
    "temp_flow": {"steps": 6, "roots": 2, "branch": 6, "clip": 0.2},
    "branch_grpo": {"steps": 6, "at": (0, 1, 2, 3), "clip": 0.2, "eta": 0.7},
    "branch_grpo_mix": {"steps": 6, "at": (0, 1, 2, 3), "clip": 0.2, "eta": 0.7},
    "grpo_guard": {"steps": 6, "group": 12, "clip": 0.2},
    "gardo": {"steps": 6, "group": 12, "clip": 0.2, "kl": 0.01},
    "ddpo": {"steps": 6, "group": 12, "clip": 0.2},
    "loop": {"steps": 6, "group": 12, "clip": 0.2},
    "awm": {"steps": 8, "group": 12},
    "nft": {"steps": 6, "group": 12},
    "dpo": {"steps": 6, "group": 12, "beta": 20.0},
    "rwr": {"steps": 6, "group": 12, "anchor": 0.05, "rate": 1.0},
    "flow_dppo": {"steps": 6, "group": 12, "most": 0.05},
    "dgpo": {"steps": 6, "group": 12, "beta": 1.0, "clip": 0.5, "switch": 20},
    "crd": {"steps": 6, "group": 12, "levels_per_sample": 4, "kl": 0.01},
    "fdfo": {"steps": 6, "group": 12, "gamma": 0.02},
    "flash_grpo": {"steps": 8, "group": 12, "clip": 0.2, "kernel": "flow_sde"},
    "e_grpo": {"steps": 8, "group": 12, "clip": 0.2},
    "euphonium": {"steps": 6, "group": 12, "clip": 0.2, "eta": 0.7, "first": 2, "fraction": 1.0},
    "g2rpo": {"steps": 6, "group": 6, "clip": 0.2, "at": (0, 1, 2)},
    "dense_grpo": {"steps": 6, "group": 12, "clip": 0.2, "kl": 0.0},
    "turning_point": {"steps": 6, "group": 12, "clip": 0.2},
    "vgpo": {"steps": 6, "group": 12, "clip": 0.2, "kl": 0.0, "kappa": 0.0, "completion": None},
    "pro_grpo": {"steps": 6, "start": 24, "keep": (12,), "at": (3,), "clip": 0.2, "kl": 0.0},
    "potential_tree": {"steps": 6, "at": (0, 1, 2), "eta": 0.7, "clip": 0.2},
}


def corner_scores(rollout: Rollout) -> Scores:
    value = -(rollout.x0 - CORNERS[rollout.prompt]).square().sum(1, keepdim=True)
    return Scores(value, torch.ones_like(value, dtype=torch.bool), ("corner",))


def with_named(scores: Scores, rollout: Rollout, named: tuple[str, ...]) -> Scores:
    """With columns of weight 0, which credit reads by name."""
    more = torch.stack([(rollout.x0.abs() + k).sin().sum(1) for k in range(len(named))], 1)
    values = torch.cat([scores.values, more.abs()], 1)
    scored = torch.ones_like(values, dtype=torch.bool)
    return replace(scores, values=values, scored=scored, names=(*scores.names, *named))


class Loop:
    """Sample, score, credit, update: the least that trains a recipe."""

    def __init__(self, algorithm: Algorithm, lr: float = 3e-2, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.algorithm, self.seed, self.step = algorithm, seed, 0
        self.policies = {"current": TinyFlow(4)}
        for name in ("ref", *(average.name for average in algorithm.averages)):
            self.policies[name] = deepcopy(self.policies["current"])
        self.optimizer = torch.optim.Adam(self.policies["current"].parameters(), lr=lr)

    def rollouts(self, dtype: torch.dtype = torch.float32) -> tuple[Rollout, ...]:
        a = self.algorithm
        sigmas = [1 - k / a.steps for k in range(a.steps + 1)]
        return roll(
            a.plan(sigmas, self.step, self.seed), self.policies[a.behaviour],
            Latents((2,), dtype=dtype), range(4), seed=self.seed, iteration=self.step,
            sampling=Sampling(a.likelihood.keep_mean, lambda r: corner_scores(r).values[:, 0]),
        )  # fmt: skip

    def rows(self, rollout: Rollout) -> list[Rows]:
        scores = replace(
            corner_scores(rollout), intermediate=intermediate_scores(rollout, corner_scores)
        )
        logp = {edges.step: edges.logp for edges in rollout.edges}
        named, table = named_rewards(self.algorithm.transforms), EMPTY
        if named:
            scores = with_named(scores, rollout, named)
        context = Context(rollout.columns, torch.eye(1 + len(named))[0], logp)
        credit, found = self.algorithm.advantage(scores, context), []
        if (gate := gate_of(self.algorithm.transforms)) is not None:
            weights = gate.weights(scores, context, credit[1].any(1))[:, None]
            table = Table({GATE: weights})
            assert (weights > 0).sum() < len(weights) / 4  # none where the most doubted are equal
        for rows in self.algorithm.likelihood.rows(rollout, *credit):
            rows = with_table(rows, table)
            if rows.old is None:
                with torch.no_grad():
                    rows = replace(rows, old=self.evaluate(self.algorithm.behaviour, rows))
            found.append(rows)
        return found

    def evaluate(self, role: str, rows: Rows) -> Evaluation:
        return self.algorithm.likelihood.evaluate(self.policies[role], rows)

    def entries(self, rows: Rows) -> Entries:
        says = {"new": self.evaluate("current", rows), "old": rows.old}
        with torch.no_grad():
            for role in self.algorithm.loss.roles - {"old"}:
                says[role] = self.evaluate(role, rows)
        return self.algorithm.loss(self.algorithm.likelihood, says, rows)

    def iterate(self) -> float:
        rollouts = self.rollouts()
        batches = [rows for rollout in rollouts for rows in self.rows(rollout)]
        count = sum(int(rows.mask.sum()) for rows in batches)
        self.optimizer.zero_grad()
        for rows in batches:
            ((self.entries(rows).value * rows.mask).sum() / count).backward()
        self.optimizer.step()
        self.step += 1
        with torch.no_grad():
            for average in self.algorithm.averages:
                d, refresh = average.decay(self.step), average.refresh
                d = 0.0 if refresh is not None and self.step % refresh.every == 0 else d
                slow, fast = self.policies[average.name], self.policies["current"]
                for s, f in zip(slow.parameters(), fast.parameters(), strict=True):
                    s.lerp_(f, 1 - d)
        return float(torch.cat([corner_scores(r).values for r in rollouts]).mean())


def test_every_recipe_is_tested():
    assert SMALL.keys() == RECIPES.keys()
    assert {name for name, recipe in IMAGE_RECIPES.items() if recipe().reward_gradient} == {
        *THROUGH
    }


QUICK = ("branch_grpo", "nft", "dpo")  # a tree, matching, pairs


@pytest.mark.quick_cases("dpo")
@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in RECIPES]
)
def test_learns(name):
    loop = Loop(RECIPES[name](**SMALL[name]))
    log = [loop.iterate() for _ in range(60)]
    first, last = sum(log[:5]) / 5, sum(log[-5:]) / 5
    print(f"{name}: {first:.3f} -> {last:.3f}")
    assert last > first + 0.8


def moved(name: str, dtype: torch.dtype = torch.float64) -> Loop:
    """A recipe's loop whose policies all stand at the same place, away from the exact velocity."""
    loop = Loop(RECIPES[name](**SMALL[name]))
    start = torch.randn(4, 2, 2, generator=torch.Generator().manual_seed(3)) * 0.3
    for role in loop.policies:
        loop.policies[role] = loop.policies[role].to(dtype)
        with torch.no_grad():
            loop.policies[role].shift.copy_(start)
    return loop


def batches(loop: Loop, dtype: torch.dtype = torch.float64) -> Iterator[Rows]:
    for rollout in loop.rollouts(dtype):
        yield from loop.rows(rollout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RECIPES)
def test_the_sampler_and_the_trainer_agree(name, dtype):
    """Scored again by the policy that drew them, rows have ratio 1: the project's invariant."""
    loop = moved(name, dtype)
    likelihood, count = loop.algorithm.likelihood, 0
    for rows in batches(loop, dtype):
        new, old = loop.evaluate("current", rows), rows.old
        ratio = likelihood.log_ratio(new, old, rows)
        close = {"atol": 1e-5 if dtype == torch.float32 else 1e-12, "rtol": 0.0}
        torch.testing.assert_close(ratio, torch.zeros_like(ratio), **close)
        if rows.mask.any() or not loop.algorithm.by_step:  # a step may have no score
            assert rows.mask.all()
        assert rows.advantage.isfinite().all()
        count += 1
    assert count > 0


SURROGATES = [n for n in RECIPES if isinstance(RECIPES[n](**SMALL[n]).loss, Surrogate)]


@pytest.mark.parametrize("name", SURROGATES)
def test_the_first_gradient_is_reinforces(name):
    """-A grad(log-ratio), whose scale is 1, or the step's std for RatioNorm, or twice its square
    for CPS's score. Anchors stand at their minimum and add nothing."""
    loop = moved(name)
    model, likelihood = loop.policies["current"], loop.algorithm.likelihood
    for rows in batches(loop):
        (got,) = torch.autograd.grad(loop.entries(rows).value.sum(), list(model.parameters()))
        scale = torch.ones_like(rows.advantage)
        if isinstance(likelihood, Transition) and likelihood.ratio != "density":
            zero = torch.zeros_like(rows.x)
            q = rows.kernel(zero, zero, rows.sigma, rows.sigma_next).std[:, None]
            scale = q if likelihood.ratio == "ratio_norm" else 2 * q**2
        logp = loop.evaluate("current", rows).logp
        loss = -(rows.advantage * scale * logp).sum()
        (want,) = torch.autograd.grad(loss, list(model.parameters()))
        assert want.abs().max() > 0 or rows.advantage.eq(0).all()
        torch.testing.assert_close(got, want)


def test_branch_grpos_settings_do_what_they_say():
    """8 leaves a draw, splits at steps 0 to 2 of 6; the steps 3 and 4 follow the last split."""

    def parts(**settings) -> list[Rows]:
        algorithm = RECIPES["branch_grpo"](steps=6, at=(0, 1, 2), eta=0.7, **settings)
        loop = Loop(algorithm)
        return [rows for rollout in loop.rollouts() for rows in loop.rows(rollout)]

    plain = parts()
    assert [len(rows.mask) for rows in plain] == [8, 16, 32, 32, 32]
    for prune in ("branch", "extremes"):
        pruned = parts(prune=prune)
        assert [int(rows.mask.sum()) for rows in pruned] == [8, 16, 32, 16, 16]
        for rows, whole in zip(pruned, plain, strict=True):
            kept = rows.mask
            assert torch.equal(rows.advantage[kept], whole.advantage[kept]), "statistics are of all"
    best = parts(prune="branch")[3].mask.view(-1, 2)
    assert best.sum(1).eq(1).all()
    whole = plain[3].advantage.view(-1, 2)
    assert torch.equal(best.int().argmax(1), whole.argmax(1)), "the better of two siblings"
    assert len(parts(prune="depth")) < 5
    fused = parts(fusion="path")
    assert torch.equal(fused[3].advantage, plain[3].advantage)
    assert not torch.allclose(fused[1].advantage, plain[1].advantage)


def test_decay_by_its_formula():
    decay = Decay(start=0.1, slope=0.01, flat=10, most=0.3)
    assert [decay(s) for s in (0, 9, 10, 20, 100)] == pytest.approx([0, 0, 0.1, 0.2, 0.3])
    assert Decay(start=0.9)(7) == 0.9 and Decay()(1000) == 0


def test_every_recipe_has_steps_a_group_and_its_paper():
    for name, recipe in IMAGE_RECIPES.items():
        parameters = inspect.signature(recipe).parameters
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values()), name
        assert "steps" in parameters and {"group", "branch", "start"} & parameters.keys(), name
        assert recipe.__doc__ is not None and recipe().group > (0 if name in THROUGH else 1)
        if not name.endswith(("_fast", "_flash", "_mix")):
            assert "arXiv:" in recipe.__doc__, name
