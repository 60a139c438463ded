"""Make the noise-prediction demo's pipeline from nothing: a tiny StableDiffusionPipeline.

    python scripts/demo_models/pretrain_noise.py --out my-shapes-sd15

One stage on images of `flowrl.demo.world`, with prompts of its train split only: text encoder and
U-Net together, on latents of the image demo's autoencoder, with SD1.5's noise levels. Its loss is
weighted: in the plain error of the noise, high levels hardly count, and there objects and places
are decided. The numbers of steps are fixed, so the work does not depend on the machine's speed.
Weights are saved in half precision in diffusers' folder format. Training is saved regularly: a call
with the same folder continues it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pretraining import Flow, PretrainArguments, Saved, begin, muon_and_adam, report

import torch  # isort: skip
import tyro
from demo_pipeline import save_halved
from diffusers import StableDiffusionPipeline
from noise_pipeline import make_pipeline
from pretrain_demo import encode, judge, paint_many
from torch import Tensor, nn

from flowrl.demo import world
from flowrl.paths import find
from samplers.adapt import level

EMPTY = 0.1  # share of the rows without a prompt, which guidance needs
MOST = 50.0  # largest weight of a row


@dataclass(frozen=True)
class Work:
    """Numbers of steps and samples; the defaults make the shipped weights."""

    pictures: int = 40_000
    steps: int = 2_000
    batch: int = 64
    judged: int = 520  # images of held-out prompts in the report

    @classmethod
    def quick(cls) -> "Work":
        """A smoke test; the images are noise."""
        return cls(64, 3, 8, 4)


def noise_loss(pipe: StableDiffusionPipeline, x0: Tensor, prompts: Sequence[str]) -> Tensor:
    """Error of the predicted noise at uniform timesteps, arXiv:2006.11239, with a share of EMPTY
    empty prompts. A weight of 1 / (1 - sigma)^2, at most MOST, makes it the error of the flow's
    velocity.
    """
    shown = ["" if random.random() < EMPTY else prompt for prompt in prompts]
    text, _ = pipe.encode_prompt(shown, x0.device, 1, False)
    timestep = torch.randint(pipe.scheduler.config.num_train_timesteps, (len(x0),))
    noise = torch.randn_like(x0)
    x = pipe.scheduler.add_noise(x0, noise, timestep)
    predicted = pipe.unet(x, timestep, encoder_hidden_states=text, return_dict=False)[0]
    weight = (1 - level(pipe.scheduler.alphas_cumprod[timestep])).pow(-2).clamp(max=MOST)
    return (weight * (predicted - noise).square().mean((1, 2, 3))).mean()


def noise_parts(pipe: StableDiffusionPipeline) -> tuple[nn.Module, ...]:
    return pipe.unet, pipe.text_encoder


def train_noise(
    pipe: StableDiffusionPipeline, latents: Tensor, prompts: Sequence[str], work: Work, saved: Saved
) -> None:
    """Train U-Net and text encoder; the pipeline ends with their averaged weights."""
    parts = noise_parts(pipe)
    matrices = [p for name, p in pipe.unet.named_parameters() if ".attentions." in name]
    matrices = [p for p in matrices if p.ndim == 2]
    optimizers = muon_and_adam(matrices, [p for part in parts for p in part.parameters()])

    def loss() -> Tensor:
        rows = torch.randint(len(latents), (work.batch,))
        return noise_loss(pipe, latents[rows], [prompts[row] for row in rows.tolist()])

    Flow(parts, optimizers, work.steps, saved, mixed=False).train(loss)


def main(given: PretrainArguments) -> None:
    work, out = Work.quick() if given.quick else Work(), given.out
    rng, clock = begin(given.seed, given.threads)
    pipe = make_pipeline(given.autoencoder or find("flowrl/demo/shapes-sd3"))
    prompts = world.draw_prompts(work.pictures, rng)
    latents = encode(pipe.vae, paint_many(prompts, rng))
    train_noise(pipe, latents, prompts, work, given.saved(work))
    save_halved(pipe, out)
    accuracy = judge(out, given.beside(".png"), work.judged, {})
    report(out, accuracy, f"{work.judged} images", clock)


if __name__ == "__main__":
    main(tyro.cli(PretrainArguments, description=__doc__))
