"""MiniMax-H3: a video and its sound, which two schedulers step at levels of their own."""

import copy
import math
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from flowrl.cli.model_card import loader, loading_lines
from flowrl.credit.advantages import Context
from flowrl.errors import UserError
from flowrl.models.description import describe
from flowrl.models.diffusers.call.levels.part_schedules import data_sizes
from flowrl.models.diffusers.call.levels.schedule import PipelineSchedule
from flowrl.models.diffusers.call.loop.own_steps import own_plans
from flowrl.models.diffusers.lora.lora import LORA_FILE
from flowrl.models.diffusers.modular.folder import ModularSource
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.replay.own_call import record
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from flowrl.recipes import RECIPES
from flowrl.settings import PipelineSettings
from samplers import Chain, FlowSDE, Latents, Sampling, Scheduler, roll
from tests.support.advice import advice
from tests.support.driving import PROMPTS, brightness, learn
from tests.support.tiny_modular import MODULAR, MODULAR_CALLS

torch.set_num_threads(1)
CALL = MODULAR_CALLS["minimax_h3"]
STEPS = 5  # of the pipeline, which counts the level 0 too: four evaluations
LARGER = 4.0  # the sound's data, of shift 3 beside the video's 12
AUDIO = 2  # the tag of its rows in the packed sequence


def driven(pipe: Any = None) -> PipelinePolicy:
    return PipelinePolicy(MODULAR["minimax_h3"]() if pipe is None else pipe, call=CALL)


def adapted(made: PipelinePolicy) -> PipelinePolicy:
    """With adapters that do something."""
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    for key, value in made.trainable().items():
        if ".lora_B." in key:
            nn.init.normal_(value, std=0.1, generator=torch.Generator().manual_seed(1))
    return made


@pytest.mark.slow
def test_a_whole_sample_is_the_pipelines_own():
    made = driven()
    assert made.layout is not None and made.layout.data == (1.0, LARGER)
    proof = made.prove(PROMPTS, steps=STEPS, guidance=None)
    assert (proof.parts, proof.way, proof.form) == (("video", "audio"), "pinned", "modular")
    assert "velocity of video and audio (at lower levels: its data times 4)" in str(proof)
    assert proof.own_steps and len(made.schedule(STEPS).sigmas) == STEPS
    whole = prove_whole(made, PROMPTS, (), proof)
    assert whole.failure() is None and whole.unshown is None
    for claim in (whole.own, whole.flowrl):
        assert claim is not None and max(claim.latents, claim.media) < 2e-6


def times_of_rows(made: PipelinePolicy, sigma: float) -> tuple[float, float]:
    """The network's times of the generated rows of video and sound at a level of the state."""
    seen: list[dict[str, Any]] = []
    hook = made.pipe.transformer.register_forward_pre_hook(
        lambda _, args, given: seen.append(given), with_kwargs=True
    )
    velocity = made.bind(made.encode(PROMPTS[:1]), steps=STEPS, guidance=None)
    seen.clear()
    x = torch.zeros(1, *made.shape(STEPS))
    velocity(x, torch.tensor([sigma]), torch.tensor([0]))
    hook.remove()
    (given,) = seen
    times = given["timestep"][given["timestep_indices"]]
    video, audio = (times[given[f"{name}_indices"]].unique() for name in ("video", "audio"))
    return float(video), float(audio)


@pytest.mark.slow
def test_each_part_is_at_its_own_level_between_those_of_the_list_too():
    made = driven()
    for sigma in (0.37, *made.schedule(STEPS).sigmas[:-1]):
        video, audio = times_of_rows(made, sigma)
        own = sigma / (LARGER + (1 - LARGER) * sigma)
        assert video == pytest.approx(1 - sigma, abs=1e-6)
        assert audio == pytest.approx(1 - own, abs=1e-6)


class Squared(diffusers.MiniMaxH3Scheduler):
    """Levels that no shift explains."""

    def set_timesteps(self, *args: Any, **named: Any) -> None:
        super().set_timesteps(*args, **named)
        assert self.sigmas is not None
        self.sigmas = self.sigmas**2
        self.timesteps = 1 - self.sigmas[:-1]


def test_levels_of_another_form_are_refused():
    pipe = MODULAR["minimax_h3"]()
    pipe.update_components(audio_scheduler=Squared(shift=3.0))
    with pytest.raises(UserError, match=r"audio_scheduler, whose levels .* no shift of the state"):
        driven(pipe).prove(PROMPTS, steps=STEPS, guidance=None)


def test_a_part_that_starts_below_noise_is_refused():
    state = PipelineSchedule((1.0, 0.5, 0.0), torch.tensor([0.0, 0.5]), 1, (1.0, 0.5))
    late = PipelineSchedule((0.9, 0.2, 0.0), torch.tensor([0.1, 0.8]), 1, (0.9, 0.2))
    both = PipelineSchedule(
        state.sigmas, state.timesteps, 1, state.visits, beside={"audio_scheduler": late}
    )
    with pytest.raises(UserError, match="do not go from 1 to 0"):
        data_sizes(both, ("scheduler", "audio_scheduler"), "Pipeline")


def test_steps_of_two_schedulers_are_no_kernel():
    made = driven()
    sigmas = made.schedule(STEPS).sigmas
    advice(
        "kernel: scheduler takes the steps of one scheduler, and its loop has {}: use another",
        lambda: own_plans(made.loop, Chain(Scheduler(), 2)(sigmas, 0, 0), STEPS),
        lambda: made.fitted(Chain(FlowSDE(0.7), 2)(sigmas, 0, 0), STEPS),
    )


def log_density(x: Tensor, v: Tensor, after: Tensor, sigma: float, to: float, eta: float) -> Tensor:
    """Mean over dims of Flow-GRPO's density (arXiv:2505.05470, eq. 9)."""
    g = eta * math.sqrt(sigma / (1 - (to if sigma == 1 else sigma)))
    h = sigma - to
    mean = x - h * (v + g**2 / (2 * sigma) * (x + (1 - sigma) * v))
    std = g * math.sqrt(h)
    normal = -((after - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
    return normal.mean()


def network_calls(prompt: str) -> list[dict[str, Any]]:
    """Arguments of the network at each step of the plain pipeline's own call."""
    pipe, seen = MODULAR["minimax_h3"](), list[dict[str, Any]]()
    pipe.transformer.register_forward_pre_hook(
        lambda _, args, given: seen.append(copy.deepcopy(given)), with_kwargs=True
    )
    pipe(
        prompt=prompt, num_inference_steps=STEPS, output_type="pt",
        generator=torch.Generator().manual_seed(0), **CALL,
    )  # fmt: skip
    return seen


def plain_velocity(network: nn.Module, call: dict[str, Any], x: Tensor, sigma: float) -> Tensor:
    """noise - data of one row [1 d] in float64, the sound's with its larger data: from the clean
    samples and the noise that the network predicts, whose output points to the data."""
    count = call["hidden_states"].numel()
    level = sigma / (LARGER - (LARGER - 1) * sigma)  # the sound's own
    video = x[:, :count].reshape(call["hidden_states"].shape)
    audio = x[:, count:].reshape(call["audio_hidden_states"].shape) * level / sigma
    given = {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in call.items()
    }
    given |= {"hidden_states": video, "audio_hidden_states": audio}
    to_video, to_audio = network(**given)
    clean, noise = audio + level * to_audio, audio - (1 - level) * to_audio
    return torch.cat([-to_video.flatten(1), (noise - LARGER * clean).flatten(1)], 1)


def test_densities_and_gradients_are_those_of_a_plain_loop():
    """In float64, by the network alone, with nothing of flowrl."""
    made = adapted(driven())
    network: Any = copy.deepcopy(made.pipe.transformer).double()
    algorithm = RECIPES["flow_grpo"](steps=STEPS, group=2)
    levels, prompt = made.schedule(STEPS).sigmas, PROMPTS[1]
    conditioning = made.encode([prompt])
    velocity = made.bind(conditioning, steps=STEPS, guidance=None)
    (rollout,) = roll(
        algorithm.plan(levels, 0, 0), velocity, Latents(made.shape(STEPS), layout=made.layout),
        [0], seed=0, iteration=0, sampling=Sampling(algorithm.likelihood.keep_mean),
    )  # fmt: skip
    taken = conditioning.take(rollout.prompt)
    media = made.decode(rollout.x0, taken, steps=STEPS, guidance=None)
    credit = algorithm.advantage(brightness(media), Context(rollout.columns, torch.ones(1)))
    calls, seen = network_calls(prompt), 0
    every: Any = algorithm.likelihood.rows(rollout, *credit)
    for rows in every:
        ours = algorithm.likelihood.evaluate(velocity, rows).logp
        ours.sum().backward()
        assert isinstance(rows.kernel, FlowSDE)
        for row in range(len(rows.x)):
            sigma, to = float(rows.sigma[row]), float(rows.sigma_next[row])
            at = min(range(STEPS - 1), key=lambda k: abs(levels[k] - sigma))
            x, after = rows.x[row : row + 1].double(), rows.x_next[row : row + 1].double()
            v = plain_velocity(network, calls[at], x, sigma)
            theirs = log_density(x, v, after, sigma, to, rows.kernel.eta)
            assert float(ours[row].detach()) == pytest.approx(
                float(theirs.detach()), rel=2e-5, abs=2e-5
            )
            theirs.backward()
            seen += 1
    exactly, compared = dict(network.named_parameters()), 0
    for key, value in made.pipe.transformer.named_parameters():
        if value.grad is None or ".lora_" not in key:
            continue
        wanted = exactly[key].grad
        away = float((value.grad.double() - wanted).norm())
        assert away <= 1e-3 * float(wanted.norm()) + 1e-7, key
        compared += float(wanted.norm()) > 1e-6
    assert seen >= 6 and compared > 8


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["flow_grpo", "nft", "branch_grpo"])
def test_it_learns_from_ratio_one(recipe: str):
    settings: dict[str, dict[str, Any]] = {
        "flow_grpo": {"steps": 4, "group": 2},
        "nft": {"steps": 5, "group": 2, "levels_per_sample": 2, "kl": 0.0},
        "branch_grpo": {"steps": 5, "at": (0, 2), "roots": 1},
    }
    made = driven()
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    before = {key: value.detach().clone() for key, value in made.trainable().items()}
    assert learn(made, RECIPES[recipe](**settings[recipe]), guidance=None) < 1e-5
    assert any(not value.equal(before[key]) for key, value in made.trainable().items())


@pytest.mark.slow
def test_the_network_for_references_is_not_loaded(tmp_path: Path):
    """61.7 GB of the repository, for what no file of prompts can name."""
    pipe = MODULAR["minimax_h3"]()
    pipe.update_components(transformer_ref=copy.deepcopy(pipe.transformer))
    pipe.save_pretrained(str(tmp_path), overwrite_modular_index=True)
    assert (tmp_path / "transformer_ref").is_dir()
    made = ModularSource(str(tmp_path), given=tuple(CALL)).load(torch.float32)
    assert made.transformer_ref is None and made.transformer is not None
    assert made.audio_scheduler.config.shift == 3.0
    described = describe(PipelineSettings(pipeline=str(tmp_path), call=CALL))
    assert described is not None and "transformer_ref" not in described.counts
    assert {"text_encoder", "vae", "audio_vae"} <= described.counts.keys()


@pytest.mark.slow
def test_the_lines_that_a_run_prints_load_its_adapter_in_plain_diffusers(tmp_path: Path):
    base, at = tmp_path / "pipeline", tmp_path / "adapter"
    MODULAR["minimax_h3"]().save_pretrained(str(base), overwrite_modular_index=True)
    made = adapted(driven())
    made.save(at)
    settings = PipelineSettings(pipeline=str(base), scheduler={"shift": 11.0})
    lines = [*loading_lines(settings, str(base), None, [LORA_FILE], str(at))]
    names: dict[str, Any] = {}
    exec("\n".join(["import torch", f"from diffusers import {loader(settings)}", *lines]), names)
    plain = names["pipe"]
    assert plain.scheduler.config.shift == 11.0
    plain.update_components(scheduler=made.pipe.scheduler)
    ours, theirs, untrained = (
        record(policy.loop, PROMPTS[:1], (), STEPS, None)[1].media
        for policy in (made, driven(plain), driven())
    )
    assert torch.equal(ours, theirs) and not torch.equal(ours, untrained)
