"""The traits of a pipeline: found once at load, by as few evaluations as possible, and frozen."""

import diffusers
import pytest
import torch
from torch import nn

from flowrl.models.diffusers.policy import PipelinePolicy
from tests.support.driving import PROMPTS, STEPS
from tests.support.tiny_pipelines import NAMED, SQUARE, sd3
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.calls_videos import VIDEO_SPECIALS
from tests.support.zoo.pipelines import Tiny, tiny

torch.set_num_threads(1)


def built(name: str) -> Tiny:
    if name in NAMED:
        return Tiny(NAMED[name].build(), dict(NAMED[name].call))
    return tiny(getattr(diffusers, name), SPECIALS | VIDEO_SPECIALS, SIZES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"),
    # two rows at load, the form of a stub's output, and twice for pipelines that guide in two
    # calls; the last one takes no stubs, so each of its steps runs the denoiser
    [
        ("SD3", 2),
        ("Wan 2.1", 3),
        ("LTX-Video with an image", 2),
        ("StableDiffusionSAGPipeline", 14),
    ],
)
def test_a_start_evaluates_its_denoiser_this_often_at_most(name: str, most: int) -> None:
    made, runs = built(name), list[int]()
    denoiser = vars(made.pipe).get("transformer") or made.pipe.unet
    leaf = next(m for m in denoiser.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    leaf.register_forward_hook(lambda *_: runs.append(1))
    PipelinePolicy(made.pipe, call=made.call).schedule(STEPS)
    assert len(runs) <= most


@pytest.mark.slow
def test_traits_of_several_kinds() -> None:
    traits = {}
    for name in (
        "SD3",
        "Wan 2.1 image to video",
        "StableDiffusionSAGPipeline",
        "KandinskyPipeline",
    ):
        made = built(name)
        traits[name] = PipelinePolicy(made.pipe, call=made.call).loop.traits
    plain, pictured, looking, single = traits.values()
    assert plain.stubs and not plain.single and plain.required == {}
    assert (
        plain.entry.output is None and plain.kind == "flow" and plain.guidance == "guidance_scale"
    )
    assert list(pictured.required) == ["image"]
    assert not looking.stubs and looking.kind == "epsilon"
    assert single.single and single.stubs


def test_driving_changes_no_trait() -> None:
    """Only a row's new arguments add an encoding, to another record."""
    made = PipelinePolicy(sd3(), call=SQUARE)
    traits = made.loop.traits
    made.prove(PROMPTS, steps=STEPS, guidance=4.5)
    conditioning = made.encode(PROMPTS)
    x = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    made.bind(conditioning, steps=STEPS, guidance=4.5)(x, torch.ones(2), torch.tensor([0, 1]))
    made.decode(x, conditioning, steps=STEPS, guidance=4.5)
    assert made.loop.traits is traits
    made.encode(PROMPTS, [{"negative_prompt": "bad"}] * 2)
    assert list(traits.encodings) == [()]
    assert list(made.loop.traits.encodings) == [(), ("negative_prompt",)]
