"""The pull towards a teacher: its formula, its gradient, and the terms beside it."""

import pytest
import torch

from flowrl.likelihoods.rows import Evaluation, TransitionRows
from flowrl.likelihoods.transition import Transition
from flowrl.losses.base import Anchor
from flowrl.losses.distillation import Distillation
from samplers import CPS, FlowSDE

S, TO = 0.8, 0.6
DRAWS = torch.Generator().manual_seed(0)
X, V, TEACHER, START = (torch.randn(3, 4, generator=DRAWS, dtype=torch.float64) for _ in range(4))


def rows(kernel) -> TransitionRows:
    level, to = (torch.full((3,), s, dtype=torch.float64) for s in (S, TO))
    return TransitionRows(
        torch.arange(3), torch.zeros(3, 1), torch.ones(3, 1, dtype=torch.bool), None,
        X, X, level, to, kernel,
    )  # fmt: skip


def entries(loss: Distillation, likelihood: Transition, kernel, v: torch.Tensor):
    made, given = rows(kernel), {"new": v, "teacher": TEACHER, "ref": START}
    evaluations: dict[str, Evaluation] = {
        role: likelihood.evaluate(lambda *_, own=own: own, made) for role, own in given.items()
    }
    return loss(likelihood, evaluations, made)


@pytest.mark.parametrize(
    ("form", "factor"),
    [  # of the velocities' squared difference; g^2 = 0.49 s / (1 - s), q^2 = g^2 h
        ("exact", lambda slope, g2, h: slope**2 / (2 * g2 * h)),
        ("published", lambda slope, g2, h: slope**2 / (2 * g2)),
        ("velocity", lambda slope, g2, h: 1.0),
        ("mean", lambda slope, g2, h: slope**2),
    ],
)
def test_the_loss_is_a_weighted_error_of_the_velocity(form, factor):
    g2, h = 0.49 * S / (1 - S), S - TO
    slope = h * (1 + g2 * (1 - S) / (2 * S))
    v = V.clone().requires_grad_()
    got = entries(Distillation(weight=0.7), Transition(kl_form=form), FlowSDE(0.7), v)
    error = (V - TEACHER).square().mean(1, keepdim=True)
    scale = 0.7 * factor(slope, g2, h)
    torch.testing.assert_close(got.value.detach(), scale * error)
    torch.testing.assert_close(got.metrics["kl_teacher"], scale / 0.7 * error)
    (grad,) = torch.autograd.grad(got.value.sum(), v)
    torch.testing.assert_close(grad, 2 * scale * (V - TEACHER) / 4)


def test_without_noise_the_mean_form_is_that_of_an_ode():
    """mean_d |mean - mean_T|^2 = h^2 |v - v_T|^2; half of it is the ODE form of the sources."""
    got = entries(Distillation(), Transition(kl_form="mean"), CPS(1e-6), V)
    error = (V - TEACHER).square().mean(1, keepdim=True)
    torch.testing.assert_close(got.value, (S - TO) ** 2 * error, rtol=1e-4, atol=0)


def test_the_start_is_a_second_anchor():
    loss = Distillation(weight=2.0, anchors=(Anchor(0.1),))
    assert loss.roles == {"teacher", "ref"}
    got = entries(loss, Transition(kl_form="velocity"), FlowSDE(0.7), V)
    far, near = ((V - to).square().mean(1, keepdim=True) for to in (TEACHER, START))
    torch.testing.assert_close(got.value, 2 * far + 0.1 * near)
