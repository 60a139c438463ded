"""Make the video demo's pipeline from nothing: a tiny WanPipeline of moving shapes.

    python scripts/demo_models/pretrain_video.py --out my-moving-wan

Three stages on videos of `flowrl.demo.moving_world`, with prompts of its train split only: an
autoencoder, its decoder alone, then text encoder and flow transformer together. Numbers of steps
are fixed, so the work does not depend on the machine's speed. Weights are saved in half precision
in diffusers' folder format; the autoencoder once it is done, and `--autoencoder` reuses it. The
last stage is saved regularly: a call with the same folder continues it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretraining import Flow, PretrainArguments, Saved, begin, falling, muon_and_adam, report, timed

import torch  # isort: skip
import tyro
from diffusers import AutoencoderKLWan, DiffusionPipeline, WanPipeline
from sheets import framed_sheet
from torch import Tensor, nn
from torch.nn import functional
from video_pipeline import JITTER, WORDS, make_pipeline, save

from flowrl.demo import moving_world
from rewards.catalogue.moving_shapes import grade_motion, watch

CALL = {
    "height": moving_world.SIZE,
    "width": moving_world.SIZE,
    "num_frames": moving_world.VIDEO_FRAMES,
    "guidance_scale": 1.0,
    "max_sequence_length": WORDS,
}
SHARED_JITTER, OWN_JITTER = 0.2, 0.15  # noise of the latents while the decoder is sharpened
NOISY, SPREAD = 0.5, 1.2  # of the times' logits: motion is decided in strong noise


@dataclass(frozen=True)
class Work:
    """Numbers of steps and samples; the defaults make the shipped weights."""

    videos: int = 8_000
    autoencoder_steps: int = 900
    autoencoder_batch: int = 16
    decoder_steps: int = 350
    flow_steps: int = 1_600
    flow_batch: int = 128
    judged: int = 272  # videos of held-out prompts in the report

    @classmethod
    def quick(cls) -> "Work":
        """A smoke test; the videos are noise."""
        return cls(64, 2, 8, 2, 3, 8, 4)


def paint_many(prompts: Sequence[str], rng: random.Random) -> Tensor:
    """Videos [n 3 5 32 32] as bytes, in parts that fit a processor's cache."""
    parts = [
        moving_world.render_videos(prompts[i : i + 50], rng).mul(255).round().byte()
        for i in range(0, len(prompts), 50)
    ]
    return torch.cat(parts).transpose(1, 2).contiguous()


def train_autoencoder(vae: AutoencoderKLWan, videos: Tensor, work: Work) -> None:
    """Reconstruct videos from noisy latents of about unit variance: the flow's errors are noise.

    A weak penalty holds the latents' mean and spread; their final values are written to the
    settings. Weights are left as their half precision.
    """
    vae.train()

    def loss() -> Tensor:
        rows = torch.randint(len(videos), (work.autoencoder_batch,))
        return autoencoder_loss(vae, scaled(videos[rows]))

    fit("autoencoder", list(vae.parameters()), loss, work.autoencoder_steps)
    leave_halved(vae)
    z = encode(vae, videos[:1000])
    vae.register_to_config(
        latents_mean=z.mean((0, 2, 3, 4)).tolist(), latents_std=z.std((0, 2, 3, 4)).tolist()
    )


def sharpen_decoder(vae: AutoencoderKLWan, videos: Tensor, work: Work) -> None:
    """Train the decoder alone, in float32, on latents with errors like those of a flow.

    A flow misses a channel by about as much at all places of a video, which is a wrong colour: the
    decoder learns to decode it as the nearest colour of the world. The latents remain as they are.
    """
    z = encode_raw(vae, videos)
    parts = (vae.post_quant_conv, vae.decoder)
    parameters = [p.requires_grad_(True) for part in parts for p in part.parameters()]

    def loss() -> Tensor:
        rows = torch.randint(len(videos), (work.autoencoder_batch,))
        shared = SHARED_JITTER * torch.randn(len(rows), z.shape[1], 1, 1, 1)
        noisy = z[rows] + shared + OWN_JITTER * torch.randn_like(z[rows])
        y, x = vae.decode(noisy).sample, scaled(videos[rows])
        return 0.5 * functional.mse_loss(y, x) + functional.l1_loss(y, x)

    vae.train()
    fit("decoder", parameters, loss, work.decoder_steps, share=0.5)
    leave_halved(vae)


def fit(
    name: str,
    parameters: Sequence[nn.Parameter],
    loss: Callable[[], Tensor],
    steps: int,
    share: float = 1.0,
) -> None:
    """Take steps of Muon for the kernels and AdamW for the rest, at `share` of the full rates,
    which fall linearly."""
    kernels = [p for p in parameters if p.ndim >= 4]
    matrices = [nn.Parameter(p.detach().flatten(1)) for p in kernels]  # the same memory, for Muon
    rest = [p for p in parameters if p.ndim < 4]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02 * share, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=3e-3 * share, weight_decay=0.0),
    ]
    rates = falling(optimizers, lambda done: 1 - done, steps)
    for _, note in timed(name, steps):
        value = loss()
        for parameter in parameters:
            parameter.grad = None
        value.backward()
        for kernel, matrix in zip(kernels, matrices, strict=True):
            assert kernel.grad is not None
            matrix.grad = kernel.grad.flatten(1)
        nn.utils.clip_grad_norm_(rest, 1.0)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.step()
            rate.step()
        note(value.item())


def leave_halved(vae: AutoencoderKLWan) -> None:
    """End training; weights are rounded to float16, as they are saved."""
    vae.eval().requires_grad_(False)
    for parameter in vae.parameters():
        parameter.copy_(parameter.half())


def autoencoder_loss(vae: AutoencoderKLWan, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        z = vae.encode(x).latent_dist.mode()
        y = vae.decode(z + JITTER * torch.randn_like(z)).sample.float()
    z = z.float()
    spread = z.mean((0, 2, 3, 4)).square().mean() + (z.std((0, 2, 3, 4)) - 1).square().mean()
    return functional.mse_loss(y, x) + 0.3 * functional.l1_loss(y, x) + 0.05 * spread


def scaled(videos: Tensor) -> Tensor:
    """Bytes to -1..1."""
    return videos.float().div(127.5).sub(1)


@torch.no_grad()
def encode(vae: AutoencoderKLWan, videos: Tensor) -> Tensor:
    """Latents [n 8 3 4 4] of videos in bytes, as the pipeline's loop sees them."""
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (encode_raw(vae, videos) - mean) / std


@torch.no_grad()
def encode_raw(vae: AutoencoderKLWan, videos: Tensor) -> Tensor:
    """Latents as the encoder returns them and the decoder takes them."""
    parts = [vae.encode(scaled(part)).latent_dist.mode() for part in videos.split(100)]
    return torch.cat(parts)


def take_autoencoder(vae: AutoencoderKLWan, folder: Path) -> None:
    """Another pipeline's weights, but not the name of its folder, which would be saved."""
    other = AutoencoderKLWan.from_pretrained(folder, subfolder="vae")
    vae.load_state_dict(other.state_dict())
    vae.eval().requires_grad_(False)
    statistics = {name: other.config[name] for name in ("latents_mean", "latents_std")}
    vae.register_to_config(**statistics)


def flow_loss(pipe: WanPipeline, x0: Tensor, prompts: Sequence[str]) -> Tensor:
    """Flow matching, arXiv:2403.03206, with logit-normal times and 10 % empty prompts."""
    shown = ["" if random.random() < 0.1 else prompt for prompt in prompts]
    text, _ = pipe.encode_prompt(
        shown, do_classifier_free_guidance=False, max_sequence_length=WORDS
    )
    sigma = (NOISY + SPREAD * torch.randn(len(x0))).sigmoid()
    noise = torch.randn_like(x0)
    x = torch.lerp(x0, noise, sigma.view(-1, 1, 1, 1, 1))
    velocity = pipe.transformer(
        x, timestep=1000 * sigma, encoder_hidden_states=text, return_dict=False
    )[0]
    return functional.mse_loss(velocity.float(), noise - x0)


def flow_parts(pipe: WanPipeline) -> tuple[nn.Module, ...]:
    return pipe.transformer, pipe.text_encoder


def train_flow(
    pipe: WanPipeline, latents: Tensor, prompts: Sequence[str], work: Work, saved: Saved
) -> None:
    """Train transformer and text encoder; the pipeline ends with their averaged weights."""
    parts = flow_parts(pipe)
    matrices = [p for p in pipe.transformer.blocks.parameters() if p.ndim == 2]
    optimizers = muon_and_adam(matrices, [p for part in parts for p in part.parameters()])

    def loss() -> Tensor:
        rows = torch.randint(len(latents), (work.flow_batch,))
        return flow_loss(pipe, latents[rows], [prompts[row] for row in rows.tolist()])

    Flow(parts, optimizers, work.flow_steps, saved, mixed=False).train(loss)


@torch.no_grad()
def judge(out: Path, picture: Path, work: Work) -> float:
    """Strict accuracy on held-out prompts, 10 steps, no guidance; saves a sheet of samples."""
    pipe = DiffusionPipeline.from_pretrained(out)
    pipe.set_progress_bar_config(disable=True)
    held_out = moving_world.moving_prompts_of("held_out")
    prompts = [held_out[i % len(held_out)] for i in range(work.judged)]
    parts = [
        pipe(
            prompts[i : i + 64],
            num_inference_steps=10,
            generator=torch.Generator().manual_seed(i),
            output_type="pt",
            **CALL,
        ).frames
        for i in range(0, len(prompts), 64)
    ]
    videos = torch.cat(parts)
    right = [
        grade_motion(found, moving_world.wanted_actors(prompt)) == 1
        for found, prompt in zip(watch(videos, 0.80, 0.75), prompts, strict=True)
    ]
    strips = [torch.cat([*video[::2]], -1) for video in videos[:24]]  # every other frame
    framed_sheet(strips, right, columns=2, scale=2).save(picture)
    return sum(right) / len(right)


def main(given: PretrainArguments) -> None:
    work, out = Work.quick() if given.quick else Work(), given.out
    rng, clock = begin(given.seed, given.threads)
    prompts = moving_world.draw_moving_prompts(work.videos, rng)
    videos = paint_many(prompts, rng)
    pipe = make_pipeline()
    if given.autoencoder is None:
        train_autoencoder(pipe.vae, videos, work)
        sharpen_decoder(pipe.vae, videos, work)
        pipe.vae.save_pretrained(out / "vae")
    else:
        take_autoencoder(pipe.vae, given.autoencoder)
    # the flow is the same whether the autoencoder was reused or trained
    torch.manual_seed(given.seed + 1)
    train_flow(pipe, encode(pipe.vae, videos), prompts, work, given.saved(work))
    save(pipe, out)
    report(out, judge(out, given.beside(".png"), work), f"{work.judged} videos", clock)


if __name__ == "__main__":
    main(tyro.cli(PretrainArguments, description=__doc__))
