"""Paths to a clean sample: against plain loops, closed forms and finite differences."""

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

from flowrl.contrib.draft_lv import Renoised
from flowrl.likelihoods.pathwise import (
    KnownNoise,
    PathRows,
    Pathwise,
    noise_of,
)
from flowrl.likelihoods.rows import Evaluation
from flowrl.likelihoods.shortcuts import Kept
from flowrl.losses.base import Anchor
from flowrl.losses.reward import RewardGradient
from flowrl.recipes import RECIPES
from samplers import Latents, Rollout, roll
from samplers.noise import normal
from samplers.routes.keeping import kept_steps
from samplers.routes.tails import LastSteps, OneOfSteps
from tests.support.tiny import TinyFlow

SIGMAS = [1.0, 0.9, 0.7, 0.4, 0.0]
EXACT = {"rtol": 0, "atol": 1e-10}


class Net(nn.Module):
    """A velocity that is neither linear in the state nor alike at all levels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.calls = 0

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(torch.cat([x, sigma[:, None].to(x) + 0.3 * prompt[:, None]], 1))


def rollout(plan: Any, net: nn.Module, group: int = 2) -> Rollout:
    (made,) = roll(
        plan(SIGMAS, 0, 0), net, Latents((3,), dtype=torch.float64), (4, 7), seed=3, iteration=5
    )
    return made


def rows(likelihood: Pathwise, made: Rollout) -> list[PathRows]:
    points = torch.ones(len(made.x0), len(SIGMAS) - 1)
    return likelihood.rows(made, points, points.bool())


def reward(x0: torch.Tensor) -> torch.Tensor:
    return (x0 * torch.tensor([1.0, -2.0, 0.5], dtype=x0.dtype)).sin().sum(1)


def slope(net: nn.Module, value: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad(value, list(net.parameters()))
    return torch.cat([part.flatten() for part in found])


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    made = FlowMatchEulerDiscreteScheduler(shift=1.0)
    made.set_timesteps(sigmas=SIGMAS[:-1])
    # its own levels are float32: a float64 comparison needs those of the plan
    made.sigmas = torch.tensor(SIGMAS, dtype=torch.float64)
    return made


@pytest.mark.parametrize("last", [1, 2, 4])
def test_drafts_gradient_is_that_of_a_plain_loop_with_the_pipelines_scheduler(last):
    net = Net()
    made = rollout(LastSteps(2, last), net)
    (part,) = rows(Pathwise(Kept()), made)
    path = Pathwise(Kept()).path(net, part)
    torch.testing.assert_close(path.x0.detach(), made.x0, **EXACT)
    got = slope(net, reward(path.x0).sum())
    steps, x = scheduler(), normal([(3, 5, d, "root", i) for d in (4, 7) for i in (0, 1)], (3,))
    x = x.double()
    for k, t in enumerate(steps.timesteps):
        with torch.set_grad_enabled(k >= 4 - last):
            v = net(x, steps.sigmas[k].expand(4), torch.tensor([0, 0, 1, 1]))
            h = steps.sigmas[k + 1] - steps.sigmas[k]
            stepped = steps.step(v.detach(), t, x.detach(), return_dict=False)[0]
            x = x + h * v  # the scheduler casts to float32 inside: the same step in float64
            torch.testing.assert_close(stepped.double(), x.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(path.x0.detach(), x.detach(), **EXACT)
    torch.testing.assert_close(got, slope(net, reward(x).sum()), **EXACT)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_path_has_its_velocities_and_evaluates_several_once_more_for_gradients(steps):
    net = Net()
    (part,) = rows(Pathwise(Kept()), rollout(LastSteps(2, steps), net))
    net.calls = 0
    path = Pathwise(Kept()).path(net, part)
    assert net.calls == steps
    slope(net, reward(path.x0).sum())
    assert net.calls == (steps if steps == 1 else 2 * steps)  # one step keeps what it computed
    levels = SIGMAS[4 - steps : 4]
    for state, velocity, sigma in zip(path.states, path.velocities, levels, strict=True):
        level = torch.full((4,), sigma, dtype=torch.float64)
        torch.testing.assert_close(velocity, net(state, level, part.prompt), **EXACT)
    out = torch.stack(path.velocities, 1)
    torch.testing.assert_close(Pathwise(Kept()).evaluate(net, part).out, out, **EXACT)
    torch.testing.assert_close(Pathwise(Kept()).at(net, part, path.states).out, out, **EXACT)


def test_a_path_has_the_credit_of_its_last_step():
    made = rollout(LastSteps(2, 2), Net())
    credit = torch.arange(16.0).view(4, 4)
    known = torch.ones(4, 4, dtype=torch.bool)
    (part,) = Pathwise(Kept()).rows(made, credit, known)
    assert part.advantage.tolist() == credit[:, 3:].tolist()


def test_drafts_gradient_is_that_of_finite_differences():
    net = Net()
    (part,) = rows(Pathwise(Kept()), rollout(LastSteps(2, 3), net))
    got = slope(net, reward(Pathwise(Kept()).path(net, part).x0).sum())
    direction = torch.randn(len(got), generator=torch.Generator().manual_seed(1)).double()
    start = nn.utils.parameters_to_vector(net.parameters()).detach()
    ends = []
    for way in (1e-5, -1e-5):
        nn.utils.vector_to_parameters(start + way * direction, net.parameters())
        with torch.no_grad():
            ends.append(float(reward(Pathwise(Kept()).path(net, part).x0).sum()))
    assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(float(got @ direction), rel=1e-6)


def test_one_step_on_a_velocity_of_its_own_weights_has_minus_the_steps_length():
    net = TinyFlow(2).double()
    made = rollout(LastSteps(1, 1), _wide(net), group=1)
    (part,) = rows(Pathwise(Kept()), made)
    path = Pathwise(Kept()).path(_wide(net), part)
    (found,) = torch.autograd.grad(path.x0[0, 0], [net.shift])
    assert found[0, 0].tolist() == pytest.approx([-0.4, -0.4 * 0.4])  # h, and h sigma


def _wide(net: TinyFlow) -> Any:
    """TinyFlow has two dims; the third stands still."""
    return lambda x, s, p: torch.cat([net(x[:, :2], s, p), 0 * x[:, 2:]], 1)


def test_several_steps_are_evaluated_again_and_one_is_not():
    for last, calls in ((1, 1), (3, 6)):
        net = Net()
        (part,) = rows(Pathwise(Kept()), rollout(LastSteps(2, last), net))
        net.calls = 0
        Pathwise(Kept()).path(net, part).x0.sum().backward()
        assert net.calls == calls


def test_refl_projects_from_the_kept_step():
    net = Net()
    made = rollout(OneOfSteps(2, 0.5, 0.75), net)  # two steps before the end
    (part,) = rows(Pathwise(Kept(project=True)), made)
    level = SIGMAS[2]
    assert kept_steps(made.plan) == (2,) and part.sigmas == (level, 0.0)
    v = net(part.x, torch.full((4,), level).double(), part.prompt)
    torch.testing.assert_close(Pathwise(Kept()).path(net, part).x0, part.x - level * v)


def test_the_kept_step_changes_with_the_iteration():
    plans = [kept_steps(OneOfSteps(1, 0.0, 1.0)(SIGMAS, i, 0)[0])[0] for i in range(40)]
    assert set(plans) == {0, 1, 2, 3}
    cuts = [kept_steps(LastSteps(1, 2, "normal", 1.0)(SIGMAS, i, 0)[0])[0] for i in range(60)]
    assert set(cuts) == {1, 2, 3} and cuts.count(2) < 60
    uniform = LastSteps(1, 2, "uniform")
    assert {kept_steps(uniform(SIGMAS, i, 0)[0]) for i in range(60)} == {(0,), (1,), (2,), (3,)}
    assert kept_steps(LastSteps(1, 3)(SIGMAS, 9, 0)[0]) == (1,)


def test_draft_lv_renoises_to_the_last_level():
    net = Net()
    made = rollout(RECIPES["draft_lv"](steps=4, group=2).plan, net)
    first, second = rows(Pathwise(Renoised(2)), made)
    assert first.sigmas == (0.4, 0.0) and not torch.equal(first.x, second.x)
    for draw, part in enumerate((first, second)):
        noise = noise_of(made, "renoised", draw)
        torch.testing.assert_close(part.x, 0.6 * made.x0 + 0.4 * noise)
    v = net(first.x, torch.full((4,), 0.4).double(), first.prompt)
    torch.testing.assert_close(Pathwise(Renoised()).path(net, first).x0, first.x - 0.4 * v)


STARTS = KnownNoise((0.3, 0.9), 0.2, both=True, strengths=((0.1, 0.25), (0.3, 0.01)))


def srpo_rows(net: Any = None) -> tuple[Rollout, PathRows, PathRows]:
    made = rollout(RECIPES["srpo"](steps=4, group=2).plan, net or Net())
    down, up = rows(Pathwise(STARTS), made)
    return made, down, up


def test_direct_align_returns_the_sample_for_the_exact_velocity():
    made, down, up = srpo_rows()
    noise = normal([(3, 5, d, "root", i) for d in (4, 7) for i in (0, 1)], (3,)).double()
    for part in (down, up):
        torch.testing.assert_close(part.noise, noise)
        x0 = Pathwise(STARTS).path(lambda x, s, p: noise - made.x0, part).x0
        torch.testing.assert_close(x0, made.x0, **EXACT)


def test_direct_aligns_two_steps_by_their_formulas():
    net = Net()
    made, down, up = srpo_rows(net)
    (hi, lo), (below, same) = down.sigmas, up.sigmas
    assert lo == same and hi > lo > below > 0.3 - 1e-12 and hi < 0.9 + 1e-12
    m = (lo - 0.3) / 0.6
    reach = min(0.2, m, 1 - m)
    assert hi - lo == pytest.approx(0.6 * reach) == lo - below
    assert down.strength == pytest.approx(0.1 + 0.15 * m)
    assert up.strength == pytest.approx(0.3 - 0.29 * m)
    assert up.swapped and not down.swapped
    eps, x0 = down.noise, made.x0
    x_hi, x_lo = (1 - hi) * x0 + hi * eps, (1 - below) * x0 + below * eps
    y = x_hi - (hi - lo) * net(x_hi, torch.full((4,), hi).double(), down.prompt)
    want = (y - lo * eps) / (1 - lo)
    torch.testing.assert_close(Pathwise(STARTS).path(net, down).x0, want)
    y = x_lo + (lo - below) * net(x_lo, torch.full((4,), below).double(), up.prompt)
    torch.testing.assert_close(Pathwise(STARTS).path(net, up).x0, (y - lo * eps) / (1 - lo))


def test_the_two_steps_of_direct_align_have_opposite_gradients():
    push = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    _, down, up = srpo_rows()
    ends = [Pathwise(STARTS).path(lambda x, s, p: x + push, part).x0 for part in (down, up)]
    found = [torch.autograd.grad(end.sum(), push)[0] for end in ends]
    (hi, lo), (below, _) = down.sigmas, up.sigmas
    torch.testing.assert_close(found[0], torch.full_like(push, -4 * (hi - lo) / (1 - lo)))
    torch.testing.assert_close(found[1], torch.full_like(push, 4 * (lo - below) / (1 - lo)))


def loss_of(loss: RewardGradient, score: list[float]) -> tuple[list[float], list[float]]:
    """Values, and their slopes in the score."""
    likelihood = Pathwise(Kept())
    r = torch.tensor(score, dtype=torch.float64)[:, None].requires_grad_()
    still = torch.zeros(len(score), 1, 3, dtype=torch.float64)
    says = {"new": Evaluation(r, still), "ref": Evaluation(r, still + 2)}
    place = torch.arange(len(score))
    kept = torch.ones(len(score), 1, dtype=torch.bool)
    rows = PathRows(place, r.detach(), kept, None, still[:, 0], (0.5, 0.0))
    entries = loss(likelihood, says, rows)
    (found,) = torch.autograd.grad(entries.value.sum(), r)
    return entries.value.flatten().tolist(), found.flatten().tolist()


def test_the_losses_by_their_formulas():
    assert loss_of(RewardGradient(), [0.5, -1.0]) == ([-0.5, 1.0], [-1.0, -1.0])
    hinge = RewardGradient(form="hinge", bound=2.0, scale=0.5)
    assert loss_of(hinge, [0.5, 3.0]) == ([0.75, 0.0], [-0.5, 0.0])
    assert loss_of(RewardGradient(form="target", bound=1.0), [0.5, 3.0]) == (
        [0.5, 2.0],
        [-1.0, 1.0],
    )
    anchored = RewardGradient(anchors=(Anchor(0.1),))
    assert loss_of(anchored, [0.0])[0] == pytest.approx([0.4])  # 0.1 |0 - 2|^2


def test_a_hinge_counts_the_samples_that_reach_its_bound():
    score, weight = (torch.tensor(v, dtype=torch.float64)[:, None] for v in ([1, 2, 3], [2, 4, 0]))
    rows = PathRows(torch.arange(3), score, score > 0, None, score, (0.5, 0.0), weight=weight)
    for form, satisfied in (("linear", None), ("target", None), ("hinge", [0.0, 1.0, 1.0])):
        loss = RewardGradient(form=form, bound=2.0)
        entries = loss(Pathwise(Kept()), {"new": Evaluation(score, None)}, rows)
        counted = entries.metrics.get("through/satisfied")
        assert (None if counted is None else counted[:, 0].tolist()) == satisfied
        assert torch.equal(entries.metrics["through/score"], score)
        assert torch.equal(entries.metrics["through/weight"], weight)
        assert torch.equal(entries.metrics["policy_loss"], entries.value)
        assert entries.value[2] == 0, "its weight is 0"
