"""Losses on groups, and Euphonium's step, against arrays of their authors' own functions."""

import pytest
import torch

from tests import golden_api as api
from tests.support.golden_tools import arrays, cases, close, of_case


@pytest.mark.parametrize("c", ["c0", "c1", "c2"])
def test_dgpo_loss_and_gradient(c):
    z, case = of_case("mm_dgpo_loss", c), cases("mm_dgpo_loss")[c]
    v = z["v"].clone().requires_grad_()
    given = [z[name] for name in ("v_old", "v_ref", "x0", "noise", "adv")]
    names = ("beta_dpo", "clip", "kl", "clip_kl", "clip_dsm", "ema_ref")
    numbers = [case[name] for name in names]
    got = api.dgpo(v, *given, 4, *numbers)
    got["loss"].backward()
    close(got["dsm"].detach(), z["dsm"])
    close(got["ratio"], z["ratio"])
    close(got["policy_loss"], z["dgpo_loss"])
    close(got["policy_loss"], z["ff_dgpo_loss"])
    close(got["loss"].detach(), z["loss"])
    assert v.grad is not None
    close(v.grad, z["grad_v"], 1e-7, 1e-4)
    got = api.dgpo(v, *given, 4, *numbers)
    free = torch.autograd.grad(got["dsm"].sum(), v)[0].flatten(1).abs().sum(1)
    assert torch.equal(free == 0, z["should_clip"] & case["clip_dsm"])


@pytest.mark.parametrize("c", ["c0", "c1", "c2"])
def test_crd_loss_and_gradient(c):
    z, case = of_case("mm_crd_loss", c), cases("mm_crd_loss")[c]
    v = z["v"].clone().requires_grad_()
    temperature = case["weight_temp"] if case["weight_temp"] > 0 else None
    got = api.crd(
        v, z["v_old"], z["v_ref"], z["v_target"], z["adv"], case["crd_beta"], case["kl"],
        temperature, case["loss_type"], case["adaptive"], case["rak"],
    )  # fmt: skip
    got["loss"].backward()
    close(got["r"].detach(), z["r_theta"])
    close(got["policy_loss"], z["policy_loss"])
    close(got["loss"].detach(), z["loss"])
    assert v.grad is not None
    close(v.grad, z["grad_v"], 1e-7, 1e-4)


EUPHONIUM = {
    "c0": {},
    "c1": {"scale": 0.0},
    "c2": {"scale": 0.01, "normalise": None, "guided_logprob": False},
    "c3": {"scale": -1.0, "kl_beta": 3.125, "normalise": None},
    "c4": {"scale": -1.0, "kl_beta": 3.125, "by_dsigma": True},
}


@pytest.mark.parametrize("step", [0, 8, 15])
@pytest.mark.parametrize("c", EUPHONIUM)
def test_euphonium_step(c, step):
    z, named = arrays("mm_euphonium_flux_step"), of_case("mm_euphonium_flux_step", f"{c}_i{step}")
    levels = z["sigmas"][step : step + 2]
    got = api.euphonium_step(z["x"], z["v"], *levels, 0.25, z["reward_grad"], **EUPHONIUM[c])
    close(got["mean"], named["mean"], 1e-5)
    for state, want in ((z["prev_sample"], "logp"), (named["sampled"], "sampled_logp")):
        close(api.log_density(got["scored_mean"], got["std"], state), named[want], 1e-5, 1e-5)
