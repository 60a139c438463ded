"""Gradients, adapters and files: what is trained is what plain diffusers loads."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.lora import lora
from flowrl.models.diffusers.policy import PipelinePolicy
from tests.support.driving import PROMPTS, STEPS, noise, own, policy, sample
from tests.support.tiny_pipelines import FAMILIES, SQUARE, sd3


def test_gradients_reach_adapters_and_full_weights() -> None:
    """And are those of the bare denoiser, called by hand."""
    made = policy()
    made.train_all()
    conditioning = made.encode(PROMPTS)
    velocity = made.bind(conditioning, steps=STEPS, guidance=1.0)
    x = noise(made)
    sigma = torch.full((2,), made.schedule(STEPS).sigmas[1])
    velocity(x, sigma, torch.tensor([0, 1])).square().mean().backward()
    seen = {name: p.grad for name, p in made.trainable().items()}
    transformer = made.pipe.transformer
    transformer.zero_grad()
    prompt, _, pooled, _ = conditioning.calls()[0]
    time = made.schedule(STEPS).timesteps[1].expand(2)
    bare = transformer(
        hidden_states=x, timestep=time, encoder_hidden_states=prompt, pooled_projections=pooled
    ).sample
    bare.square().mean().backward()
    for name, parameter in transformer.named_parameters():
        theirs = seen[f"transformer.{name}"]
        assert (theirs is None) == (parameter.grad is None)
        if theirs is not None:
            assert torch.equal(theirs, parameter.grad)

    made = policy()
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=4.5)
    velocity(x, sigma, torch.tensor([0, 1])).square().mean().backward()
    trainable = made.trainable()
    assert all(".lora_" in name and p.requires_grad for name, p in trainable.items())
    moved = [name for name, p in trainable.items() if p.grad is not None and p.grad.any()]
    # B is 0, so A gets none; the last block's prompt queries go nowhere in SD3
    nowhere = "transformer.transformer_blocks.1.attn.add_q_proj"
    ends = {name for name in trainable if ".lora_B." in name}
    assert {name for name in ends if not name.startswith(nowhere)} == set(moved)
    others = [p for p in made.pipe.transformer.parameters() if not p.requires_grad]
    assert others and all(p.grad is None for p in others)


def test_adapters_are_drawn_from_the_seed_alone() -> None:
    def drawn(seed: int, noise: int) -> dict[str, Tensor]:
        made = policy()
        torch.manual_seed(noise)
        before = torch.random.get_rng_state()
        made.add_lora(rank=8, alpha=8, targets=None, seed=seed)
        assert torch.equal(before, torch.random.get_rng_state())
        return {name: p.detach() for name, p in made.trainable().items()}

    one, same, other = drawn(0, 1), drawn(0, 2), drawn(1, 1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    starts = [name for name in one if ".lora_A." in name]
    assert not any(torch.equal(one[name], other[name]) for name in starts)
    assert not any(one[name].any() for name in one if ".lora_B." in name)
    values = torch.cat([one[name].flatten() for name in starts])
    assert values.std().item() == pytest.approx(1 / 8, rel=4 / math.sqrt(2 * len(values)))


def test_targets() -> None:
    found = lora.default_targets(sd3().transformer)
    assert {"attn.to_q", "attn.add_k_proj", "attn.to_out.0", "ff.net.0.proj", "ff.net.2"} <= set(
        found
    )
    assert not any("norm" in name or "embed" in name for name in found)
    made = policy()
    made.add_lora(rank=2, alpha=4, targets=["to_q"], seed=0)
    assert len(made.trainable()) == 2 * 2  # A and B in two blocks
    with pytest.raises(UserError, match="did you mean to_q"):
        policy().add_lora(rank=2, alpha=4, targets=["to_k", "to_qq"], seed=0)
    with pytest.raises(UserError, match="already"):
        made.add_lora(rank=2, alpha=4, targets=None, seed=0)


def nudge(made: PipelinePolicy) -> None:
    """What training would do, large enough to be seen."""
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.1)


@pytest.mark.quick_cases("8")
@pytest.mark.parametrize("alpha", [4, 8])
def test_saved_adapter_in_a_plain_pipeline(alpha: int, tmp_path: Path) -> None:
    made = policy()
    latents = noise(made)
    before = sample(made, latents, 4.5)
    made.add_lora(rank=4, alpha=alpha, targets=None, seed=0)
    assert torch.equal(sample(made, latents, 4.5), before)  # B = 0
    nudge(made)
    made.save(tmp_path)
    plain = sd3()
    plain.load_lora_weights(tmp_path)
    theirs = own(plain, latents, SQUARE, guidance_scale=4.5)
    ours = sample(made, latents, 4.5)
    assert torch.equal(ours, theirs) and (ours - before).abs().max() > 1e-2

    again = policy()
    again.load_weights(tmp_path)
    assert torch.equal(sample(again, latents, 4.5), theirs)
    assert again.trainable().keys() == made.trainable().keys()
    again.load_weights(tmp_path)  # once more, over adapters that are there
    assert torch.equal(sample(again, latents, 4.5), theirs)


def assert_same(made: PipelinePolicy, plain: Any, latents: Tensor) -> None:
    """The same weights to the bit; images to rounding, for mapped files lie otherwise in memory."""
    ours, theirs = made.pipe.transformer.state_dict(), plain.transformer.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    images = own(plain, latents, SQUARE, guidance_scale=4.5)
    torch.testing.assert_close(sample(made, latents, 4.5), images, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_saved_full_weights_by_from_pretrained(tmp_path: Path) -> None:
    made = policy()
    latents = noise(made)
    before = sample(made, latents, 4.5)
    made.train_all()
    nudge(made)
    made.save(tmp_path)
    assert (sample(made, latents, 4.5) - before).abs().max() > 1e-2
    parts: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}  # as diffusers wants it
    assert_same(made, StableDiffusion3Pipeline.from_pretrained(tmp_path, **parts), latents)
    again = policy()
    again.load_weights(tmp_path)
    assert_same(again, made.pipe, latents)
    with pytest.raises(UserError, match="no saved weights"):
        again.load_weights(tmp_path / "vae")
    with pytest.raises(UserError, match="is not a diffusers pipeline"):
        PipelinePolicy.load(str(tmp_path / "x"), dtype=torch.float32, device="cpu", call=SQUARE)


@pytest.mark.parametrize("listed", [True, False])
def test_load_without_an_optional_component(listed: bool, tmp_path: Path) -> None:
    """SD3's third encoder: null in the index, or not even in it."""
    pipe = sd3()
    pipe.save_pretrained(tmp_path)
    index = tmp_path / "model_index.json"
    entries = json.loads(index.read_text())
    if not listed:
        del entries["text_encoder_3"], entries["tokenizer_3"], entries["image_encoder"]
        index.write_text(json.dumps(entries))
    made = PipelinePolicy.load(str(tmp_path), dtype=torch.bfloat16, device="cpu", call=SQUARE)
    assert made.pipe.text_encoder_3 is None
    assert all(p.dtype == torch.bfloat16 for p in made.trainable().values())
    assert not any(p.requires_grad for p in made.trainable().values())
    for module in made.pipe.components.values():
        if isinstance(module, torch.nn.Module):
            assert not module.training and not any(p.requires_grad for p in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux", "lumina2", "qwen", "wan 2.1"])
def test_adapters_of_other_families(family: str, tmp_path: Path) -> None:
    build, call = FAMILIES[family]
    made = PipelinePolicy(build(), call=call)
    latents = noise(made)
    before = sample(made, latents, None)
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    nudge(made)
    made.save(tmp_path)
    plain = build()
    plain.load_lora_weights(tmp_path)
    ours = sample(made, latents, None)
    assert torch.equal(ours, own(plain, latents, call)) and (ours - before).abs().max() > 1e-3


def test_half_precision_keeps_the_states_and_says_its_dtype() -> None:
    made = PipelinePolicy(sd3().to(torch.bfloat16), call=SQUARE)
    proof = made.prove(PROMPTS, steps=STEPS, guidance=4.5)
    assert proof.dtype == "bfloat16" and "bfloat16" in str(proof)
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    assert {p.dtype for p in made.trainable().values()} == {torch.float32}
    velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=4.5)
    v = velocity(torch.randn(2, *made.shape(STEPS)), torch.ones(2), torch.tensor([0, 1]))
    assert v.dtype == torch.float32 and v.requires_grad
