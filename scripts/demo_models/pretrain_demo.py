"""Make the demo's pipeline from nothing: a tiny StableDiffusion3Pipeline of coloured shapes.

    python scripts/demo_models/pretrain_demo.py --out my-shapes-sd3

Two stages on images of `flowrl.demo.world`, with prompts of its train split only: an autoencoder,
then text encoders and a flow transformer together. The numbers of steps are fixed, so the work does
not depend on the machine's speed. Weights are saved in half precision in diffusers' folder format.
The second stage is saved regularly: a call with the same folder continues it.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretraining import Flow, PretrainArguments, Saved, begin, descend, muon_and_adam, report, timed

import torch  # isort: skip
import tyro
from demo_pipeline import make_pipeline, save
from diffusers import AutoencoderTiny, DiffusionPipeline, StableDiffusion3Pipeline
from sheets import framed_sheet
from torch import Tensor, nn
from torch.nn import functional

from flowrl.demo import world
from rewards.catalogue.shapes import detect, is_exact

MOST_PADDING = 256  # zero tokens that SD3's pipeline appends by default when it has no T5


@dataclass(frozen=True)
class Work:
    """Numbers of steps and samples; the defaults make the shipped weights."""

    pictures: int = 40_000
    autoencoder_steps: int = 4_000
    autoencoder_batch: int = 64
    flow_steps: int = 2_200
    flow_batch: int = 128
    judged: int = 520  # images of held-out prompts in the report

    @classmethod
    def quick(cls) -> "Work":
        """A smoke test; the images are noise."""
        return cls(256, 4, 16, 4, 16, 8)


def paint_many(prompts: Sequence[str], rng: random.Random) -> Tensor:
    """Images [n 3 32 32] as bytes, in parts that fit a processor's cache."""
    parts = (world.render_images(prompts[i : i + 250], rng) for i in range(0, len(prompts), 250))
    return torch.cat([part.mul(255).round().byte() for part in parts])


def train_autoencoder(vae: AutoencoderTiny, pictures: Tensor, work: Work) -> None:
    """Reconstruct images from noisy latents of about unit variance (the flow's errors are noise).

    The learning rate falls linearly; latents' mean and spread are held by a weak penalty, so that
    the pipeline's scaling factor is 1.
    """
    vae.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(vae.parameters(), 3e-3, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 50) * (1 - s / work.autoencoder_steps) + 0.003
    )
    for _, note in timed("autoencoder", work.autoencoder_steps):
        rows = torch.randint(len(pictures), (work.autoencoder_batch,))
        x = pictures[rows].float().div(127.5).sub(1).to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            z = vae.encoder(x)
            y = vae.decoder(z + 0.1 * torch.randn_like(z)).float()
        z = z.float()
        spread = z.mean((0, 2, 3)).square().mean() + (z.std((0, 2, 3)) - 1).square().mean()
        loss = functional.mse_loss(y, x) + 0.3 * functional.l1_loss(y, x) + 0.05 * spread
        descend(loss, vae.parameters(), [optimizer], [rate])
        note(loss.item())
    vae.eval().requires_grad_(False)


@torch.no_grad()
def encode(vae: AutoencoderTiny, pictures: Tensor) -> Tensor:
    """Latents [n 4 8 8] of images in bytes."""
    return torch.cat([vae.encoder(p.float().div(127.5).sub(1)) for p in pictures.split(250)])


class BiasedAttention:
    """diffusers' joint attention with a bias on the keys, which its own processor ignores.

    m equal tokens weigh in attention as one of them with log(m) added to its logit. So one zero
    token with a bias stands for the many that SD3's pipeline appends in place of T5's.
    """

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask):
        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        image = [heads(f(hidden_states)) for f in (attn.to_q, attn.to_k, attn.to_v)]
        added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text = [heads(f(encoder_hidden_states)) for f in added]
        q, k, v = (torch.cat(pair, 2) for pair in zip(image, text, strict=True))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask.to(q.dtype))
        out = out.transpose(1, 2).flatten(2)
        tokens = hidden_states.shape[1]
        image_out, text_out = attn.to_out[0](out[:, :tokens]), out[:, tokens:]
        return image_out, text_out if attn.context_pre_only else attn.to_add_out(text_out)


def padding_bias(n: int, tokens: int) -> Tensor:
    """Key bias [n 1 1 tokens]: 0, but log(m) at the last token; m in 0..256, log-uniform in m + 1.

    So the model learns the same distribution for any `max_sequence_length`, the costly default too.
    """
    count = torch.exp(torch.rand(n) * math.log(MOST_PADDING + 1)).floor() - 1
    bias = torch.zeros(n, 1, 1, tokens)
    bias[:, 0, 0, -1] = count.log()
    return bias


def flow_loss(pipe: StableDiffusion3Pipeline, x0: Tensor, prompts: Sequence[str]) -> Tensor:
    """Flow matching, arXiv:2403.03206, with logit-normal times and 10 % empty prompts."""
    shown = ["" if random.random() < 0.1 else prompt for prompt in prompts]
    text, _, pooled, _ = pipe.encode_prompt(
        shown, None, None, do_classifier_free_guidance=False, max_sequence_length=1
    )
    sigma = torch.randn(len(x0)).sigmoid()
    noise = torch.randn_like(x0)
    x = torch.lerp(x0, noise, sigma[:, None, None, None])
    tokens = (x0.shape[-1] // 2) ** 2 + text.shape[1]
    velocity = pipe.transformer(
        x,
        text,
        pooled,
        timestep=1000 * sigma,
        joint_attention_kwargs={"attention_mask": padding_bias(len(x0), tokens)},
        return_dict=False,
    )[0]
    return functional.mse_loss(velocity.float(), noise - x0)


def flow_parts(pipe: StableDiffusion3Pipeline) -> tuple[nn.Module, ...]:
    return pipe.transformer, pipe.text_encoder, pipe.text_encoder_2


def train_flow(
    pipe: StableDiffusion3Pipeline,
    latents: Tensor,
    prompts: Sequence[str],
    work: Work,
    saved: Saved,
) -> None:
    """Train transformer and text encoders; the pipeline ends with their averaged weights."""
    usual = pipe.transformer.attn_processors
    pipe.transformer.set_attn_processor(BiasedAttention())
    blocks = pipe.transformer.transformer_blocks.named_parameters()
    matrices = [p for name, p in blocks if p.ndim == 2 and "norm1" not in name]
    parts = flow_parts(pipe)
    optimizers = muon_and_adam(matrices, [p for part in parts for p in part.parameters()])

    def loss() -> Tensor:
        rows = torch.randint(len(latents), (work.flow_batch,))
        return flow_loss(pipe, latents[rows], [prompts[row] for row in rows.tolist()])

    Flow(parts, optimizers, work.flow_steps, saved, mixed_backward=True).train(loss)
    pipe.transformer.set_attn_processor(usual)


@torch.no_grad()
def judge(out: Path, picture: Path, judged: int, call: Mapping[str, Any], steps: int = 10) -> float:
    """Strict accuracy on held-out prompts, no guidance; saves a sheet of samples.

    `call` has further arguments of the pipeline's call.
    """
    pipe = DiffusionPipeline.from_pretrained(out)
    pipe.set_progress_bar_config(disable=True)
    held_out = world.prompts_of("held_out")
    prompts = [held_out[i % len(held_out)] for i in range(judged)]
    parts = [
        pipe(
            prompts[i : i + 64],
            num_inference_steps=steps,
            guidance_scale=1.0,
            generator=torch.Generator().manual_seed(i),
            output_type="pt",
            **call,
        ).images
        for i in range(0, len(prompts), 64)
    ]
    images = torch.cat(parts)
    right = [
        is_exact(found, world.wanted_shapes(prompt))
        for found, prompt in zip(detect(images), prompts, strict=True)
    ]
    framed_sheet([*images[:64]], right, columns=8, scale=3).save(picture)
    return sum(right) / len(right)


def main(given: PretrainArguments) -> None:
    work, out = Work.quick() if given.quick else Work(), given.out
    rng, clock = begin(given.seed, given.threads)
    prompts = world.draw_prompts(work.pictures, rng)
    pictures = paint_many(prompts, rng)
    pipe = make_pipeline()
    if given.autoencoder is None:
        train_autoencoder(pipe.vae, pictures, work)
    else:
        vae = AutoencoderTiny.from_pretrained(given.autoencoder, subfolder="vae")
        pipe.register_modules(vae=vae)
    train_flow(pipe, encode(pipe.vae, pictures), prompts, work, given.saved(work))
    save(pipe, out)
    accuracy = judge(out, given.beside(".png"), work.judged, {"max_sequence_length": 8})
    report(out, accuracy, f"{work.judged} images", clock)


if __name__ == "__main__":
    main(tyro.cli(PretrainArguments, description=__doc__))
