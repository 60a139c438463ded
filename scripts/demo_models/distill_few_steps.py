"""Distil the image demo's model to four steps: a tiny student whose sampler draws fresh noise.

    python scripts/demo_models/distill_few_steps.py --out my-shapes-few

At each of four noise levels the student learns to predict, in one evaluation, the clean sample that
the teacher's Euler steps reach from the same state (multistep consistency models, arXiv:2403.06807;
the states are noised images, the targets are the teacher's own). Its scheduler puts fresh noise on
every prediction. Text encoders and autoencoder are the teacher's. Training is saved regularly: a
call with the same folder continues it.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pretraining import Flow, PretrainArguments, Saved, begin, report

import torch  # isort: skip
import tyro
from demo_pipeline import save
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from pretrain_demo import encode, judge, paint_many
from torch import Tensor
from torch.nn import functional

from flowrl.demo import world
from flowrl.paths import find

LEVELS = (1.0, 0.75, 0.5, 0.25)  # of the student
TEACHER_STEPS = 12  # from pure noise; from a level s that share of them


@dataclass(frozen=True)
class Work:
    """Numbers of steps and samples; the defaults make the shipped weights."""

    pictures: int = 6_000
    steps: int = 400
    batch: int = 32
    judged: int = 520  # images of held-out prompts in the report

    @classmethod
    def quick(cls) -> "Work":
        """A smoke test; the images are noise."""
        return cls(64, 3, 8, 4)


def predicted(
    model: SD3Transformer2DModel, x: Tensor, sigma: float, text: Sequence[Tensor]
) -> Tensor:
    """The velocity [n 4 8 8] at one level."""
    times = torch.full((len(x),), 1000 * sigma)
    return model(x, *text, timestep=times, return_dict=False)[0]


@torch.no_grad()
def reached(
    teacher: SD3Transformer2DModel, x: Tensor, sigma: float, text: Sequence[Tensor]
) -> Tensor:
    """The clean samples [n 4 8 8] that Euler steps of the teacher reach from a level."""
    count = round(TEACHER_STEPS * sigma)
    for at, to in pairwise(sigma * (1 - k / count) for k in range(count + 1)):
        x = x - (at - to) * predicted(teacher, x, at, text)
    return x


def distil(
    pipe: StableDiffusion3Pipeline,
    latents: Tensor,
    prompts: Sequence[str],
    work: Work,
    saved: Saved,
) -> None:
    """Train the transformer, which begins at the teacher's; the pipeline ends with its average."""
    student = pipe.transformer
    teacher = copy.deepcopy(student).requires_grad_(False).eval()

    def loss() -> Tensor:
        rows = torch.randint(len(latents), (work.batch,))
        with torch.no_grad():
            text, _, pooled, _ = pipe.encode_prompt(
                [prompts[row] for row in rows.tolist()], None, None,
                do_classifier_free_guidance=False, max_sequence_length=1,
            )  # fmt: skip
        sigma = LEVELS[int(torch.randint(len(LEVELS), ()))]
        x = torch.lerp(latents[rows], torch.randn_like(latents[rows]), sigma)
        clean = reached(teacher, x, sigma, (text, pooled))
        found = x - sigma * predicted(student, x, sigma, (text, pooled))
        return functional.mse_loss(found, clean) / sigma

    optimizer = torch.optim.AdamW(student.parameters(), 5e-4, betas=(0.9, 0.95), weight_decay=0.0)
    Flow((student,), [optimizer], work.steps, saved, mixed=False).train(loss)


def main(given: PretrainArguments) -> None:
    work, out = Work.quick() if given.quick else Work(), given.out
    rng, clock = begin(given.seed, given.threads)
    pipe = DiffusionPipeline.from_pretrained(
        given.autoencoder or find("flowrl/demo/shapes-sd3"), dtype=torch.float32
    )
    assert isinstance(pipe, StableDiffusion3Pipeline)
    pipe.set_progress_bar_config(disable=True)
    prompts = world.draw_prompts(work.pictures, rng)
    latents = encode(pipe.vae, paint_many(prompts, rng))
    distil(pipe, latents, prompts, work, given.saved(work))
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    save(pipe, out)
    call = {"max_sequence_length": 1, "sigmas": [*LEVELS]}
    accuracy = judge(out, given.beside(".png"), work.judged, call, steps=len(LEVELS))
    report(out, accuracy, f"{work.judged} images", clock)


if __name__ == "__main__":
    main(tyro.cli(PretrainArguments, description=__doc__))
