"""Every recipe must teach a tiny model, in a second on a CPU; every impossible mixture is refused."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowrl.advantages import Clip, Context, Estimator, ScaleSteps, Standardize
from flowrl.algorithm import Algorithm, Average, Decay
from flowrl.comparisons import BestWorst, Exponential
from flowrl.errors import UserError
from flowrl.likelihoods import Transition
from flowrl.losses import NFT, Anchor, Entries, Preference, Surrogate, Weighted
from flowrl.matching import Matching
from flowrl.recipes import RECIPES
from flowrl.rows import Evaluation, Rows
from flowrl.times import Discrete, PermutedGrid
from rewards import Scores
from samplers import SA, Chain, ConstantSDE, FlowSDE, Fork, Ode, Rollout, Tree, Window, roll
from tests.tiny import TinyFlow

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
    "ddpo": {"steps": 6, "group": 12, "clip": 0.2},
    "loop": {"steps": 6, "group": 12, "clip": 0.2},
    "awm": {"steps": 8, "group": 12},
    "nft": {"steps": 6, "group": 12},
    "dpo": {"steps": 6, "group": 12, "beta": 20.0},
    "rwr": {"steps": 6, "group": 12, "anchor": 0.05, "rate": 1.0},
}


def corner_scores(rollout: Rollout) -> Scores:
    value = -(rollout.x0 - CORNERS[rollout.prompt]).square().sum(1, keepdim=True)
    return Scores(value, torch.ones_like(value, dtype=torch.bool), ("corner",))


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
            a.plan(sigmas, self.step, self.seed), self.policies[a.behaviour], (2,), range(4),
            seed=self.seed, iteration=self.step, keep_mean=a.likelihood.keep_mean, dtype=dtype,
        )  # fmt: skip

    def rows(self, rollout: Rollout) -> list[Rows]:
        scores = corner_scores(rollout)
        credit = self.algorithm.advantage(scores, Context(rollout.columns, torch.ones(1)))
        found = []
        for rows in self.algorithm.likelihood.rows(rollout, *credit):
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
                d = average.decay(self.step)
                slow, fast = self.policies[average.name], self.policies["current"]
                for s, f in zip(slow.parameters(), fast.parameters(), strict=True):
                    s.lerp_(f, 1 - d)
        return float(torch.cat([corner_scores(r).values for r in rollouts]).mean())


def test_every_recipe_is_tested():
    assert SMALL.keys() == RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_learns(name):
    loop = Loop(RECIPES[name](**SMALL[name]))
    log = [loop.iterate() for _ in range(60)]
    first, last = sum(log[:5]) / 5, sum(log[-5:]) / 5
    print(f"{name}: {first:.3f} -> {last:.3f}")
    assert last > first + 0.8
