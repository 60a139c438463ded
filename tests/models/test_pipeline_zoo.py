"""Pipelines that no code names: one of each kind that the sweep showed, from generic tiny parts."""

from collections.abc import Sequence
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.diffusers.call.drive.image_to_image import RecordedNoise, clean_part
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.results import proof_checks
from flowrl.models.diffusers.call.results.decoder import media_of
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.replay.own_call import record
from samplers import Latents, Ode, roll
from tests.support.driving import PROMPTS, STEPS, own, policy
from tests.support.tiny_pipelines import SQUARE, sd3
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.calls_videos import VIDEO_SPECIALS
from tests.support.zoo.pipelines import Unbuilt, tiny

torch.set_num_threads(1)


def zoo(name: str) -> PipelinePolicy:
    made = tiny(getattr(diffusers, name), SPECIALS | VIDEO_SPECIALS, SIZES)
    return PipelinePolicy(made.pipe, call=made.call)


KINDS = {
    "StableDiffusionImg2ImgPipeline": "a strength cuts the list of steps",
    "TextToVideoSDPipeline": "its step sees frames as rows",
    "AnimateDiffControlNetPipeline": "one prompt a call, and a film to follow",
    "StableDiffusionPipelineSafe": "prompts behind negative ones, arrays for pictures",
    "StableDiffusionAdapterPipeline": "a picture for each row",
    "EasyAnimatePipeline": "it asks what its scheduler has",
    "Kandinsky3Pipeline": "tensors of pictures that are not in 0..1",
    "QwenImageControlNetInpaintPipeline": "a picture and a mask of its own name",
    "StableDiffusionSAGPipeline": "its loop looks into its denoiser",
    "Ideogram4Pipeline": "it cannot be called without guidance",
    "HeliosPipeline": "it takes latents and leaves them",
    "QwenImage21Pipeline": "transparent pictures, and a cache of the prompt's keys and values",
    "ZImageControlNetPipeline": "its control network asks for what it has not",
    "Cosmos2_5_PredictBasePipeline": "it wants its step's index",
    "BriaFiboEditPipeline": "its prompts are JSON",
}


@pytest.mark.quick_cases("it takes latents")
@pytest.mark.parametrize("name", KINDS, ids=list(KINDS.values()))
def test_any_pipeline_is_driven_to_the_bit(name: str) -> None:
    """The replay is exact, its media are pictures, and a row does not depend on its place."""
    made = zoo(name)
    guidance = None if made.loop.guidance is None else 4.5
    proof = made.prove(PROMPTS, steps=STEPS, guidance=guidance)
    assert proof.first is None or proof.first < 1e-4
    pictures = made.loop.tried(())
    conditioning = made.loop.encode(PROMPTS, pictures)
    x = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    sigma = torch.full((2,), made.schedule(STEPS).sigmas[0])
    with torch.no_grad():
        velocity = made.bind(conditioning, steps=STEPS, guidance=guidance)
        v = velocity(x, sigma, torch.tensor([0, 1]))
        turned = velocity(x.flip(0), sigma, torch.tensor([1, 0]))
        media = made.decode(x, conditioning, steps=STEPS, guidance=guidance)
    torch.testing.assert_close(v, turned.flip(0), rtol=1e-4, atol=1e-5)
    assert (v[0] - v[1]).abs().max() > 1e-3
    assert media.shape[0] == 2 and media.shape[-3] == 3
    assert media.min() >= 0 and media.max() <= 1


def test_a_loop_whose_later_steps_are_not_eulers_is_refused() -> None:
    """It hands on -v, which is seen; but it finds its next levels by itself, shifted twice."""
    made = zoo("LTXConditionPipeline")
    with pytest.raises(UserError, match=r"a step of its scheduler is 0\.\d+ away from Euler's"):
        made.prove(PROMPTS, steps=STEPS, guidance=None)
    assert made.loop.traits.sign == -1


def test_a_loop_that_begins_at_a_picture() -> None:
    """Our first states are the pipeline's own, made of our noise: image to image."""
    for name in ("StableDiffusion3Img2ImgPipeline", "StableDiffusionImg2ImgPipeline"):
        made = zoo(name)
        pictures = made.loop.tried(())
        conditioning = made.loop.encode(PROMPTS, pictures)
        begin = made.begin(conditioning, STEPS)
        assert begin is not None
        sigma = torch.full((2,), made.schedule(STEPS).sigmas[0])
        assert sigma[0] < 1
        noise = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(0))
        steps, _, _ = record(made.loop, PROMPTS, pictures, STEPS, None)
        state = steps[0].state
        assert state is not None
        if made.loop.traits.kind != "flow":
            state = state / sum(scales(sigma[0]))
        ours = begin(noise, torch.tensor([0, 1]))
        torch.testing.assert_close(ours, state, rtol=1e-4, atol=1e-4)
        assert (ours - sigma[0] * noise).abs().max() > 0.1  # the picture is in it


@pytest.mark.slow
def test_a_painting_begins_at_its_pictures_and_samples_at_its_own_guidance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = zoo("StableDiffusion3Img2ImgPipeline")
    made = made.guided(4.5, 1.0)
    conditioning = made.loop.encode(PROMPTS, made.loop.tried(()))
    painting = MediaBatch(made, conditioning, STEPS)
    (painted,) = painting.rollouts(Ode(2), (4, 7), seed=0, iteration=0)
    plans = Ode(2)(made.schedule(STEPS).sigmas, 0, 0)
    velocity = made.bind(conditioning, steps=STEPS, guidance=4.5)
    begin = made.begin(conditioning, STEPS)
    common: Any = {"seed": 0, "iteration": 0}
    (own,) = roll(plans, velocity, Latents(made.shape(STEPS), begin=begin), (4, 7), **common)
    assert torch.equal(painted.x0, own.x0)
    at = own.x0[:2], torch.full((2,), plans[0].steps[0].sigma), torch.tensor([0, 1])
    with torch.no_grad():
        trained = made.bind(conditioning, steps=STEPS, guidance=1.0)(*at)
        assert torch.equal(painting.policy(*at), trained)
        assert not torch.equal(trained, velocity(*at))
    seen: list[tuple[Any, ...]] = []

    def shown(
        x0: Tensor, rows: Any, *, steps: int, guidance: float | None, graded: bool = False
    ) -> Tensor:
        seen.append((*rows.prompts, guidance))
        return x0

    monkeypatch.setattr(made, "decode", shown)
    painting.media(painted)
    assert seen == [(PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1], 4.5)]


def scales(sigma: Tensor) -> tuple[float, float]:
    """Of a variance-preserving state at a flow's level: of the picture and of the noise."""
    size = torch.hypot(sigma, 1 - sigma)
    return float((1 - sigma) / size), float(sigma / size)


def test_most_loops_begin_at_noise_alone() -> None:
    assert policy().begin(policy().encode(PROMPTS), STEPS) is None
    made = zoo("FluxControlPipeline")
    assert made.begin(made.loop.encode(PROMPTS, made.loop.tried(())), STEPS) is None


def test_a_plan_takes_the_first_states_that_it_is_given() -> None:
    def still(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        return torch.zeros_like(x)

    plans = Ode(2)((0.5, 0.2, 0.0), 0, 0)
    common: Any = {"seed": 0, "iteration": 0}
    (plain,) = roll(plans, still, Latents((3,)), (4, 7), **common)
    base = torch.tensor([[1.0], [2.0]])
    begin = lambda noise, prompt: base[prompt] + 0.5 * noise
    (begun,) = roll(plans, still, Latents((3,), begin=begin), (4, 7), **common)
    assert torch.equal(begun.x0, base[[0, 0, 1, 1]] + 0.5 * plain.x0)


def test_a_beginning_of_another_kind_is_refused() -> None:
    noise = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))

    def first(size: float, kept: bool = True) -> Any:
        def make(draws: RecordedNoise) -> Tensor:
            draws.drawn += [noise] if kept else []
            return 1 + size * draws.size * noise

        return make

    found = clean_part(first(0.5), 0.5, "Some")
    assert found is not None and torch.equal(found.state, torch.ones(1, 64))
    assert found.scale == pytest.approx(1.0)
    with pytest.raises(UserError, match=r"from an image with noise of size 0\.7 at the level 0\.6"):
        clean_part(first(0.7), 0.6, "Some")
    with pytest.raises(UserError, match="without the noise"):
        clean_part(first(0.5, kept=False), 0.5, "Some")


def test_media_that_are_no_pictures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = sd3()
    made = PipelinePolicy(pipe, call=SQUARE)
    shown = pipe.image_processor.postprocess
    monkeypatch.setattr(
        pipe.image_processor, "postprocess", lambda image, **named: shown(image, **named) * 2 - 1
    )
    with pytest.raises(UserError, match=r"not to images in 0\.\.1"):
        made.prove(PROMPTS, steps=STEPS, guidance=1.0)


def test_what_a_pipelines_own_code_raises_is_said_as_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = sd3()
    made = PipelinePolicy(pipe, call=SQUARE)

    def broken(*args: Any, **named: Any) -> None:
        raise LookupError("nothing there")

    monkeypatch.setattr(pipe.image_processor, "postprocess", broken)
    with pytest.raises(UserError, match=r"rejects its arguments .*LookupError: nothing there"):
        made.prove(PROMPTS, steps=STEPS, guidance=1.0)


@pytest.mark.slow
def test_rows_that_know_of_each_other_are_refused() -> None:
    """Its prior draws noise for all rows together, in every call."""
    with pytest.raises(UserError, match="depends on its position in the batch"):
        zoo("StableUnCLIPPipeline").prove(PROMPTS, steps=STEPS, guidance=4.5)


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(Unbuilt, match="text_decoder of UniDiffuserTextDecoder"):
        tiny(diffusers.UniDiffuserPipeline, SPECIALS, SIZES)


@pytest.mark.quick_cases("Cosmos2", "LDM3D")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("TextToVideoZeroPipeline", "steps several states in turn"),
        ("CycleDiffusionPipeline", r"predicts NaN or infinity, though its weights are finite"),
        ("StableDiffusionLDM3DPipeline", "Exception: This type pt is not supported"),
        ("Cosmos2TextToImagePipeline", r"its first sigma is 80\.0"),
    ],
)
def test_what_our_samplers_cannot_step_is_refused(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        zoo(name).prove(PROMPTS, steps=STEPS, guidance=None)


@pytest.mark.parametrize("slices", [True, False])
def test_a_decoder_that_bears_one_row(slices: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets them one by one where it can, else the whole pipeline does."""
    pipe = sd3()
    monkeypatch.setattr(pipe.vae, "use_slicing", False if slices else None)
    whole = pipe.vae._decode

    def one(z: Tensor, *args: Any, **named: Any) -> Any:
        if len(z) > 1:
            raise RuntimeError("one row")
        return whole(z, *args, **named)

    monkeypatch.setattr(pipe.vae, "_decode", one)
    made = PipelinePolicy(pipe, call=SQUARE)
    conditioning = made.encode(PROMPTS)
    made.prove(PROMPTS, steps=STEPS, guidance=4.5)
    assert made.loop.traits.single == (not slices)
    x = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(1))
    velocity = made.bind(conditioning, steps=STEPS, guidance=4.5)
    with torch.no_grad():
        v = velocity(x, torch.ones(2), torch.tensor([0, 1]))
        again = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=4.5)
        said = again(x, torch.ones(2), torch.tensor([0, 1]))
        torch.testing.assert_close(v, said, rtol=1e-4, atol=1e-5)  # encoded one by one
        assert len(made.decode(x, conditioning, steps=STEPS, guidance=4.5)) == 2


def test_media_in_the_forms_that_pipelines_have() -> None:
    """Arrays, layers, transparent pictures: these are shown on white."""
    draws = torch.Generator().manual_seed(0)
    layers = [torch.rand(2, 4, 3, 5, generator=draws) for _ in range(3)]
    media = media_of(layers)
    assert media.shape == (3, 2, 3, 3, 5)
    seen = layers[1][0, 3, 2, 4]
    assert float(media[1, 0, 1, 2, 4]) == pytest.approx(
        float(layers[1][0, 1, 2, 4] * seen + 1 - seen)
    )
    array = torch.rand(2, 3, 5, 3, generator=draws)
    assert torch.equal(media_of(array.numpy()), array.movedim(-1, -3))
    with pytest.raises(UserError, match="rewards need RGB"):
        proof_checks.coloured("Some", torch.rand(2, 1, 4, 4))


def test_pictures_to_try_a_pipeline_with() -> None:
    made = columns.placeholder_images(["image", "mask_image", "control_video"], 24, 16, 3)
    assert made["image"].size == (24, 16) and made["image"].mode == "RGB"
    assert made["mask_image"].getextrema() == (0, 255) and len(made["control_video"]) == 3


def test_a_driven_call_leaves_its_modules_as_they_were() -> None:
    """The stand-in for `randn_tensor` is taken out again."""
    made = zoo("StableDiffusion3Img2ImgPipeline")
    made.begin(made.loop.encode(PROMPTS, made.loop.tried(())), STEPS)
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    drawn = diffusers.utils.torch_utils.randn_tensor
    module = diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3_img2img
    assert vars(module)["randn_tensor"] is drawn
    assert own(sd3(), latents, SQUARE).shape == (2, 3, 16, 16)


SQUARE_AND_WIDE = ((48, 48), (96, 48))
FIVE_SHAPES = (*SQUARE_AND_WIDE, (48, 96), (64, 48), (48, 64))
SIZED_BY_IMAGES = {  # latents of a 48 x 48 image
    "StableDiffusionInstructPix2PixPipeline": (4, 24, 24),
    "AltDiffusionImg2ImgPipeline": (4, 24, 24),
    "HunyuanVideo15ImageToVideoPipeline": (4, 5, 8, 8),
    "Kandinsky3Img2ImgPipeline": (4, 24, 24),
    "LatentConsistencyModelImg2ImgPipeline": (4, 24, 24),
    "LongCatImageEditPipeline": (16, 64),  # one area, whatever the image's
    "QwenImageLayeredPipeline": (80, 16),  # likewise
    "StableDiffusionDepth2ImgPipeline": (4, 24, 24),
    "StableDiffusionPAGImg2ImgPipeline": (4, 24, 24),
    "StableDiffusionXLImg2ImgPipeline": (4, 24, 24),
    "StableDiffusionXLPAGImg2ImgPipeline": (4, 24, 24),
    "StableDiffusionImg2ImgPipeline": (4, 24, 24),
    "VideoToVideoSDPipeline": (9, 4, 24, 24),
}


def resized(value: Any, size: tuple[int, int]) -> Any:
    return [each.resize(size) for each in value] if isinstance(value, list) else value.resize(size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "sizes"),
    [
        ("StableDiffusionImg2ImgPipeline", (4, 24, 24), SQUARE_AND_WIDE),
        *(
            pytest.param(*each, FIVE_SHAPES, marks=pytest.mark.slow)
            for each in SIZED_BY_IMAGES.items()
        ),
    ],
)
def test_latents_have_the_shape_of_the_rows_images_where_no_argument_sets_it(
    name: str, shape: tuple[int, ...], sizes: Sequence[tuple[int, int]]
) -> None:
    """Image to image makes latents of its image's shape, which a placeholder cannot know."""
    given = zoo(name)
    made = PipelinePolicy(given.pipe, call=given.call)
    images, found = made.loop.traits.required, []
    for size in sizes:
        rows = [{key: resized(value, size) for key, value in images.items()}] * 2
        made.check_rows(rows)
        made.prove(PROMPTS, steps=STEPS, guidance=4.5 if made.loop.guidance else None, meta=rows)
        found.append(made.shape(STEPS))
        assert made.encode(PROMPTS, rows) and made.shape(STEPS) == found[-1]
    assert found[0] == shape
    if shape[-1] == 24:
        rows = [{key: resized(images[key], size) for key in images} for size in SQUARE_AND_WIDE]
        with pytest.raises(UserError, match=r"prompt 2 of the batch: .*use images of one size"):
            made.encode(PROMPTS, rows)
        batches = made.open(PROMPTS, rows, STEPS).by_size
        assert [batch.owner.shape(STEPS) for batch in batches] == [shape, found[1]]
