"""Encode given images and videos as clean samples: with the pipeline's own VAE, and its decoding
inverted.

A pipeline's call ends with unpacking its latents, a scale and a shift (of all latents, or per
channel), and `vae.decode`. The steps before `vae.decode` are found by trial calls: which latent
each number of the decoder's input comes from, and its scale and shift. Its inverse turns the output
of `vae.encode` into the latents of the loop, packed and scaled, for any family and without a table
of scaling factors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.diffusers.call.drive.image_to_image import RecordedNoise
from flowrl.models.diffusers.call.drive.patches import Patch, patched
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES
from flowrl.models.diffusers.call.inputs.conditioning import Conditioning
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.out_of_memory import raise_memory
from samplers.noise import generator

DIGITS = 16  # exact in half precision, under any scale
PROBES = 8  # random latents, over which the rounding of half precision averages out
CLOSE, CLOSE_HALF = 1e-4, 3e-2  # relative errors of the map, in float32 and in half precision


class DecoderReached(Exception):
    """Ends a pipeline call at its decoder, and carries the decoder's input."""

    def __init__(self, latents: Tensor) -> None:
        super().__init__("the decoder was called")
        self.latents = latents


@dataclass(frozen=True)
class DecoderInput:
    """Map from a sample x [d] to the input of `vae.decode`, both flat: z = scale * x[index] +
    shift."""

    index: Int[Tensor, " d"]
    scale: Float[Tensor, " d"]
    shift: Float[Tensor, " d"]
    shape: tuple[int, ...]  # of z with its batch axis, which may hold a video's frames

    def inverse(self, z: Tensor) -> Float[Tensor, " d"]:
        """Latents, flat, whose decoder input is z."""
        x = torch.empty_like(self.scale)
        x[self.index] = (z.detach().flatten().to(self.scale) - self.shift) / self.scale
        return x

    @classmethod
    def found(cls, reach: Callable[[Tensor], Tensor], count: int, owner: str) -> "DecoderInput":
        """Find the map from x [d = count] to the decoder's input by probing `reach`.

        UserError if a number of the input is not a single latent times a scale plus a shift.
        """
        first = reach(torch.zeros(count))
        shift = first.flatten().double()
        scale = reach(torch.ones(count)).flatten().double() - shift
        where = f"{owner}: given images cannot be encoded: its decoder's input"
        if len(shift) != count:
            raise UserError(f"{where} has {len(shift)} numbers for {count} latents")
        if bool((scale == 0).any()):
            raise UserError(f"{where} does not depend on all of its latents")
        index, power = torch.zeros(count, dtype=torch.long), 1
        while power < count:
            digit = torch.arange(count) // power % DIGITS
            seen = (reach(digit.float()).flatten().double() - shift) / scale
            index += seen.round().long().clamp(0, DIGITS - 1) * power
            power *= DIGITS
        if not torch.equal(index.sort().values, torch.arange(count)):
            raise UserError(f"{where} is not a permutation of its latents")
        draws = torch.randn(PROBES, count, generator=generator("given", count))
        draws = draws.bfloat16().double()  # exact in any type
        seen = torch.stack([reach(row.float()).flatten().double() for row in draws])

        def away() -> float:
            return float((scale * draws[:, index] + shift - seen).abs().max() / seen.abs().max())

        if away() > CLOSE:
            scale, shift = _fitted(draws[:, index], seen)
        if not away() <= CLOSE_HALF:
            raise UserError(f"{where} is not a scaled and shifted copy of its latents")
        return cls(index, scale.float(), shift.float(), tuple(first.shape))


def _fitted(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares of z = scale x + shift in each column."""
    x_mean, z_mean = x.mean(0), z.mean(0)
    scale = ((x - x_mean) * (z - z_mean)).sum(0) / (x - x_mean).square().sum(0)
    return scale, z_mean - scale * x_mean


@dataclass(frozen=True)
class MediaEncoder:
    """Encodes images [3 h w] or videos [f 3 h w] in 0..1 to latents that `decode` accepts."""

    policy: PipelinePolicy
    steps: int
    given: DecoderInput
    media: tuple[int, ...]  # the shape of a decoded sample

    @classmethod
    def of(cls, batch: MediaBatch) -> "MediaEncoder":
        """Analyse how a batch's pipeline decodes. UserError if this cannot be inverted."""
        policy = batch.owner
        assert isinstance(policy, PipelinePolicy)
        vae = vars(policy.pipe).get("vae")
        if not isinstance(vae, nn.Module) or not callable(getattr(vae, "encode", None)):
            raise UserError(f"given: {policy.name} has no VAE that encodes images")
        shape = policy.shape(batch.steps)

        def reach(x: Tensor) -> Tensor:
            return _decoder_input(batch, policy, vae, x.view(1, *shape))

        count = int(torch.Size(shape).numel())
        decoder_input = DecoderInput.found(reach, count, policy.name)
        with patched(RecordedNoise(0.0).patches(policy.pipe)):
            quiet = reach(torch.zeros(count)).flatten().float()
        if not torch.allclose(quiet, reach(torch.zeros(count)).flatten().float()):
            raise UserError(f"given: {policy.name} adds noise before decoding")
        decoded = _decoded(batch, policy, torch.zeros(1, *shape))
        return cls(policy, batch.steps, decoder_input, tuple(decoded.shape[1:]))

    @property
    def video(self) -> bool:
        return len(self.media) == 4

    @torch.no_grad()
    def __call__(self, media: Tensor) -> Float[Tensor, " *d"]:
        """Return the latents of one sample: the mode of the VAE's posterior. One sample per call,
        so that results do not depend on batches or processes. UserError if the VAE cannot
        encode."""
        assert tuple(media.shape) == self.media, (tuple(media.shape), self.media)
        vae: Any = self.policy.pipe.vae
        vae_dtype = next(vae.parameters()).dtype
        wide = vae_dtype == torch.float16 and bool(vae.config.get("force_upcast"))
        dtype = torch.float32 if wide else vae_dtype
        pixels = (2 * media - 1).to(self.policy.device, dtype)
        if len(self.given.shape) == 5:
            pixels = pixels.movedim(0, 1)[None] if self.video else pixels[None, :, None]
        elif not self.video:
            pixels = pixels[None]
        if wide:
            vae.to(dtype)
        try:
            z = _mode(vae.encode(pixels))
        except FAILURES as error:
            raise_memory(error)
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"given: the VAE of {self.policy.name} cannot encode a sample of "
                f"{list(self.media)}: {type(error).__name__}: {reason}"
            ) from error
        finally:
            if wide:
                vae.to(vae_dtype)
            self.policy.frozen.rest()
        if tuple(z.shape) != self.given.shape:
            raise UserError(
                f"given: the VAE of {self.policy.name} encodes to {list(z.shape)}, but its "
                f"decoder takes {list(self.given.shape)}"
            )
        x = self.given.inverse(z.cpu()).view(self.policy.shape(self.steps))
        return x.to(self.policy.device, self.policy.arithmetic)

    def round_trip(self, batch: MediaBatch, media: Tensor, x0: Tensor) -> float:
        """Peak signal-to-noise ratio, in dB, of a decoded sample compared with the given one."""
        again = _decoded(batch, self.policy, x0[None])[0].cpu()
        return float(-10 * (again - media).square().mean().clamp(min=1e-10).log10())


def _mode(output: Any) -> Tensor:
    """The most likely latents of an encoder's output."""
    values = vars(output)
    if "latent_dist" in values:
        return values["latent_dist"].mode()
    for name in ("latents", "latent"):
        if name in values:
            return values[name]
    raise UserError(f"given: latents of type {type(output).__name__} are not supported")


def _decoded(batch: MediaBatch, policy: PipelinePolicy, x: Tensor) -> Tensor:
    row = batch.conditioning.take(torch.zeros(1, dtype=torch.long))
    assert isinstance(row, Conditioning), "a pipeline encodes to these"
    x = x.to(policy.device, policy.arithmetic)
    return policy.decode(x, row, steps=batch.steps, guidance=policy.guidance.sample)


def _decoder_input(batch: MediaBatch, policy: PipelinePolicy, vae: nn.Module, x: Tensor) -> Tensor:
    """Return what `vae.decode` would get for the latents x [1 *d]."""

    def end(latents: Tensor, *_: Any, **__: Any) -> Any:
        raise DecoderReached(latents.detach().cpu())

    try:
        with patched([Patch(vae, "decode", end)]):
            _decoded(batch, policy, x)
    except DecoderReached as reached:
        return reached.latents
    finally:
        policy.frozen.rest()
    raise UserError(f"given: {policy.name} does not decode with vae.decode")
