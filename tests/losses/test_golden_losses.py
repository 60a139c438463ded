"""Densities, losses and gradients against arrays that the papers' own code produced."""

import pytest
import torch

from flowrl.credit.advantages import Clip, Context, Estimator, Rescale
from flowrl.likelihoods.matching import Matching, weighting
from flowrl.likelihoods.rows import Evaluation, TransitionRows
from flowrl.likelihoods.transition import Transition
from flowrl.losses.base import Anchor, metric_values
from flowrl.losses.ratio import Surrogate
from flowrl.losses.regression import NFT
from samplers import CPS
from tests import golden_api as api
from tests.support.golden_tools import (
    arrays,
    cases,
    close,
    columns,
    of_case,
    says,
    scores,
    transition_rows,
)


@pytest.mark.parametrize("c", range(4))
def test_flow_grpo_loss_and_gradient(c):
    z = arrays("flow_grpo_sde_step")
    step, eta, beta, clip, adv_clip, *adv = z["loss_params"][c].tolist()
    levels = z["sigmas"][int(step) : int(step) + 2]
    rows = transition_rows(z["x"], z["loss_prev_sample"][c], levels, eta)
    advantage = torch.tensor(adv).clamp(-adv_clip, adv_clip)[:, None]
    rows = TransitionRows(**{**vars(rows), "advantage": advantage})
    likelihood = Transition(kl_form="published")
    v = z["loss_v_theta"][c].clone().requires_grad_()
    evaluations = {
        "new": says(likelihood, v, rows),
        "old": Evaluation(z["loss_old_log_prob"][c][:, None], None),
        "ref": says(likelihood, z["loss_v_ref"][c], rows),
    }
    close(evaluations["new"].logp[:, 0].detach(), z["loss_log_prob"][c])
    surrogate = Surrogate(clip, clip, anchors=(Anchor(beta),) if beta else ())
    entries = surrogate(likelihood, evaluations, rows)
    close(metric_values(entries.metrics["ratio"])[:, 0], z["loss_ratio"][c])
    entries.value.mean().backward()
    close(entries.value.mean().detach(), z["loss_loss"][c], 1e-5)
    assert v.grad is not None
    close(v.grad, z["loss_dloss_dv"][c], 1e-7, 1e-3)
    if beta:
        close(entries.metrics["kl"].mean(), z["loss_kl_loss"][c], 1e-6, 1e-5)
    log_ratio = metric_values(entries.metrics["ratio"]).log()[:, 0]
    policy = api.clipped(log_ratio, advantage[:, 0], clip, clip)
    close(policy, z["loss_policy_loss"][c], 1e-5)


def test_flow_grpo_densities():
    z = arrays("flow_grpo_sde_step")
    for c in range(24):
        levels = z["sigmas"][int(z["step"][c]) : int(z["step"][c]) + 2]
        mean, std = api.step(
            "flow_sde", z["x"], z["v"], *levels, noise_level=float(z["noise_level"][c])
        )
        close(mean, z["mean"][c], 2e-6)
        close(std, z["std_dev_t"][c] * z["sqrt_dt"][c])
        close(api.log_density(mean, std, z["prev_sample"][c]), z["log_prob"][c], 1e-5)


def test_other_kernels_by_the_frozen_face():
    z = arrays("flow_cps_step")
    for c in range(20):
        levels = z["sigmas"][int(z["step"][c]) : int(z["step"][c]) + 2]
        mean, std = api.step("cps", z["x"], z["v"], *levels, eta=float(z["noise_level"][c]))
        close(mean, z["mean"][c], 2e-6)
        close(std, z["std"][c])
    z = arrays("flow_grpo_wan_step")
    for c, k in enumerate(z["step"].tolist()):
        levels = z["sigmas"][k : k + 2]
        mean, std = api.step("wan", z["x"], z["v"], *levels, sigma_max=float(z["sigmas"][1]))
        close(api.log_density(mean, std, z["prev_sample"][c]), z["log_prob"][c], 1e-5)


def test_the_cps_score_is_the_published_one():
    """-|x_next - mean|^2 of two policies differ by 2 std^2 times their log-densities."""
    z = arrays("flow_cps_step")
    for c in range(20):
        k, eta = int(z["step"][c]), float(z["noise_level"][c])
        if float(z["std"][c].max()) == 0:
            continue
        rows = transition_rows(z["x"], z["prev_sample"][c], z["sigmas"][k : k + 2], 0.7)
        rows = TransitionRows(**{**vars(rows), "kernel": CPS(eta)})
        likelihood = Transition("cps")
        new, old = (says(likelihood, z[v], rows) for v in ("v_given", "v"))
        got = likelihood.log_ratio(new, old, rows)[:, 0]
        close(got, z["log_prob_given"][c] - z["log_prob"][c], 1e-5)


@pytest.mark.parametrize("name", ["dance_ddim_step", "mm_ddpo_ddim"])
def test_ddim_densities(name):
    z = arrays(name)
    if name == "mm_ddpo_ddim":
        at, x, given = z["timesteps"], z["x"], z["prev"]
        for prediction, want in (("eps_old", "logp_old"), ("eps_new", "logp_new")):
            g = api.step("ddim", x, z[prediction], at, at - 20, eta=1.0, alphas=z["alphas_cumprod"])
            close(api.log_density(*g, given), z[want], 2e-5)
        ratio = z["logp_new"] - z["logp_old"]
        for clip in ("0.0001", "0.1"):
            got = api.clipped(ratio, z["adv"].clamp(-5, 5), float(clip), float(clip))
            close(got, z[f"loss_clip{clip}"], 1e-5)
        return
    for c, k in enumerate(z["step"].tolist()):
        at, eta = int(z["timesteps"][k]), float(z["eta"][c])
        g = api.step(
            "ddim", z["x"], z["noise_pred"], at, at - 20, eta=eta, alphas=z["alphas_cumprod"]
        )
        close(api.log_density(*g, z["prev_sample"][c]), z["log_prob"][c], 1e-5, 1e-5)


@pytest.mark.parametrize("c", range(8))
def test_guard_ratio_loss_and_gradient(c):
    z = arrays("grpo_guard_ratio_norm")
    step, eta, _, clip, *_ = z["cases"][c].tolist()
    levels = z["sigmas"][int(step) : int(step) + 2]
    rows = transition_rows(z["x"], z["prev_sample"][c], levels, eta)
    advantage = z["advantages"][c].clamp(-5, 5).float()[:, None]
    rows = TransitionRows(**{**vars(rows), "advantage": advantage})
    likelihood, v = Transition("ratio_norm"), z["v_theta"][c].clone().requires_grad_()
    evaluations = {"new": says(likelihood, v, rows), "old": says(likelihood, z["v_old"], rows)}
    ratio = likelihood.log_ratio(evaluations["new"], evaluations["old"], rows).exp()[:, 0]
    for source in ("closed_form", "verl_ratio", "pref_ratio", "ff_ratio_b1"):
        close(ratio.detach(), z[source][c], 1e-6)
    kl = likelihood.kl(evaluations["new"], evaluations["old"], rows)
    close(kl.mean().detach(), z["pref_kl"][c], 1e-8, 1e-4)
    std = z["std_dev_t"][c] * z["sqrt_dt"][c]
    close(api.ratio_norm(z["mean"][c], z["old_mean"][c], z["prev_sample"][c], std), ratio.detach())
    loss = Surrogate(clip, clip)(likelihood, evaluations, rows).value.mean() / z["sqrt_dt"][c] ** 2
    loss.backward()
    close(loss.detach(), z["verl_loss"][c], 1e-5, 1e-6)
    assert v.grad is not None
    close(v.grad, z["verl_grad"][c], 1e-7, 2e-3)


WEIGHTINGS = ["Uniform", "t", "tpow2", "huber", "ghuber_p0.25", "ghuber_p0.5", "ghuber_p1.0"]


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_awm_weightings(name):
    z = arrays("mm_awm_weightings")
    kind, _, power = name.partition("_p")
    kind = kind.replace("pow2", "**2")
    v = z["v"].double().requires_grad_()
    given = (z["eps"].double(), z["x0"].double(), z["t"].double())
    logp = api.matching_logp(v, *given, kind, float(power or 0.25))
    close(logp.detach(), z[f"lp_{name}"])
    logp.sum().backward()
    assert v.grad is not None
    close(v.grad, z[f"grad_{name}"], 1e-6, 1e-5)


def test_elbo_kl_weight_is_one_over_twice_the_published_variance():
    z = arrays("mm_awm_weightings")
    rows = api._matching_rows(z["x0"], z["x0"], z["eps"], z["t"], z["t"])
    likelihood = Matching(kl_weight="elbo")
    a, b = (Evaluation(z["t"][:, None], z[k]) for k in ("v", "eps"))
    want = (z["v"] - z["eps"]).square().flatten(1).mean(1) / (2 * z["std_dev_t"] ** 2)
    close(likelihood.kl(a, b, rows)[:, 0], want, 1e-5, 1e-5)


AWM_NAMES = {"Uniform": "uniform", "t": "t", "t**2": "t2", "huber": "huber", "ghuber": "ghuber"}


@pytest.mark.parametrize("c", [f"c{i}" for i in range(5)])
def test_awm_loss(c):
    z = of_case("mm_awm_loss", c)
    case = cases("mm_awm_loss")[c]
    kernel = weighting(AWM_NAMES[case["weighting"]])
    likelihood, trust = Matching(weight=kernel), "trust"
    given = scores(z["adv"].double())  # already an advantage: cut and rescaled as in the recipe
    chain = (Clip(5.0), Rescale(5.0, float(case["adv_max"])))
    advantage = Estimator(chain)(given, Context(columns((3,)), torch.ones(1)))[0][:, 0].repeat(6)
    x0 = z["x0"].repeat(6, 1, 1, 1)
    rows = api._matching_rows(*(a.double() for a in (z["x_t"], x0, z["noise"], z["t"], advantage)))
    v = z["v"].double().requires_grad_()
    evaluations = {
        "new": says(likelihood, v, rows),
        "old": Evaluation(z["old_log_prob"][:, None], None),
        "ref": says(likelihood, z["v_ref"].double(), rows),
        trust: says(likelihood, z["v_ema"].double(), rows),
    }
    close(evaluations["new"].logp[:, 0].detach(), z["log_prob"])
    anchors = (Anchor(case["beta"]), Anchor(case["ema_beta"], trust))
    entries = Surrogate(case["clip"], case["clip"], anchors=anchors)(likelihood, evaluations, rows)
    close(metric_values(entries.metrics["ratio"])[:, 0], z["ratio"])
    close(entries.metrics["kl"].mean(), z["kl_loss"])
    close(entries.metrics["kl_trust"].mean(), z["ema_kl_loss"])
    entries.value.mean().backward()
    close(entries.value.mean().detach(), z["loss"])
    assert v.grad is not None
    close(v.grad, z["grad_v"], 1e-7, 1e-4)


@pytest.mark.parametrize("c", [f"c{i}" for i in range(5)])
def test_nft_loss_and_gradient(c):
    z = of_case("mm_nft_loss", c)
    case = cases("mm_nft_loss")[c]
    v = z["v"].clone().requires_grad_()
    given = (z["v_old"], z["v_ref"], z["xt"], z["x0"], z["noise"], z["t"], z["adv"])
    loss = api.nft(v, *given, case["beta"], case["advc"], case["kl"], case["adv_mode"] or "all")
    loss.backward()
    close(loss.detach(), z["loss"], 1e-5)
    assert v.grad is not None
    close(v.grad, z["grad_v"], 1e-6, 1e-4)


MODES = {"all": 0, "positive_only": 1, "negative_only": 2, "one_only": 3, "binary": 4}


@pytest.mark.parametrize("mode", MODES)
def test_nft_reads_advantages_as_published(mode):
    """r by mode, written out as the method says it, for cut advantages of both signs."""
    a = torch.tensor([-7.0, -2.0, 0.0, 0.5, 5.5])
    cut = a.clamp(-5, 5)
    read = [cut, a.clamp(0, 5), a.clamp(-5, 0), (a > 0).float(), a.sign()][MODES[mode]]
    r = (read / 10 + 0.5).clamp(0, 1)
    got = (0.5 + NFT(mode=mode)._read(a) / 10).clamp(0, 1)
    close(got, r)


@pytest.mark.parametrize("c", ["c0", "c1", "c2"])
def test_diffusion_dpo_loss_and_gradient(c):
    z = of_case("mm_diffusion_dpo", c)
    beta = cases("mm_diffusion_dpo")[c]["beta"]
    flow = z["noise"].repeat(2, 1, 1, 1) - torch.cat([z["x_w"], z["x_l"]])
    noise = z["noise"].repeat(2, 1, 1, 1)
    kinds = [("v", "v_ref", flow, "flow"), ("eps_pred", "eps_ref", noise, "eps")]
    for new, ref, target, name in kinds:
        prediction = z[new].clone().requires_grad_()
        ends = (a for pair in (z[ref], target) for a in pair.chunk(2))
        loss = api.diffusion_dpo(*prediction.chunk(2), *ends, beta)
        loss.backward()
        close(loss.detach(), z[f"{name}_loss"], 1e-5 if beta < 1000 else 2e-5)
        gradient = z.get(f"{name}_grad_v", z.get(f"{name}_grad"))
        assert prediction.grad is not None and gradient is not None
        close(prediction.grad, gradient, 1e-6, 1e-3)
