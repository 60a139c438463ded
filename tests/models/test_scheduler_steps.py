"""The steps of a pipeline's own scheduler: against the papers in plain loops, and whole samples."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.loop.own_steps import own_kernel, renews_noise
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from flowrl.session.learner import load_policy
from flowrl.settings.read import run_from
from samplers import Chain, Gaussian, Ode, Scheduler, Window, mean_log_prob
from samplers.planners import Flash
from tests.support import runs
from tests.support.advice import advice
from tests.support.driving import PROMPTS
from tests.support.tiny_pipelines import SIZE, SQUARE, sd3
from tests.support.tiny_pipelines_unet import sd15, sdxl
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.pipelines import tiny

torch.set_num_threads(1)
STEPS = 4
PLAIN = {"clip_sample": False}
FRESH = {"stochastic_sampling": True}


def of(
    pipe: Any, scheduler: str, settings: Mapping[str, Any], call: Mapping[str, Any]
) -> PipelinePolicy:
    kind = getattr(diffusers, scheduler)
    pipe.scheduler = kind.from_config(pipe.scheduler.config, **settings)
    return PipelinePolicy(pipe, call=call)


def lcm() -> PipelinePolicy:
    return of(sd15(), "LCMScheduler", PLAIN, SIZE)


def tcd(eta: float = 0.3) -> PipelinePolicy:
    return of(sdxl(), "TCDScheduler", PLAIN, {**SIZE, "eta": eta})


def flow() -> PipelinePolicy:
    return of(sd3(), "FlowMatchEulerDiscreteScheduler", FRESH, SQUARE)


def trigflow() -> PipelinePolicy:
    made = tiny(diffusers.SanaSprintPipeline, SPECIALS, SIZES)
    return PipelinePolicy(made.pipe, call=made.call)


FEW_STEPS = {"LCM": lcm, "TCD": tcd, "flow": flow, "TrigFlow": trigflow}


def amounts(policy: PipelinePolicy) -> list[float]:
    """abar by time of a variance-preserving process."""
    return policy.pipe.scheduler.alphas_cumprod.double().tolist()


# what the papers do to one number: (mean, std) of the next state, from state, output and times


def lcm_step(x: float, out: float, t: int, then: int | None, abar: list[float]) -> Any:
    """arXiv:2310.04378: f = c_skip x + c_out x0 (app. C: scaled times, sigma_data 0.5), alg. 3."""
    x0 = (x - math.sqrt(1 - abar[t]) * out) / math.sqrt(abar[t])
    scaled = 10.0 * t
    f = 0.25 / (scaled**2 + 0.25) * x + scaled / math.sqrt(scaled**2 + 0.25) * x0
    if then is None:
        return f, 0.0
    return math.sqrt(abar[then]) * f, math.sqrt(1 - abar[then])


def tcd_step(x: float, out: float, t: int, then: int | None, abar: list[float]) -> Any:
    """arXiv:2402.19159, alg. 4: to s = (1 - gamma) t', then noise from s to t'."""
    x0 = (x - math.sqrt(1 - abar[t]) * out) / math.sqrt(abar[t])
    s = math.floor(0.7 * (then or 0))
    at_s = math.sqrt(abar[s]) * x0 + math.sqrt(1 - abar[s]) * out
    if then is None:
        return at_s, 0.0
    return math.sqrt(abar[then] / abar[s]) * at_s, math.sqrt(1 - abar[then] / abar[s])


def flow_step(x: float, out: float, t: float, then: float | None, _: Any) -> Any:
    """x0 = x - s v, noised to the next level: arXiv:2405.14867, sec. 4.5, on a rectified flow."""
    x0 = x - t / 1000 * out
    return (x0, 0.0) if then is None else ((1 - then / 1000) * x0, then / 1000)


def trig_step(x: float, out: float, t: float, then: float | None, _: Any) -> Any:
    """arXiv:2410.11081, sec. 4: x0 = cos t x - sin t F, then angle t'; data of size 0.5."""
    x0 = math.cos(t) * x - math.sin(t) * out
    return (x0, 0.0) if then is None else (math.cos(then) * x0, 0.5 * math.sin(then))


PAPERS = {"LCM": lcm_step, "TCD": tcd_step, "flow": flow_step, "TrigFlow": trig_step}


@pytest.mark.parametrize("name", FEW_STEPS)
def test_densities_and_gradients_are_the_papers(name: str) -> None:
    """Log-density of a next state and its gradient in the model's output, in plain loops."""
    policy = FEW_STEPS[name]()
    kernel, schedule = own_kernel(policy.loop, STEPS), policy.schedule(STEPS)
    abar = amounts(policy) if name in ("LCM", "TCD") else []
    data = 0.5 if name == "TrigFlow" else 1.0
    drawn = torch.Generator().manual_seed(3)
    times = schedule.timesteps.tolist()
    for k in range(STEPS):
        x, out, after = torch.randn(3, 1, 5, generator=drawn, dtype=torch.float64)
        out.requires_grad_()
        then = times[k + 1] if k + 1 < STEPS else None
        if name == "TrigFlow" and k > 0:  # the level is the noise's share: s / (alpha + s)
            angle = math.tan(times[k])
            assert schedule.sigmas[k] == pytest.approx(angle / (1 + angle), rel=1e-5)
        each = list(zip(x[0].tolist(), out[0].tolist(), strict=True))
        steps = [PAPERS[name](*pair, times[k], then, abar) for pair in each]
        sigma, level = (torch.tensor([s], dtype=torch.float64) for s in schedule.sigmas[k : k + 2])
        to_flow, to_next = (in_flow(s, name != "flow") / data for s in (sigma, level))
        v = velocity_of(policy, x / data, out / data, sigma)
        mean, std = kernel(x * to_flow, v, sigma, level)
        wanted = torch.tensor([float(m) for m, _ in steps])
        torch.testing.assert_close((mean / to_next)[0].float(), wanted, rtol=2e-5, atol=2e-5)
        if then is None:
            assert float(std) == 0.0
            continue
        found = mean_log_prob(Gaussian(mean, std), after * to_next)
        found.backward()
        pairs = list(zip(after[0].tolist(), steps, strict=True))
        logp = sum(
            -0.5 * ((y - float(m)) / s) ** 2 - math.log(s) - 0.5 * math.log(2 * math.pi)
            for y, (m, s) in pairs
        ) / len(pairs)
        assert float(found.detach()) + math.log(to_next) == pytest.approx(logp, rel=1e-4)
        slope = [
            PAPERS[name](a, b + 1.0, times[k], then, abar)[0] - m
            for (a, b), (m, _) in zip(each, steps, strict=True)
        ]  # steps are linear in the output
        gradient = [
            (y - m) / s**2 * d / len(pairs) for (y, (m, s)), d in zip(pairs, slope, strict=True)
        ]
        assert out.grad is not None
        torch.testing.assert_close(
            out.grad[0], torch.tensor(gradient, dtype=torch.float64), rtol=1e-4, atol=1e-4
        )


def in_flow(sigma: Tensor, preserving: bool) -> float:
    """A flow state for a state of the process."""
    return float(((1 - sigma) ** 2 + sigma**2).sqrt()) if preserving else 1.0


def velocity_of(policy: PipelinePolicy, x: Tensor, out: Tensor, sigma: Tensor) -> Tensor:
    """noise - x0 of the state and the output, by hand."""
    kind, s = policy.loop.traits.kind, float(sigma)
    size = math.sqrt((1 - s) ** 2 + s**2)
    alpha, noise = (1 - s) / size, s / size
    if kind == "flow":
        return out
    if kind == "epsilon":
        return out - (x - noise * out) / alpha
    return (noise * x + alpha * out) - (alpha * x - noise * out)


def test_a_loop_that_leaves_out_its_last_level_is_called_at_one_level_alone() -> None:
    """Sana-Sprint's list of one level would leave it none, and every step would pass by all those
    before it."""
    policy = trigflow().with_own_steps()
    replay = policy.prove(PROMPTS, steps=2, guidance=None, gradient=False, complete=False)
    assert replay.way == "pinned"


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW_STEPS)
def test_whole_samples_with_the_same_noise_are_the_pipelines_own(name: str) -> None:
    policy = FEW_STEPS[name]().with_own_steps()
    guidance = None if policy.loop.guidance is None else 4.5
    replay = policy.prove(PROMPTS, steps=STEPS, guidance=guidance, gradient=False)
    assert replay.noisy and "steps are" in str(replay) and "own" in str(replay)
    proof = prove_whole(policy, [*PROMPTS, "two blue cat"], (), replay)
    assert proof.failure() is None and proof.own_steps
    assert proof.own is not None and max(proof.own.media, proof.flowrl.media) < 2e-5
    policy.loop.own_kernels[STEPS] = Scheduler(
        tuple((a, b, 1.01 * c) for a, b, c in own_kernel(policy.loop, STEPS).coefficients or ()),
        policy.schedule(STEPS).sigmas,
    )
    failure = prove_whole(policy, PROMPTS, (), replay).failure()
    assert failure is not None and "flowrl's own steps make" in failure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "renews"),
    [
        ("LCMScheduler", True), ("TCDScheduler", True), ("DDPMScheduler", False),
        ("EulerAncestralDiscreteScheduler", False), ("DDIMScheduler", False),
        ("DPMSolverMultistepScheduler", False),
    ],
)  # fmt: skip
def test_a_process_is_told_from_a_few_step_sampler(scheduler: str, renews: bool) -> None:
    """Its share of fresh noise shrinks with the step; DDIM draws none, DPM-Solver has memory."""
    settings = PLAIN if "clip_sample" in dir(getattr(diffusers, scheduler)) else {}
    policy = of(
        sd15(), scheduler, {**settings, "clip_sample": False}, {**SIZE, "eta": 0.3 * renews}
    )
    assert renews_noise(policy.loop, STEPS) == renews


@pytest.mark.slow
def test_an_ode_is_refused_with_the_way_out(tmp_path: Path) -> None:
    lcm().pipe.save_pretrained(tmp_path / "lcm")
    tree = runs.tree(tmp_path / "lcm", tmp_path, runs.FLOW_GRPO)
    tree["model"] |= SIZE
    own_steps = tree["recipe"] | {"plan": {"kernel": "scheduler"}}

    def proven(settings: dict[str, Any]) -> str:
        made = load_policy(run_from(settings, "test"), torch.device("cpu"))
        assert isinstance(made, PipelinePolicy)
        return str(made.prove(PROMPTS, steps=STEPS, guidance=1.0))

    assert "LCMScheduler" in advice(
        "adds fresh noise to the predicted sample, as few-step models do, so steps without noise "
        "would sample another distribution: set recipe: {plan: {kernel: scheduler}}",
        lambda: proven(tree),
        lambda: proven(tree | {"recipe": own_steps}),
    )


def test_plans_take_the_schedulers_numbers_in_all_steps() -> None:
    policy = lcm().with_own_steps()
    sigmas = policy.schedule(STEPS).sigmas
    (plan,) = policy.fitted(Chain(Scheduler(), 3)(sigmas, 0, 0), STEPS)
    assert [step.noisy for step in plan.steps] == [True, True, True, False]
    assert plan.columns.std[-1] == 0 and min(plan.columns.std[:-1]) > 0 and plan.solver.random
    (window,) = policy.fitted(Window(Scheduler(), 3, 1)(sigmas, 0, 0), STEPS)
    assert window.states == (3, 3, 3, 3, 3) and window.kernel == plan.kernel
    (alone,) = policy.fitted(policy.plain(2)(sigmas, 0, 0), STEPS)
    assert alone.kernel == plan.kernel and not any(step.train for step in alone.steps)
    with pytest.raises(UserError, match="samples with the steps of its own scheduler"):
        policy.fitted(Ode(1)(sigmas, 0, 0), STEPS)
    flash = Window(Scheduler(), 3, 1, flash=Flash())(sigmas, 0, 0)
    with pytest.raises(UserError, match=r"leave out what changes them \(such as flash\)"):
        policy.fitted(flash, STEPS)


def test_schedulers_without_such_steps_are_refused() -> None:
    policy = of(sd15(), "DPMSolverMultistepScheduler", {}, SIZE)
    sigmas = policy.schedule(STEPS).sigmas
    with pytest.raises(UserError, match="is not a sum of its state, its prediction and one draw"):
        policy.fitted(Chain(Scheduler(), 2)(sigmas, 0, 0), STEPS)
    quiet = of(sd15(), "DDIMScheduler", PLAIN, SIZE)
    with pytest.raises(UserError, match="adds no noise"):
        quiet.fitted(Chain(Scheduler(), 2)(quiet.schedule(STEPS).sigmas, 0, 0), STEPS)


def test_one_step_has_no_density_and_two_have_one() -> None:
    with pytest.raises(ValueError, match="at least two steps"):
        Chain(Scheduler(), 2)((1.0, 0.0), 0, 0)
    (plan,) = Chain(Scheduler(), 2)((1.0, 0.5, 0.0), 0, 0)
    assert [step.train for step in plan.steps] == [True, False]
    (alone,) = Ode(2, kernel=Scheduler())((1.0, 0.0), 0, 0)
    assert len(alone.steps) == 1
