"""Steps, windows and solvers against arrays made by running the papers' own code.

Tolerances: 1e-6 for states, 1e-5 for log-densities; inputs are float32.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from samplers import (
    CPS,
    DDIM,
    DPM2M,
    DPM3M,
    SA,
    ConstantSDE,
    Decaying,
    Euler,
    ExponentiallyDecaying,
    FlowSDE,
    Frozen,
    Gaussian,
    Kernel,
    Progressive,
    WanSDE,
    Window,
    mean_log_prob,
)
from samplers.adapt import flow_velocity, level, scale, to_vp
from samplers.kernels import per_row
from samplers.routes.particles import FeynmanKac, normalised
from samplers.solvers import Past, Point

FOLDER = Path(__file__).parents[1] / "golden"


def arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def tensor(a) -> torch.Tensor:
    return torch.as_tensor(np.asarray(a))


def near(got, want, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(got.double(), tensor(want).double(), rtol=tolerance, atol=tolerance)


def check_step(kernel: Kernel, z, sigmas, step: int, c: int) -> Gaussian:
    """Next state, its density under the sampler and under another velocity."""
    x = tensor(z["x"])
    at, to = (torch.full((len(x),), float(sigmas[k])) for k in (step, step + 1))
    g = kernel(x, tensor(z["v"]), at, to)
    x_next = tensor(z["prev_sample"][c])
    near(g.mean + per_row(g.std, x) * tensor(z["eps"][c]), x_next)
    near(mean_log_prob(g, x_next), z["log_prob"][c], 1e-5)
    other = kernel(x, tensor(z["v_given"]), at, to)
    near(mean_log_prob(other, x_next), z["log_prob_given"][c], 1e-5)
    return g


def test_flow_grpo_sde_step():
    z = arrays("flow_grpo_sde_step")
    for c, (step, eta) in enumerate(zip(z["step"], z["noise_level"], strict=True)):
        g = check_step(FlowSDE(float(eta)), z, z["sigmas"], int(step), c)
        near(g.mean, z["mean"][c])
        near(g.std, z["std_dev_t"][c] * z["sqrt_dt"][c])


def test_flow_grpo_sde_step_of_rows_at_different_levels_and_of_video_and_bfloat16():
    z = arrays("flow_grpo_sde_step")
    sigmas, steps = tensor(z["sigmas"]), tensor(z["mixed_steps"])
    g = FlowSDE(0.7)(tensor(z["x"]), tensor(z["v"]), sigmas[steps], sigmas[steps + 1])
    near(g.mean, z["mixed_mean"])
    near(mean_log_prob(g, tensor(z["mixed_prev"])), z["mixed_log_prob"], 1e-5)
    at, to = sigmas[[4, 4]], sigmas[[5, 5]]
    g = FlowSDE(0.7)(tensor(z["x5"]), tensor(z["v5"]), at, to)
    near(g.mean + per_row(g.std, g.mean) * tensor(z["r5_eps"]), z["r5_prev"])
    near(mean_log_prob(g, tensor(z["r5_prev"])), z["r5_log_prob"], 1e-5)
    x, v = tensor(z["x"]).bfloat16(), tensor(z["v"]).bfloat16()
    near(
        mean_log_prob(FlowSDE(0.7)(x, v, at, to), tensor(z["bf16_prev"])), z["bf16_log_prob"], 1e-5
    )


def test_flow_grpo_gradient_of_the_log_density():
    z = arrays("flow_grpo_sde_step")
    for c, (step, eta) in enumerate(zip(z["step"], z["noise_level"], strict=True)):
        at, to = (torch.full((2,), float(z["sigmas"][k])) for k in (step, step + 1))
        v = tensor(z["v_given"]).requires_grad_()
        g = FlowSDE(float(eta))(tensor(z["x"]), v, at, to)
        mean_log_prob(g, tensor(z["prev_sample"][c])).sum().backward()
        near(v.grad, z["dlogp_dv"][c], 2e-5)  # float32 differences over a variance of 4e-5


def test_flow_cps_step():
    z = arrays("flow_cps_step")
    for c, (step, eta) in enumerate(zip(z["step"], z["noise_level"], strict=True)):
        at, to = (torch.full((2,), float(z["sigmas"][k])) for k in (step, step + 1))
        g = CPS(float(eta))(tensor(z["x"]), tensor(z["v"]), at, to)
        near(g.mean, z["mean"][c])
        near(g.std, z["std"][c])
        near(g.mean + per_row(g.std, g.mean) * tensor(z["eps"][c]), z["prev_sample"][c])


def test_flow_grpo_wan_step():
    z = arrays("flow_grpo_wan_step")
    kernel = WanSDE().bound([float(s) for s in z["sigmas"]])
    for c, step in enumerate(z["step"]):
        g = check_step(kernel, z, z["sigmas"], int(step), c)
        near(g.mean, z["mean"][c])
        near(g.std, z["std_dev_t"][c] * z["sqrt_dt"][c])


def test_dance_flow_step():
    z = arrays("dance_flow_step")
    lists = [z["sigmas_flux"], z["sigmas_hunyuan"], z["sigmas_skyreels"]]
    for c, (which, step, eta) in enumerate(zip(z["sched"], z["step"], z["eta"], strict=True)):
        check_step(ConstantSDE(float(eta)), z, lists[which], int(step), c)


def test_mixgrpo_step():
    """Its Dance step lacks the density's normaliser (a bug): compared without it."""
    z = arrays("mixgrpo_step")
    x, v, given = (tensor(z[k]) for k in ("x", "v", "v_given"))
    levels = lambda step: (torch.full((2,), float(z["sigmas"][k])) for k in (step, step + 1))
    for c, (step, eta) in enumerate(zip(z["step"], z["eta"], strict=True)):
        at, to = levels(int(step))
        g = FlowSDE(float(eta))(x, v, at, to)
        near(g.mean, z["flow_mean"][c])
        near(g.std, np.repeat(z["flow_std"][c], 2))
        if z["deterministic"][c]:
            near(_solve(Euler(), x, v, float(at[0]), float(to[0])), z["flow_prev"][c])
            continue
        near(mean_log_prob(g, tensor(z["flow_prev"][c])), z["flow_log_prob"][c], 1e-5)
        other = FlowSDE(float(eta))(x, given, at, to)
        near(mean_log_prob(other, tensor(z["flow_prev"][c])), z["flow_log_prob_given"][c], 1e-5)
    for c, (step, eta) in enumerate(zip(z["dance_step"], z["dance_eta"], strict=True)):
        if not z["dance_sde"][c]:
            continue
        g = ConstantSDE(float(eta))(x, v, *levels(int(step)))
        got = mean_log_prob(g, tensor(z["dance_prev"][c]))
        near(got + g.std.log() + 0.5 * np.log(2 * np.pi), z["dance_log_prob"][c], 1e-5)


def _solve(solver, x, v, sigma: float, sigma_next: float, past=()) -> torch.Tensor:
    look = lambda x, sigma: v
    return solver(Point(x, v, sigma, sigma_next, look, lambda: torch.zeros_like(x)), past)[0]


@pytest.mark.parametrize(
    ("name", "solver", "order"),
    [("pp_o1_midpoint_ode", Euler(), 1), ("pp_o2_midpoint_ode", DPM2M(), 2),
     ("pp_o2_heun_ode", DPM2M(heun=True), 2), ("pp_o3_midpoint_ode", DPM3M(), 3)],
)  # fmt: skip
def test_mixgrpo_dpmpp(name, solver, order):
    """Steps where the original is finite; into sigma = 0 its sampler turns to order 1, as ours."""
    z = arrays("mixgrpo_dpmpp")
    sigmas = [float(s) for s in z["sigmas"]]
    x, history = tensor(z["x"]).double(), tensor(z["x0_hist"]).double()
    compared = 0
    for i, k in enumerate(int(s) for s in z["steps"]):
        if k < order - 1 or (order == 3 and k < 3) or not np.isfinite(z[name][i]).all():
            continue
        v = (x - history[2]) / sigmas[k]
        past = tuple(Past(sigmas[k - back], x, history[2 - back]) for back in range(1, order))
        # float32 differences of lambda cost the original some digits where steps are short
        near(_solve(solver, x, v, sigmas[k], sigmas[k + 1], past), z[name][i], 3e-6)
        compared += 1
    assert compared >= 4


RUNS = {
    "progressive_default": Progressive(),
    "progressive_rollback": Progressive(roll_back=True),
    "progressive_nooverlap": Progressive(stride=None),
    "flash": Progressive(every=20),
    "frozen_flashstar": Frozen(),
    "decay": Decaying(),
    "exp_decay": ExponentiallyDecaying(),
}


@pytest.mark.parametrize("name", RUNS)
def test_mixgrpo_window_schedule(name):
    z = arrays("mixgrpo_window_schedule")
    starts, lengths = z[f"{name}_start"], z[f"{name}_len"]
    empty = np.flatnonzero(lengths == 0)
    until = int(empty[0]) if len(empty) else len(starts)
    assert until >= 150  # the first iteration with an empty window, or all of them
    for iteration, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        got = RUNS[name](iteration, 0, 23, 4)
        assert 0 <= got < 23  # and never an empty window
        if iteration < until:
            assert (got, min(got + 4, 23)) == (start, start + length)
    sigmas = [1 - k / 25 for k in range(26)]
    (plan,) = Window(FlowSDE(), 2, 4, RUNS[name])(sigmas, until - 1, 0)
    noisy = [k for k, s in enumerate(plan.steps) if s.noisy]
    assert noisy == list(range(starts[until - 1], starts[until - 1] + lengths[until - 1]))


@pytest.mark.parametrize("case", ["c0", "c1", "c2", "c3", "c4"])
def test_awm_sa_solver(case):
    """Every point of the trajectory that the model is asked at, and the sample."""
    z = arrays("mm_awm_sa_solver")
    sigmas = [float(s) for s in z[f"{case}_sigmas_used"]]
    noise, x = tensor(z[f"{case}_noise"]), tensor(z[f"{case}_x_init"])
    level_of_noise = {"c0": 0.0, "c1": 0.4, "c2": 0.4, "c3": 0.7, "c4": 1.0}[case]

    def velocity(x, t, mu=0.7, s=0.5):
        gain = (1 - t) * s**2 / ((1 - t) ** 2 * s**2 + t**2)
        return (x - mu - gain * (x - (1 - t) * mu)) / t

    solver, past = SA(level_of_noise), ()
    for k, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        near(x, z[f"{case}_model_x"][k])
        v = velocity(x, sigma)
        point = Point(x, v, sigma, sigma_next, velocity, lambda k=k: noise[k + 1])
        x, last = solver(point, past)
        past = (last,)
    near(x, z[f"{case}_final"])


def _vp_step(z, prediction, abar, abar_next, eta) -> Gaussian:
    """DDIM through the flow's variables, given back as the VP process's Gaussian."""
    at, to = level(abar.double()), level(abar_next.double())
    x = tensor(z["x"]).double()
    y = x / per_row(scale(at), x)
    v = flow_velocity("epsilon", to_vp(y, at), prediction.double(), at)
    g = DDIM(eta)(y, v, at, to)
    return Gaussian(g.mean * per_row(scale(to), x), g.std * scale(to))


def test_dance_ddim_step():
    z = arrays("dance_ddim_step")
    table, times = tensor(z["alphas_cumprod"]), tensor(z["timesteps"])
    compared = 0
    for c, (step, eta) in enumerate(zip(z["step"], z["eta"], strict=True)):
        t = times[int(step)]
        abar, abar_next = (table[k].expand(2) for k in (t, (t - 20).clamp_min(0)))
        g = _vp_step(z, tensor(z["noise_pred"]), abar, abar_next, float(eta))
        x_next = tensor(z["prev_sample"][c])
        near(g.mean + per_row(g.std, g.mean) * tensor(z["eps"][c]), x_next, 2e-6)
        if eta == 0:
            continue
        near(mean_log_prob(g, x_next), z["log_prob"][c], 1e-5)
        other = _vp_step(z, tensor(z["noise_pred_given"]), abar, abar_next, float(eta))
        near(mean_log_prob(other, x_next), z["log_prob_given"][c], 2e-5)
        compared += 1
    assert compared >= 4


def test_ddpo_ddim():
    z = arrays("mm_ddpo_ddim")
    table, t = tensor(z["alphas_cumprod"]), tensor(z["timesteps"])
    abar, abar_next = table[t], table[(t - 20).clamp_min(0)]
    for which in ("old", "new"):
        g = _vp_step(z, tensor(z[f"eps_{which}"]), abar, abar_next, 1.0)
        near(mean_log_prob(g, tensor(z["prev"])), z[f"logp_{which}"], 1e-5)


@pytest.mark.parametrize(
    ("name", "potential"),
    [("diff", "difference"), ("max", "max"), ("add", "sum"), ("rt", "terminal")],
)
def test_fk_steering_t2i(name, potential):
    """Weights, stored rewards and products of potentials, with the original's own drawn indices."""
    z = arrays("mm_fk_steering_t2i")
    how = FeynmanKac((), 5.0, potential, ends_on="potential", start=0.0, adaptive=False)
    particles = how.begin(1, 6)
    call = 0
    for k, reward in enumerate(tensor(z["rewards"])):
        particles = how.weigh(particles, reward[None], last=k == 4)
        if not z[f"{name}_all_resampled"][k]:
            continue
        want = tensor(z[f"{name}_all_w"][call]).double()
        near(normalised(particles.log_weight)[0], want / want.sum())
        index = tensor(z[f"{name}_all_idx"][call])[None]
        particles = particles.take(index, torch.tensor([[True]]))
        near(particles.reward[0], z[f"{name}_all_population_rs"][k])
        if name != "diff":
            near(particles.spent[0].exp(), z[f"{name}_all_product"][k], 1e-4)
        call += 1
    assert call >= 4


def test_fk_steering_draws_anew_where_the_original_does():
    """Its adaptive test of the first two weighings, before the weights that it drops matter."""
    z = arrays("mm_fk_steering_t2i")
    for name, potential in (
        ("diff", "difference"),
        ("max", "max"),
        ("add", "sum"),
        ("rt", "terminal"),
    ):
        how = FeynmanKac((), 5.0, potential, start=0.0)
        particles = how.weigh(how.begin(1, 6), tensor(z["rewards"])[:1])
        index, _ = how.draw(particles, [(0,)])
        assert torch.equal(index[0], torch.arange(6)) == (not z[f"{name}_ada_resampled"][0])
