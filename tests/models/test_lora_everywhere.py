"""Adapters of pipelines whose class neither writes nor reads them: trained for a step, saved, and
read by every reader with equal outputs."""

import inspect
from pathlib import Path

import diffusers
import pytest
import torch
from torch import Tensor

from flowrl.cli.model_card import adapter_lines, merged_lines
from flowrl.models.diffusers.call.drive.driver import DENOISERS
from flowrl.models.diffusers.call.traits.verdicts import swept_verdicts
from flowrl.models.diffusers.lora.given_adapters import merge_adapters
from flowrl.models.diffusers.lora.lora import LORA_FILE, READER_FAILS, class_writes_adapters
from flowrl.models.diffusers.lora.lora_formats import read_adapter
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.settings.model.adapters import FrozenAdapter
from tests.support.advice import advice
from tests.support.driving import PROMPTS, STEPS
from tests.support.flex_on_cpu import flex_on_cpu
from tests.support.tiny_modular import MODULAR, MODULAR_CALLS
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.calls_videos import VIDEO_SPECIALS
from tests.support.zoo.pipelines import tiny

DISTILLED = ("DreamLiteMobilePipeline",)  # its scale has no effect
FAST = ("PixArtSigmaPipeline", "OvisImagePipeline")  # one by peft, one by the model's own method


def without_writer() -> list[str]:
    """The exact pipelines whose class does not write adapters."""
    found = []
    for name in swept_verdicts().get("exact", {}):
        kind = getattr(diffusers, name)
        takes = inspect.signature(kind.__init__).parameters
        if not class_writes_adapters(kind, [each for each in DENOISERS if each in takes]):
            found.append(name)
    return found


def built(name: str) -> PipelinePolicy:
    made = tiny(getattr(diffusers, name), SPECIALS | VIDEO_SPECIALS, SIZES)
    return PipelinePolicy(made.pipe, call=made.call)


def velocity(made: PipelinePolicy, gradient: bool = False) -> Tensor:
    unguided = made.loop.guidance is None or type(made.pipe).__name__ in DISTILLED
    guidance = None if unguided else 4.5
    proof = made.prove(PROMPTS, steps=STEPS, guidance=guidance, complete=False, gradient=False)
    conditioning = made.loop.encode(PROMPTS, made.loop.tried(()))
    start = made.loop.start(STEPS)
    x = torch.randn(1, *start.shape, generator=torch.Generator().manual_seed(2))
    x = x.expand(len(PROMPTS), *start.shape).contiguous()
    sigma = torch.full((len(PROMPTS),), start.schedule.visits[1])
    with torch.set_grad_enabled(gradient):
        return made.loop.velocity(x, sigma, conditioning, proof.to_way)


def test_the_list_is_not_empty() -> None:
    assert set(FAST) <= set(without_writer())


@pytest.mark.quick_cases("PixArtSigma")
@pytest.mark.parametrize(
    "name",
    [each if each in FAST else pytest.param(each, marks=pytest.mark.slow)
     for each in without_writer()],
)  # fmt: skip
def test_adapters_train_and_come_back(name: str, tmp_path: Path) -> None:
    made = built(name)
    for root in made.roots().values():
        # torch multiplies part of a tensor, such as EasyAnimate's text tokens at `attn1.to_out.0`,
        # by another product for a weight that takes a gradient; adapters freeze the weights, which
        # alone changed EasyAnimate's output by 1.4e-6 (the one product by 2e-7, 0 in float64)
        root.requires_grad_(False)
    base = velocity(made)
    made.add_lora(rank=2, alpha=6, targets=None, seed=0)
    assert torch.equal(velocity(made), base)
    optimizer = torch.optim.AdamW(made.trainable().values(), lr=0.05)
    velocity(made, gradient=True).square().mean().backward()
    optimizer.step()
    want = velocity(made)
    assert not torch.allclose(want, base, atol=1e-5)

    made.save(tmp_path)
    assert {each.scale for each in read_adapter(tmp_path / LORA_FILE).values()} == {3.0}

    again = built(name)
    again.add_lora(rank=2, alpha=6, targets=None, seed=1)
    again.load_weights(tmp_path)
    assert torch.equal(velocity(again), want)

    begun = built(name)
    begun.begin_from(str(tmp_path))
    assert torch.equal(velocity(begun), want)
    assert begun.trainable().keys() == made.trainable().keys()

    merged = built(name)
    merge_adapters(merged.pipe, [FrozenAdapter(path=str(tmp_path))])
    assert torch.allclose(velocity(merged), want, atol=1e-4, rtol=1e-3)
    assert not [key for key in merged.trainable() if ".lora_" in key]

    below = built(name)
    half = FrozenAdapter(path=str(tmp_path), scale=0.5)
    kind, names = type(below.pipe), list(below.roots())
    exec("\n".join(merged_lines(kind, names, half, half.path)), {"pipe": below.pipe})
    merged = built(name)
    merge_adapters(merged.pipe, [half])
    assert torch.allclose(velocity(below), velocity(merged), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(velocity(below), want, atol=1e-5)

    plain = built(name)
    files = [path.name for path in tmp_path.iterdir()]
    lines = [*adapter_lines(type(plain.pipe), list(plain.roots()), None, files, str(tmp_path))]
    assert len([line for line in lines if line.startswith("pipe.")]) == len(plain.roots())
    exec("\n".join(lines), {"pipe": plain.pipe})  # as a run prints them
    torch.testing.assert_close(velocity(plain), want, atol=1e-5, rtol=1e-5)  # other fused products


@pytest.mark.slow
@pytest.mark.parametrize("name", READER_FAILS)
def test_adapters_that_their_class_cannot_read_are_read_by_the_model(
    name: str, tmp_path: Path
) -> None:
    """The lines that a run prints load them; the class's own loader, which they named, fails."""
    key = "wan_animate_distilled" if "Distilled" in name else "wan_animate"
    with flex_on_cpu():
        made = PipelinePolicy(MODULAR[key](), call=MODULAR_CALLS[key])
    made.add_lora(rank=2, alpha=2, targets=None, seed=0)
    for parameter in made.trainable().values():
        torch.nn.init.normal_(parameter)
    made.save(tmp_path)
    plain = MODULAR[key]()
    files = [path.name for path in tmp_path.iterdir()]
    kind = getattr(diffusers, name)
    assert type(plain) is kind
    exec(
        "\n".join(adapter_lines(kind, ["transformer"], None, files, str(tmp_path))), {"pipe": plain}
    )
    loaded = {n: value for n, value in plain.transformer.named_parameters() if ".lora_" in n}
    want = list(made.trainable().values())
    assert len(loaded) == len(want)
    assert all(torch.equal(*pair) for pair in zip(loaded.values(), want, strict=True))
    with pytest.raises(AttributeError, match="image_dim"):  # else the class needs no exception
        MODULAR[key]().load_lora_weights(str(tmp_path), weight_name=LORA_FILE)


def test_an_adapter_that_was_never_trained_is_left_out(tmp_path: Path) -> None:
    made = built("PixArtSigmaPipeline")
    made.add_lora(rank=2, alpha=6, targets=None, seed=0)
    made.save(tmp_path / "new")
    for p in made.trainable().values():
        p.data += 0.1
    made.save(tmp_path / "trained")

    def merged(*names: str) -> PipelinePolicy:
        policy = built("PixArtSigmaPipeline")
        merge_adapters(policy.pipe, [FrozenAdapter(path=str(tmp_path / name)) for name in names])
        return policy

    for follow in ((), ("trained",)):
        advice(
            "{}: {} changes nothing, since a matrix of each of its products is 0 (an adapter that "
            "was never trained); leave it out, or name another file",
            lambda: merged("new"),
            lambda follow=follow: merged(*follow),
        )
