"""Log-densities and gradients of modular pipelines without a classic form, against plain loops in
float64 that call their network and nothing of flowrl."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrl.credit.advantages import Context
from flowrl.models.diffusers.modular.face import GUIDER_OFF
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.recipes import RECIPES
from samplers import FlowSDE, Latents, Sampling, roll
from tests.support.driving import PROMPTS, brightness
from tests.support.tiny_modular import MODULAR, MODULAR_CALLS

torch.set_num_threads(1)
STEPS, SCALE = 3, 4.5
# of LTX-2.5's blocks: the scale of perturbed blocks, of parts that do not see each other, the share
# of the rescaled prediction; their text scale is a setting of the test
STG, APART, RESCALED = 1.0, 3.0, 0.7
STATES = ("hidden_states", "audio_hidden_states")


def network_calls(name: str, prompt: str, scale: float) -> list[list[dict[str, Any]]]:
    """Arguments of the network in the plain pipeline's own call, [step][pass of guidance]."""
    pipe, seen = MODULAR[name](), list[dict[str, Any]]()
    for guider in ("guider", "audio_guider"):
        if guider in pipe.components:
            off = {"enabled": False} if scale == GUIDER_OFF else {"guidance_scale": scale}
            pipe.update_components(**{guider: getattr(pipe, guider).new(**off)})
    for block in [each for each in pipe._blocks.sub_blocks if "upsampl" in each]:
        pipe._blocks.sub_blocks.pop(block)  # FLUX.3's, which writes prompts anew
    pipe.transformer.register_forward_pre_hook(
        lambda _, args, given: seen.append(copy.deepcopy(given)), with_kwargs=True
    )
    pipe(
        prompt=prompt, num_inference_steps=STEPS, output_type="pt",
        generator=torch.Generator().manual_seed(0), **MODULAR_CALLS[name],
    )  # fmt: skip
    passes = len(seen) // STEPS
    return [seen[passes * step : passes * (step + 1)] for step in range(STEPS)]


def exact(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floating else value


def predicted(network: nn.Module, call: dict[str, Any], states: Sequence[Tensor]) -> list[Tensor]:
    """The network's velocities of one pass, of each state of one row."""
    given = {key: exact(value) for key, value in call.items()}
    given |= dict(zip(STATES, states, strict=False))
    return list(network(**given)[: len(states)])


def guided(passes: Sequence[Tensor], x: Tensor, sigma: float, scale: float) -> Tensor:
    """The velocity of one state, from those of its passes."""
    if len(passes) == 1:
        return passes[0]
    if len(passes) == 2:  # classifier-free guidance
        with_prompt, without = passes
        return without + scale * (with_prompt - without)
    clean, without, perturbed, apart = (x - sigma * v for v in passes)  # LTX-2
    mixed = (
        clean
        + (scale - 1) * (clean - without)
        + STG * (clean - perturbed)
        + (APART - 1) * (clean - apart)
    )
    dims = tuple(range(1, x.ndim))
    level = clean.std(dims, keepdim=True) / mixed.std(dims, keepdim=True)
    mixed = RESCALED * mixed * level + (1 - RESCALED) * mixed
    return (x - mixed) / sigma


def log_density(x: Tensor, v: Tensor, after: Tensor, sigma: float, to: float, eta: float) -> Tensor:
    """Mean over dims of Flow-GRPO's density (arXiv:2505.05470, eq. 9)."""
    g = eta * math.sqrt(sigma / (1 - (to if sigma == 1 else sigma)))
    h = sigma - to
    mean = x - h * (v + g**2 / (2 * sigma) * (x + (1 - sigma) * v))
    std = g * math.sqrt(h)
    normal = -((after - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
    return normal.mean()


def policy(name: str) -> PipelinePolicy:
    made = PipelinePolicy(MODULAR[name](), call=MODULAR_CALLS[name])
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    for key, value in made.trainable().items():
        if ".lora_B." in key:
            nn.init.normal_(value, std=0.1, generator=torch.Generator().manual_seed(1))
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scale"),
    [("anima", SCALE), ("flux3", SCALE), ("ltx25", SCALE), ("ltx25", GUIDER_OFF)],
)
def test_densities_and_gradients_are_those_of_a_plain_loop(name: str, scale: float) -> None:
    made = policy(name)
    assert made.scale("none") == (GUIDER_OFF if name == "ltx25" else 1.0)
    network: Any = copy.deepcopy(made.pipe.transformer).double()
    algorithm = RECIPES["flow_grpo"](steps=STEPS, group=2)
    for prompt in PROMPTS:
        conditioning = made.encode([prompt])
        velocity = made.bind(conditioning, steps=STEPS, guidance=scale)
        (rollout,) = roll(
            algorithm.plan(made.schedule(STEPS).sigmas, 0, 0), velocity,
            Latents(made.shape(STEPS)), [0], seed=0, iteration=0,
            sampling=Sampling(algorithm.likelihood.keep_mean),
        )  # fmt: skip
        media = made.decode(
            rollout.x0, conditioning.take(rollout.prompt), steps=STEPS, guidance=scale
        )
        credit = algorithm.advantage(brightness(media), Context(rollout.columns, torch.ones(1)))
        every: Any = algorithm.likelihood.rows(rollout, *credit)
        calls = network_calls(name, prompt, scale)
        levels = made.schedule(STEPS).sigmas
        for rows in every:
            ours = algorithm.likelihood.evaluate(velocity, rows).logp
            ours.sum().backward()
            assert isinstance(rows.kernel, FlowSDE)
            for row in range(len(rows.x)):
                sigma, to = float(rows.sigma[row]), float(rows.sigma_next[row])
                at = min(range(STEPS), key=lambda k: abs(levels[k] - sigma))
                x, after = rows.x[row : row + 1].double(), rows.x_next[row : row + 1].double()
                states = [x] if made.layout is None else made.layout.unpack(x)
                passes = [predicted(network, call, states) for call in calls[at]]
                parts = [
                    guided([each[i] for each in passes], state, sigma, scale)
                    for i, state in enumerate(states)
                ]
                v = parts[0] if made.layout is None else made.layout.pack(parts)
                theirs = log_density(x, v.reshape(x.shape), after, sigma, to, rows.kernel.eta)
                known = float(ours[row].detach())
                assert known == pytest.approx(float(theirs.detach()), rel=2e-5, abs=2e-5)
                theirs.backward()
    exactly = dict(network.named_parameters())
    compared = 0
    for key, value in made.pipe.transformer.named_parameters():
        if value.grad is None or ".lora_" not in key:
            continue
        wanted = exactly[key].grad
        away = float((value.grad.double() - wanted).norm())
        # rounding of float32, which LTX-2's way over the clean sample divides by the level
        assert away <= 3e-3 * float(wanted.norm()) + 1e-6, key
        compared += float(wanted.norm()) > 1e-6
    assert compared > 8
