"""`guidance: {through: cond}`: a guided velocity's gradient through the prompt's prediction."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.batch import Scales
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.settings.checks.gradients import check_gradients
from flowrl.settings.read import run_from
from tests.support.advice import advice
from tests.support.driving import PROMPTS, STEPS, noise
from tests.support.tiny_modular import MODULAR, MODULAR_CALLS
from tests.support.tiny_pipelines import NAMED

torch.set_num_threads(1)
SCALE = 3.0


def policy(name: str) -> PipelinePolicy:
    if name in MODULAR:
        made = PipelinePolicy(MODULAR[name](), call=MODULAR_CALLS[name])
    else:
        negative = {"negative_prompt": "bad"} if name == "SD3" else {}
        made = PipelinePolicy(NAMED[name].build(), call={**NAMED[name].call, **negative})
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    for value in made.trainable().values():
        torch.nn.init.normal_(value, std=0.1, generator=torch.Generator().manual_seed(1))
    return made.guided(SCALE, SCALE)


def first_half(out: Tensor, call: int) -> Tensor:
    """Both halves are rows of one call, that without the prompt first."""
    del call
    half = len(out) // 2
    return torch.cat([out[:half].detach(), out[half:]])


def every_second(out: Tensor, call: int) -> Tensor:
    """The halves are calls of their own, that with the prompt first."""
    return out.detach() if call % 2 else out


def gradients(made: PipelinePolicy) -> tuple[Tensor, dict[str, Tensor]]:
    """The velocity at a state, and the gradients of its product with fixed numbers."""
    x = noise(made).requires_grad_()
    velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=SCALE, kind="training")
    v = velocity(x, torch.full((2,), made.schedule(STEPS).sigmas[1]), torch.arange(2))
    (v * torch.randn(v.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    found = {name: value.grad for name, value in made.trainable().items() if value.grad is not None}
    assert x.grad is not None
    return v.detach(), {"x": x.grad, **found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cut"),
    [("SD3", first_half), pytest.param("anima", every_second, marks=pytest.mark.slow)],
)
def test_the_gradient_is_that_of_a_detached_prediction(
    name: str, cut: Callable[[Tensor, int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    value, ours = gradients(policy(name).through_prompt())
    whole, both = gradients(policy(name))
    plain, calls = policy(name), [0]
    plain.bind(plain.encode(PROMPTS), steps=STEPS, guidance=SCALE)  # proven before it is cut
    network: Any = plain.pipe.transformer
    forward = network.forward

    def detached(*args: Any, **given: Any) -> Any:
        (out,) = forward(*args, **given)
        calls[0] += 1
        return (cut(out, calls[0] - 1),)

    monkeypatch.setattr(network, "forward", detached)
    same, wanted = gradients(plain)
    assert torch.equal(value, whole) and torch.equal(whole, same)
    assert ours.keys() == wanted.keys() == both.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(ours[name], gradient, rtol=1e-3, atol=1e-5), name
    assert any(not torch.allclose(ours[name], both[name], rtol=1e-2) for name in both)


def test_guidance_of_another_kind_flows_through_all_of_it_where_the_setting_is_left_out() -> None:
    made = {
        name: PipelinePolicy(NAMED[name].build(), call=NAMED[name].call).guided(scale, scale)
        for name, scale in (("Qwen-Image", SCALE), ("FLUX.1", SCALE), ("SD3", None))
    }

    def trained(name: str) -> None:
        """A gradient of the velocity of training, as a run without `through` has it."""
        x = noise(made[name])[:1].requires_grad_()
        scale = made[name].guidance.train
        velocity = made[name].bind(
            made[name].encode(PROMPTS[:1]), steps=STEPS, guidance=scale, kind="training"
        )
        sigma = torch.tensor(made[name].schedule(STEPS).sigmas[1:2])
        velocity(x, sigma, torch.tensor([0])).sum().backward()
        assert x.grad is not None and bool(x.grad.any())

    advice(  # it keeps the norm of the prompt's
        "mixes its predictions by another rule than classifier-free guidance's: leave it out",
        made["Qwen-Image"].through_prompt,
        lambda: trained("Qwen-Image"),
    )
    advice(
        "makes one prediction at scale {}: leave it out",
        made["FLUX.1"].through_prompt,
        lambda: trained("FLUX.1"),
    )
    advice(
        "takes no guidance scale in its call: leave it out",
        made["SD3"].through_prompt,
        lambda: trained("SD3"),
    )


def test_z_image_counts_its_scale_from_zero() -> None:
    made = PipelinePolicy(NAMED["Z-Image"].build(), call=NAMED["Z-Image"].call)
    assert made.guided(SCALE, SCALE).through_prompt().use.alone == 1 + SCALE
    assert made.guided(SCALE, SCALE).guidance == Scales(SCALE, SCALE)


@pytest.mark.parametrize(
    ("recipe", "scale", "why"),
    [
        ("flow_grpo", 3.0, "flow_grpo uses no reward's gradient"),
        ("draft", "none", "the loss has no guidance"),
        ("draft", 3.0, None),
    ],
)
def test_the_setting_needs_a_gradient_and_guidance(
    recipe: str, scale: Any, why: str | None
) -> None:
    tree = {
        "recipe": {"name": recipe},
        "model": {
            "pipeline": "stabilityai/stable-diffusion-3.5-medium",
            "guidance": {"sample": scale, "train": scale, "through": "cond"},
        },
        "prompts": {"train": "x.txt", "per_iteration": 8},
        "rewards": ["brightness"],
    }
    run = run_from(tree, "test")
    if why is None:
        return check_gradients(run, run.algorithm())
    with pytest.raises(UserError, match=rf"model\.guidance\.through: .*{why}"):
        check_gradients(run, run.algorithm())
