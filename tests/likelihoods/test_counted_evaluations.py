"""The work that a gradient method is said to take, against what an update of it does."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.contrib.draft_lv import Renoised
from flowrl.iteration.features.reward_gradient import path_entries
from flowrl.likelihoods.pathwise import KnownNoise, Pathwise, Starts
from flowrl.likelihoods.shortcuts import Kept, Shortcuts
from flowrl.losses.base import Anchor
from flowrl.losses.reward import RewardGradient
from samplers import Ode
from samplers.routes.tails import LastSteps, OneOfSteps, SomeSteps, TwoLeaps
from tests.likelihoods.test_pathwise import Net, rollout, rows

DRAWS = 2  # of `rollout`
STARTS: dict[str, tuple[Starts, Any]] = {
    "a step": (Kept(), LastSteps(2, 1)),
    "three steps": (Kept(), LastSteps(2, 3)),
    "a projection": (Kept(project=True), OneOfSteps(2, 0.25, 0.5)),
    "new noises": (Renoised(2), Ode(2)),
    "known noise": (KnownNoise(), Ode(2)),
    "known noise, both ways": (KnownNoise(both=True), Ode(2)),
    "a shortcut": (Shortcuts("euler"), SomeSteps(2, 1)),
    "three shortcuts": (Shortcuts("euler"), SomeSteps(2, 3)),
    "two leaps": (Shortcuts("lagrange"), TwoLeaps(2)),
}


class Counting(Net):
    """Counts the states that it evaluates, with gradients and without."""

    def __init__(self) -> None:
        super().__init__()
        self.graded = self.frozen = 0

    def forward(self, x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.graded += len(x)
        else:
            self.frozen += len(x)
        return super().forward(x, sigma, prompt)


@pytest.mark.parametrize("roles", [(), ("ref",), ("ref", "slow")])
@pytest.mark.parametrize("name", STARTS)
def test_evaluations_and_decodes_are_as_many_as_said(name: str, roles: tuple[str, ...]) -> None:
    starts, planner = STARTS[name]
    likelihood, net, decoded = Pathwise(starts), Counting(), list[int]()
    loss = RewardGradient(anchors=tuple(Anchor(0.1, role) for role in roles))

    def slopes(x0: Tensor, rows: Any, trained: Tensor, words: Any) -> tuple[Tensor, Tensor]:
        decoded.append(len(trained))
        return x0.detach().sum(1), torch.ones_like(x0)

    learner: Any = SimpleNamespace(
        algorithm=SimpleNamespace(likelihood=likelihood, loss=loss),
        policies=SimpleNamespace(using=lambda role: nullcontext()),
    )
    reward_path: Any = SimpleNamespace(slopes=slopes)
    made = rollout(planner, net)
    net.graded = net.frozen = 0
    for part in rows(likelihood, made):
        path_entries(learner, net, reward_path, part).value.sum().backward()
    assert net.graded == DRAWS * likelihood.graded(made.plan, len(roles))
    assert net.frozen == DRAWS * likelihood.frozen(made.plan, len(roles))
    assert sum(decoded) == DRAWS * likelihood.decoded(made.plan)
