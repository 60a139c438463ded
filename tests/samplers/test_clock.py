"""Parts of a state at levels of their own, against plain loops over parts in float64."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from flowrl.likelihoods.transition import KlForm, Transition
from samplers import CPS, Chain, FlowSDE, Latents, Ode, Plan, Tree, Window, roll
from samplers.clock import PartClock, on_clock
from samplers.kernels import Gaussian, Kernel, mean_log_prob
from samplers.layout import Layout

SIZES = (2, 3, 4)
OWN = (0.96, 0.7, 0.4, 0.0)  # the levels of every part
IN_TURN = tuple(
    (*(0.0,) * part, level, *(OWN[0],) * (2 - part)) for part in range(3) for level in OWN
)
# one after the other: the last level of a part is the state before the first step of the next
TURNS = PartClock(SIZES, tuple(dict.fromkeys(IN_TURN)))
# each part a step behind the one before it
WAVE = PartClock(
    SIZES, tuple(tuple(OWN[max(0, min(3, k - p))] for p in range(3)) for k in range(6))
)
TOGETHER = PartClock(SIZES, tuple((level,) * 3 for level in OWN))
CLOCKS = {"in turn": TURNS, "a wave": WAVE, "together": TOGETHER}
ETA = 0.7


@dataclass(frozen=True)
class Network:
    """A velocity of each part that reads the whole state and the part's own level."""

    clock: PartClock
    weight: Tensor

    def own(self, x: Tensor, levels: tuple[float, ...]) -> Tensor:
        parts = torch.cat(
            [torch.full((n,), s) for n, s in zip(self.clock.sizes, levels, strict=True)]
        )
        return torch.tanh(x @ self.weight.to(x) + parts.to(x))

    def __call__(self, x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        steps = self.clock.index(sigma).tolist()
        rows = [self.own(row[None], self.clock.levels[k]) for row, k in zip(x, steps, strict=True)]
        return self.clock.velocity(torch.cat(rows), sigma)


def network(clock: PartClock) -> Network:
    size = sum(clock.sizes)
    return Network(clock, torch.randn(size, size, generator=torch.Generator().manual_seed(2)) / 3)


def sampled(clock: PartClock, kernel: Kernel, velocity: Network) -> tuple[Plan, Latents]:
    plan = on_clock(Chain(kernel, 3)(clock.sigmas, 0, 0)[0], clock)
    layout = Layout(("a", "b", "c"), tuple((n,) for n in clock.sizes))
    return plan, Latents((sum(clock.sizes),), layout=layout)


def parts(clock: PartClock) -> list[slice]:
    ends = [sum(clock.sizes[:k]) for k in range(len(clock.sizes) + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def plain_step(x: Tensor, v: Tensor, s: float, to: float, kernel: str) -> tuple[Tensor, float]:
    """Mean and std of one part's step: eq. 9 of arXiv:2505.05470, or CPS."""
    if to == 0:
        return x - s * v, 0.0
    if kernel == "cps":
        std = to * math.sin(ETA * math.pi / 2)
        return (1 - to) * (x - s * v) + math.sqrt(to**2 - std**2) * (x + (1 - s) * v), std
    g = ETA * math.sqrt(s / (1 - s))
    mean = x - (s - to) * (v + g**2 / (2 * s) * (x + (1 - s) * v))
    return mean, g * math.sqrt(s - to)


@pytest.mark.parametrize("kernel", ["flow_sde", "cps"])
@pytest.mark.parametrize("name", CLOCKS)
def test_densities_and_gradients_are_those_of_a_loop_over_parts(name: str, kernel: str) -> None:
    clock = CLOCKS[name]
    model = network(clock)
    plan, latents = sampled(clock, CPS(ETA) if kernel == "cps" else FlowSDE(ETA), model)
    (rollout,) = roll((plan,), model, latents, [5], seed=0, iteration=0)
    assert rollout.edges
    model.weight.requires_grad_()
    weight = model.weight.detach().double().requires_grad_()
    plain = Network(clock, weight)
    columns = len(plan.steps)
    once = torch.ones(3, columns)
    for rows in Transition().rows(rollout, once, once > 0):
        ours = Transition().evaluate(model, rows).logp[:, 0]
        assert rows.old is not None
        assert torch.equal(ours.detach(), rows.old.logp[:, 0])  # the policy that sampled
        step = clock.index(rows.sigma)[0]
        at, to = clock.levels[step], clock.levels[step + 1]
        theirs = []
        for x, after in zip(rows.x.double(), rows.x_next.double(), strict=True):
            v, logs = plain.own(x[None], at)[0], list[Tensor]()
            for part, s, s_next in zip(parts(clock), at, to, strict=True):
                mean, std = plain_step(x[part], v[part], s, s_next, kernel)
                if s > s_next > 0:
                    away = (after[part] - mean) / std
                    logs.append(-0.5 * away**2 - math.log(std) - 0.5 * math.log(2 * math.pi))
                else:  # at rest, or without noise to the data
                    held = x[part] if s == s_next else mean
                    torch.testing.assert_close(after[part], held.detach(), rtol=0, atol=1e-5)
            theirs.append(torch.cat(logs).mean())
        logp = torch.stack(theirs)
        torch.testing.assert_close(ours.double(), logp, rtol=0, atol=2e-5)
        (ours_of,) = torch.autograd.grad(ours.sum(), model.weight)
        (theirs_of,) = torch.autograd.grad(logp.sum(), weight)
        torch.testing.assert_close(ours_of.double(), theirs_of, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CLOCKS)
def test_a_step_without_noise_is_eulers_of_each_part(name: str) -> None:
    clock = CLOCKS[name]
    model = network(clock)
    plan = on_clock(Ode(2)(clock.sigmas, 0, 0)[0], clock)
    (rollout,) = roll((plan,), model, Latents((9,)), [1], seed=0, iteration=0)
    x = torch.stack(
        [*roll((plan,), lambda x, *_: 0 * x, Latents((9,)), [1], seed=0, iteration=0)[0].x0]
    )
    x = x.double()
    for at, to in pairwise(clock.levels):
        v = torch.cat([model.own(row[None], at) for row in x])
        for part, s, s_next in zip(parts(clock), at, to, strict=True):
            x[:, part] -= (s - s_next) * v[:, part]
    torch.testing.assert_close(rollout.x0.double(), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["exact", "published", "velocity", "mean"])
@pytest.mark.parametrize("name", CLOCKS)
def test_divergences_are_those_of_each_part(name: str, form: KlForm) -> None:
    clock = CLOCKS[name]
    model = network(clock)
    plan, latents = sampled(clock, FlowSDE(ETA), model)
    (rollout,) = roll((plan,), model, latents, [5], seed=0, iteration=0)
    other = replace(model, weight=model.weight + 0.1)
    likelihood, once = Transition(kl_form=form), torch.ones(3, len(plan.steps))
    for rows in likelihood.rows(rollout, once, once > 0):
        new, ref = (likelihood.evaluate(policy, rows) for policy in (model, other))
        ours = likelihood.kl(new, ref, rows)[:, 0]
        step = clock.index(rows.sigma)[0]
        at, to = clock.levels[step], clock.levels[step + 1]
        for row, x in enumerate(rows.x.double()):
            values = list[Tensor]()
            v, v_ref = (policy.own(x[None], at)[0] for policy in (model, other))
            for part, s, s_next in zip(parts(clock), at, to, strict=True):
                if not s > s_next > 0:
                    continue
                (mean, std), (mean_ref, _) = (
                    plain_step(x[part], of[part], s, s_next, "flow_sde") for of in (v, v_ref)
                )
                square = (mean - mean_ref) ** 2
                scaled = {
                    "exact": square / (2 * std**2),
                    "published": square * (s - s_next) / (2 * std**2),
                    "velocity": (v[part] - v_ref[part]) ** 2,
                    "mean": square,
                }
                values.append(scaled[form])
            torch.testing.assert_close(
                ours[row].double(), torch.cat(values).mean(), rtol=2e-3, atol=1e-6
            )


def test_the_clock_falls_by_the_share_of_the_parts_that_move() -> None:
    assert TOGETHER.sigmas == OWN
    assert TURNS.sigmas[0] == OWN[0] and TURNS.sigmas[-1] == 0
    first = TURNS.sigmas[0] - TURNS.sigmas[1]
    assert first == pytest.approx((OWN[0] - OWN[1]) * SIZES[0] / sum(SIZES))
    assert TURNS.even and TOGETHER.even and not WAVE.even


def test_the_noise_of_a_step_that_ends_a_part_is_taken_by_the_step_before_it() -> None:
    planned = Window(FlowSDE(ETA), 2, size=2)(TURNS.sigmas, 0, 0)[0]
    steps = on_clock(planned, TURNS).steps
    plain = Chain(FlowSDE(ETA), 2)(TURNS.sigmas, 0, 0)[0]
    noisy = [step.noisy for step in on_clock(plain, TURNS).steps]
    assert noisy == [True, True, False] * 3
    last = replace(
        plain,
        steps=tuple(replace(s, train=k == 5, noisy=k == 5) for k, s in enumerate(plain.steps)),
    )
    marked = on_clock(last, TURNS).steps
    assert [k for k, step in enumerate(marked) if step.train and step.noisy] == [4]
    assert any(step.train for step in steps)


def test_a_branch_copies_all_parts() -> None:
    model = network(TURNS)
    plan = on_clock(Tree(FlowSDE(ETA), at=(0, 3), branch=2)(TURNS.sigmas, 0, 0)[0], TURNS)
    (rollout,) = roll((plan,), model, Latents((9,)), [1], seed=0, iteration=0)
    first, second = rollout.edges[0], next(edge for edge in rollout.edges if edge.step == 3)
    assert len(rollout.x0) == 4 and len(first.x) == 2
    assert torch.equal(second.x[0], second.x[1]) and not torch.equal(second.x[1], second.x[2])
    early = parts(TURNS)[0]  # clean before the second split: siblings share it
    assert torch.equal(rollout.x0[0, early], rollout.x0[1, early])
    assert not torch.equal(rollout.x0[1, early], rollout.x0[2, early])


def test_a_density_leaves_out_entries_without_noise() -> None:
    mean, after = torch.zeros(1, 3), torch.tensor([[1.0, 2.0, 9.0]])
    std = torch.tensor([[1.0, 2.0, 0.0]])
    ours = mean_log_prob(Gaussian(mean, std), after)
    normal = [
        torch.distributions.Normal(0, s).log_prob(torch.tensor(x))
        for s, x in ((1.0, 1.0), (2.0, 2.0))
    ]
    assert float(ours) == pytest.approx(float(sum(normal)) / 2)


def test_the_way_in_which_parts_move_is_said_in_words():
    words = {name: clock.moved for name, clock in CLOCKS.items()}
    assert words == {
        "in turn": "moved one after the other",
        "a wave": "moved in a wave",
        "together": "moved together",
    }
