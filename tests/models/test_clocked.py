"""Pipelines that step frames, or chunks of frames, at levels of their own: SkyReels-V2's diffusion
forcing, together and in a wave, and Helios, chunk after chunk."""

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from torch import Tensor, nn

from flowrl.cli.steer import SampleScorer, SteeredSampler, steered_samples
from flowrl.credit.advantages import Context
from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.transition import Transition
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from flowrl.prompts import PromptSet
from flowrl.recipes import RECIPES
from flowrl.run.evaluate.evaluate import Trial
from flowrl.run.evaluate.start_checks import check_clock
from rewards.load import load
from samplers import FlowSDE, Latents, Sampling, Tree, Window, roll
from samplers.clock import Clocked
from samplers.planners import Flash
from tests.support.advice import advice
from tests.support.driving import PROMPTS, brightness
from tests.support.tiny_modular import of_classic
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.calls_videos import VIDEO_SPECIALS
from tests.support.zoo.pipelines import tiny

torch.set_num_threads(1)
STEPS = 3
SKYREELS, HELIOS = "SkyReelsV2DiffusionForcingPipeline", "HeliosPipeline"


class Case(NamedTuple):
    name: str
    call: dict[str, Any]
    parts: int
    moved: str = "together"


TURNS, WAVE = "one after the other", "in a wave"
CASES = {
    "frames together": Case(SKYREELS, {}, 3),
    "a wave of frames": Case(SKYREELS, {"ar_step": 1, "causal_block_size": 1}, 3, WAVE),
    "chunks in turn": Case(HELIOS, {"num_frames": 9}, 2, TURNS),
}
MORE = {
    "a wave of causal blocks": Case(
        SKYREELS, {"ar_step": 1, "causal_block_size": 2, "num_frames": 7}, 4, WAVE
    ),
    "frames behind an image": Case("SkyReelsV2DiffusionForcingImageToVideoPipeline", {}, 2),
    "frames behind a video": Case("SkyReelsV2DiffusionForcingVideoToVideoPipeline", {}, 2),
    "windows that overlap": Case(
        SKYREELS, {"num_frames": 9, "base_num_frames": 5, "overlap_history": 3}, 5, WAVE
    ),
    "sections, the last one first": Case(
        "HunyuanVideoFramepackPipeline", {"num_frames": 9, "latent_window_size": 2}, 2, TURNS
    ),
}


def driven(case: Case) -> PipelinePolicy:
    made = tiny(getattr(diffusers, case.name), SPECIALS | VIDEO_SPECIALS, SIZES)
    return PipelinePolicy(made.pipe, call=made.call | case.call)


def adapted(made: PipelinePolicy) -> PipelinePolicy:
    """With adapters that do something."""
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    for key, value in made.trainable().items():
        if ".lora_B." in key:
            nn.init.normal_(value, std=0.1, generator=torch.Generator().manual_seed(1))
    return made


def quick(*names: str) -> list[Any]:
    """The names, of which all but these are slow."""
    slow = [name for name in CASES | MORE if name not in names]
    return [*names, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


@pytest.mark.parametrize("name", quick("a wave of frames"))
def test_a_whole_sample_is_the_pipelines_own(name: str) -> None:
    case = (CASES | MORE)[name]
    made = driven(case)
    proof = made.prove(PROMPTS, steps=STEPS, guidance=4.5)
    clock, layout = made.schedule(STEPS).clock, made.layout
    assert clock is not None and layout is not None and len(layout.names) == case.parts
    assert proof.way == "forward"
    assert f"velocity of {case.parts} parts of the state, moved {case.moved}," in str(proof)
    whole = prove_whole(made, PROMPTS, (), proof)
    assert whole.failure() is None and whole.unshown is None
    assert whole.own is not None and max(whole.own.latents, whole.own.media) < 2e-6
    if proof.own_steps:  # the scheduler's own, up to what a rounding unit does to the class's call
        assert whole.flowrl.latents < max(2e-6, whole.rounding.latents)
        assert whole.flowrl.media < max(2e-6, whole.rounding.media)
    # calls of another number of steps have another order
    again = made.prove(PROMPTS, steps=STEPS - 1, guidance=1.0, complete=False, gradient=False)
    assert prove_whole(made, PROMPTS, (), again).failure() is None


def plain_calls(case: Case, prompt: str) -> list[dict[str, Any]]:
    """Arguments of the network at each step of the plain pipeline's own call."""
    made = tiny(getattr(diffusers, case.name), SPECIALS | VIDEO_SPECIALS, SIZES)
    seen = list[dict[str, Any]]()
    made.pipe.transformer.register_forward_pre_hook(
        lambda _, args, given: seen.append(copy.deepcopy(given)), with_kwargs=True
    )
    made.pipe(
        prompt=prompt, num_inference_steps=STEPS, guidance_scale=1.0, output_type="pt",
        generator=torch.Generator().manual_seed(0), **made.call | case.call,
    )  # fmt: skip
    return seen


def exact(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floating else value


def helios_history(parts: Sequence[Tensor], chunk: int) -> dict[str, Tensor]:
    """What the network sees before a chunk: the chunks before it behind nothing, in three lengths
    (16, 2 and 1 latent frames), and the first frame of all."""
    before = torch.zeros(1, 4, 19, *parts[0].shape[-2:], dtype=parts[0].dtype)
    history = torch.cat([before, *parts[:chunk]], 2)[:, :, -19:]
    first = parts[0][:, :, :1] if chunk else torch.zeros_like(history[:, :, :1])
    long, middle, last = history.split((16, 2, 1), 2)
    return {
        "latents_history_long": long,
        "latents_history_mid": middle,
        "latents_history_short": torch.cat([first, last], 2),
    }


def plain_velocities(
    case: Case, network: Any, call: dict[str, Any], parts: Sequence[Tensor], moves: Sequence[int]
) -> dict[int, Tensor]:
    """The own velocities of the parts that a step moves, in float64, from the network alone."""
    arguments = {key: exact(value) for key, value in call.items()} | {"return_dict": False}
    if case.name == HELIOS:
        (chunk,) = moves
        arguments |= helios_history(parts, chunk) | {"hidden_states": parts[chunk]}
        return {chunk: network(**arguments)[0]}
    (v,) = network(**arguments | {"hidden_states": torch.stack([*parts], 2)})
    return {part: v[:, :, part] for part in moves}


def log_densities(
    x: Tensor, v: Tensor, after: Tensor, sigma: float, to: float, eta: float
) -> Tensor:
    """Flow-GRPO's densities of entries (arXiv:2505.05470, eq. 9)."""
    g = eta * math.sqrt(sigma / (1 - (to if sigma > 0.9989 else sigma)))
    h = sigma - to
    mean = x - h * (v + g**2 / (2 * sigma) * (x + (1 - sigma) * v))
    std = g * math.sqrt(h)
    return -((after - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)


def compared_gradients(made: PipelinePolicy, network: nn.Module) -> int:
    """The number of weights of adapters with a gradient, each of which equals the plain one."""
    exactly, compared = dict(network.named_parameters()), 0
    for key, value in made.pipe.transformer.named_parameters():
        if value.grad is None or ".lora_" not in key:
            continue
        wanted = exactly[key].grad
        assert wanted is not None
        away = float((value.grad.double() - wanted).norm())
        assert away <= 1e-3 * float(wanted.norm()) + 1e-7, key
        compared += float(wanted.norm()) > 1e-6
    return compared


@pytest.mark.parametrize("name", quick("chunks in turn")[: len(CASES)])
def test_densities_and_gradients_are_those_of_a_plain_loop(name: str) -> None:
    """In float64, by the network alone, with nothing of flowrl; and rows have ratio 1."""
    case, prompt = CASES[name], PROMPTS[1]
    made = adapted(driven(case))
    network: Any = copy.deepcopy(made.pipe.transformer).double()
    algorithm = RECIPES["flow_grpo"](steps=STEPS, group=2)
    schedule, layout = made.schedule(STEPS), made.layout
    clock = schedule.clock
    assert clock is not None and layout is not None
    conditioning = made.encode([prompt])
    velocity = made.bind(conditioning, steps=STEPS, guidance=1.0)
    planned: Any = algorithm.plan(schedule.sigmas, 0, 0)
    plans = made.fitted(planned, STEPS)
    (rollout,) = roll(
        plans, velocity, Latents(made.shape(STEPS), layout=layout),
        [0], seed=0, iteration=0, sampling=Sampling(algorithm.likelihood.keep_mean),
    )  # fmt: skip
    taken = conditioning.take(rollout.prompt)
    media = made.decode(rollout.x0, taken, steps=STEPS, guidance=1.0)
    credit = algorithm.advantage(brightness(media), Context(rollout.columns, torch.ones(1)))
    calls, seen = plain_calls(case, prompt), 0
    every: Any = algorithm.likelihood.rows(rollout, *credit)
    for rows in every:
        evaluated = algorithm.likelihood.evaluate(velocity, rows)
        ratio = algorithm.likelihood.log_ratio(evaluated, rows.old, rows)
        assert float(ratio.detach().abs().max()) < 1e-5
        evaluated.logp.sum().backward()
        assert isinstance(rows.kernel, Clocked) and isinstance(rows.kernel.kernel, FlowSDE)
        for row, x in enumerate(rows.x):
            step = int(clock.index(rows.sigma[row : row + 1]))
            at, to = clock.levels[step], clock.levels[step + 1]
            states = layout.unpack(x[None].double())
            after = layout.unpack(rows.x_next[row : row + 1].double())
            moves = [
                p for p, levels in enumerate(zip(at, to, strict=True)) if levels[0] > levels[1]
            ]
            own = plain_velocities(case, network, calls[step], states, moves)
            theirs = torch.cat(
                [
                    log_densities(
                        states[p], own[p], after[p], at[p], to[p], rows.kernel.kernel.eta
                    ).flatten()
                    for p in moves
                    if to[p] > 0
                ]
            ).mean()
            assert float(evaluated.logp[row].detach()) == pytest.approx(
                float(theirs.detach()), rel=5e-5, abs=5e-5
            )
            theirs.backward()
            seen += 1
    assert seen >= 4 and compared_gradients(made, network) > 8


def test_a_later_chunk_is_conditioned_on_the_chunks_before_it_as_sampled() -> None:
    """A change of the first chunk changes the second one's velocity, and not the other way."""
    made = driven(CASES["chunks in turn"])
    velocity = made.bind(made.encode(PROMPTS[:1]), steps=STEPS, guidance=1.0)
    clock, layout = made.schedule(STEPS).clock, made.layout
    assert clock is not None and layout is not None
    x = torch.randn(1, *made.shape(STEPS), generator=torch.Generator().manual_seed(0))
    row, changed = torch.tensor([0]), x.clone()
    changed[:, : layout.sizes[0]] += 1
    late, early = (torch.tensor([clock.sigmas[k]]) for k in (STEPS, 0))
    with torch.no_grad():
        before, after = (velocity(state, late, row) for state in (x, changed))
        assert not before[:, : layout.sizes[0]].any() and not torch.equal(before, after)
        changed = x.clone()
        changed[:, layout.sizes[0] :] += 1
        assert torch.equal(velocity(x, early, row), velocity(changed, early, row))


@pytest.mark.slow
def test_both_forms_of_helios_step_alike() -> None:
    """The same inputs of every call of the network but its time, which the blocks round, and exact
    in its own form."""
    case = CASES["chunks in turn"]
    classic = tiny(getattr(diffusers, case.name), SPECIALS | VIDEO_SPECIALS, SIZES)
    pipe, call = of_classic("HeliosModularPipeline", classic.pipe, classic.call | case.call)
    made = PipelinePolicy(pipe, call=call)
    proof = made.prove(PROMPTS, steps=STEPS, guidance=4.5)
    assert proof.form == "modular" and len(proof.parts) == case.parts
    whole = prove_whole(made, PROMPTS, (), proof)
    assert whole.failure() is None and whole.unshown is None
    assert whole.own is not None and max(whole.own.latents, whole.own.media) < 2e-6
    other = driven(case)
    assert made.schedule(STEPS).clock == other.schedule(STEPS).clock
    x = torch.randn(1, *made.shape(STEPS), generator=torch.Generator().manual_seed(0))
    sigma, row = torch.tensor([made.schedule(STEPS).sigmas[STEPS]]), torch.tensor([0])
    with torch.no_grad():
        ours, theirs = (
            policy.bind(policy.encode(PROMPTS[:1]), steps=STEPS, guidance=4.5)(x, sigma, row)
            for policy in (made, other)
        )
    # blocks round 999.0 to 999, but 749.25 too: 0.25 of 1000 is the largest difference of a time
    assert float((ours - theirs).norm() / theirs.norm()) < 2e-2


@pytest.mark.slow
def test_a_cache_is_filled_from_the_chunks_before() -> None:
    """AnyFlow's network calls that fill its cache are made for real where other calls are stubs.
    Its attention has no gradient on a CPU, so it cannot be trained there."""
    made = driven(Case("AnyFlowFARPipeline", {}, 2))
    proof = made.prove(PROMPTS, steps=STEPS, guidance=4.5, gradient=False)
    assert len(proof.parts) == 2 and proof.own_steps
    assert made.loop.driver.clockwork is not None
    order = made.loop.driver.clockwork.orders[STEPS]
    assert order.filling == (0, 0, 0, 1, 0, 0)
    whole = prove_whole(made, PROMPTS, (), proof)
    assert whole.failure() is None and whole.unshown is None
    for claim in (whole.own, whole.flowrl):
        assert claim is not None and max(claim.latents, claim.media) < 2e-6
    with pytest.raises(UserError, match="FlexAttention does not support backward on CPU"):
        made.prove(PROMPTS, steps=STEPS, guidance=4.5)


REFUSED_PLANS = {
    "flash": (Window(FlowSDE(), 2, size=2, flash=Flash()), "other levels than the model's"),
    "a branch where a chunk ends": (Tree(FlowSDE(), at=(2,)), "step 2 ends a part of the state"),
}


@pytest.mark.parametrize("case", REFUSED_PLANS)
def test_plans_that_need_one_level_are_refused(case: str) -> None:
    plan, reason = REFUSED_PLANS[case]
    made = driven(CASES["chunks in turn"])
    with pytest.raises(UserError, match=f"HeliosPipeline steps parts of its state.*{reason}"):
        made.fitted(plan(made.schedule(STEPS).sigmas, 0, 0), STEPS)


def test_recipes_that_need_one_level_are_refused() -> None:
    wave, turns = (driven(CASES[name]) for name in ("a wave of frames", "chunks in turn"))
    of_wave, of_turns = (made.schedule(STEPS).clock for made in (wave, turns))
    assert of_wave is not None and of_turns is not None
    density = RECIPES["flow_grpo"](steps=STEPS, group=2).likelihood
    advice(
        "no errors at new noise levels and no gradients of rewards: use a recipe that trains on "
        "densities of steps, such as flow_grpo",
        lambda: check_clock(Matching(), of_turns, turns.name),
        lambda: check_clock(density, of_turns, turns.name),
    )
    advice(
        "so its noise has no one size, by which the ratio {} is scaled: use a recipe whose ratio",
        lambda: check_clock(Transition("cps"), of_wave, wave.name),
        lambda: check_clock(density, of_wave, wave.name),
    )
    check_clock(Transition("cps"), of_turns, turns.name)


@pytest.mark.slow
def test_steering_without_samples_in_the_middle_takes_the_best() -> None:
    made = driven(CASES["chunks in turn"])
    trial = Trial(PromptSet((PROMPTS[0],), ({},)), (0,), group=1, steps=STEPS, seed=5)
    rewards = {"brightness": load("brightness")}
    scorer = SampleScorer(made, rewards, {"brightness": 1.0}, trial, 1.0, torch.device("cpu"))
    samples, evaluations = advice(
        "--steer particles predicts clean samples in the middle, and {} steps parts of its state "
        "at levels of their own: use --steer best",
        lambda: steered_samples(scorer, SteeredSampler("particles", particles=2)),
        lambda: steered_samples(scorer, SteeredSampler("best", particles=2)),
    )
    assert len(samples.media) == 1 and evaluations == 2 * 2 * STEPS
