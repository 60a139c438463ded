"""Given images as latents: each pipeline's own scale, shift and packing, and the way back."""

import random
from types import SimpleNamespace

import pytest
import torch
from diffusers import FluxPipeline

from flowrl.demo.moving_world import render_videos
from flowrl.demo.world import render_images
from flowrl.errors import UserError
from flowrl.models.diffusers.media_encoder import DecoderInput, DecoderReached, MediaEncoder
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.paths import find
from tests.support.tiny_pipelines import NAMED


def opened(name):
    family = NAMED[name]
    policy = PipelinePolicy(family.build(), call=family.call)
    batch = policy.open(["a red ball"], (), 3)
    return policy, batch, MediaEncoder.of(batch)


def posterior(policy, media):
    pixels = 2 * media - 1
    pixels = pixels.movedim(0, 1) if media.ndim == 4 else pixels
    vae = policy.pipe.vae
    with torch.no_grad():
        try:
            return vae.encode(pixels[None]).latent_dist.mode()
        except (RuntimeError, ValueError):  # a video VAE takes an image as a video of one frame
            return vae.encode(pixels[None, :, None]).latent_dist.mode()


def by_factor(pipe, z):
    """StableDiffusionImg2ImgPipeline.prepare_latents."""
    return z * pipe.vae.config.scaling_factor


def by_shift(pipe, z):
    """StableDiffusion3Img2ImgPipeline.prepare_latents."""
    return (z - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor


def packed(pipe, z):
    """FluxImg2ImgPipeline.prepare_latents."""
    z = by_shift(pipe, z)
    return FluxPipeline._pack_latents(z, *z.shape)


def by_channel(pipe, z):
    """WanVideoToVideoPipeline.prepare_latents."""
    mean, std = (
        torch.tensor(getattr(pipe.vae.config, name)).view(1, -1, 1, 1, 1)
        for name in ("latents_mean", "latents_std")
    )
    return (z - mean) / std


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("SD1.5", by_factor),
        pytest.param("SDXL", by_factor, marks=pytest.mark.slow),
        pytest.param("SD3", by_shift, marks=pytest.mark.slow),
        ("FLUX.1", packed),
        ("Wan 2.1", by_channel),
    ],
)
def test_a_given_sample_has_the_latents_of_the_familys_own_image_to_image_call(name, own) -> None:
    policy, _, encode = opened(name)
    media = torch.rand(encode.media, generator=torch.Generator().manual_seed(3))
    ours, theirs = encode(media), own(policy.pipe, posterior(policy, media))
    assert ours.shape == policy.shape(3)
    assert torch.allclose(ours, theirs.view_as(ours), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["SD1.5", "SD3", "FLUX.1", "FLUX.2", "Wan 2.1", "Qwen-Image", "Sana", "LTX-Video", "CogVideoX"],
)
def test_the_decoder_gets_what_the_encoder_made(name) -> None:
    policy, batch, encode = opened(name)
    z = torch.randn(encode.given.shape, generator=torch.Generator().manual_seed(4))
    x = encode.given.inverse(z).view(1, *policy.shape(3))
    with pytest.raises(DecoderReached) as reached, torch.no_grad():
        policy.pipe.vae.decode = end
        policy.decode(x, batch.conditioning, steps=3, guidance=1.0)
    assert torch.allclose(reached.value.latents, z, atol=1e-5)


def end(latents, *_, **__):
    raise DecoderReached(latents)


def shapes() -> torch.Tensor:
    return render_images(["a red circle above a blue square"], random.Random(0))[0]


def moving() -> torch.Tensor:
    return render_videos(["a red circle moving right"], random.Random(0))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "make", "call"),
    [
        ("shapes-sd3", shapes, {"max_sequence_length": 1}),
        ("moving-wan", moving, {"num_frames": 5}),
    ],
)
def test_a_given_sample_is_near_itself_after_encoding_and_decoding(source, make, call) -> None:
    policy = PipelinePolicy.load(
        str(find(f"flowrl/demo/{source}")), dtype=torch.float32, device="cpu",
        call={"height": 32, "width": 32, **call},
    )  # fmt: skip
    batch = policy.open(["a red circle"], (), 3)
    encode, media = MediaEncoder.of(batch), make()
    assert encode.round_trip(batch, media, encode(media)) > 25.0


def affine(place, scale, shift, dtype=torch.float32):
    return lambda x: (scale * x[place] + shift).to(dtype)[None]


def test_any_rearrangement_with_scales_and_shifts_is_found() -> None:
    rng = torch.Generator().manual_seed(0)
    place = torch.randperm(300, generator=rng)
    scale, shift = torch.rand(300, generator=rng) + 0.5, torch.randn(300, generator=rng)
    found = DecoderInput.found(affine(place, scale, shift), 300, "it")
    assert torch.equal(found.index, place)
    assert torch.allclose(found.scale, scale, atol=1e-6)
    half = DecoderInput.found(affine(place, scale, shift, torch.bfloat16), 300, "it")
    assert torch.equal(half.index, place)
    assert float((half.scale - scale).abs().max()) < 0.02


@pytest.mark.parametrize(
    "reach",
    [
        lambda x: (x**3 + x)[None],
        lambda x: (x + x.roll(1))[None],
        lambda x: x[:-1][None],
        lambda x: torch.zeros_like(x)[None],
    ],
    ids=["cubed", "sums", "fewer", "nothing"],
)
def test_what_is_no_rearrangement_is_refused(reach) -> None:
    with pytest.raises(UserError, match="cannot be encoded"):
        DecoderInput.found(reach, 64, "it")


def test_a_pipeline_without_an_encoder_is_refused() -> None:
    family = NAMED["SD3"]
    policy = PipelinePolicy(family.build(), call=family.call)
    batch = policy.open(["a red ball"], (), 3)
    vars(policy.pipe)["vae"] = SimpleNamespace()
    with pytest.raises(UserError, match="no VAE that encodes"):
        MediaEncoder.of(batch)
