"""Make the editing demo's pipeline from nothing: a tiny FluxKontextPipeline of coloured shapes.

    python scripts/demo_models/pretrain_edit.py --out my-edits-kontext

On pairs of `flowrl.demo.edit_world`, with instructions of its train split only: text encoders
first, alone, then they and the flow transformer, on latents of the image demo's autoencoder. One
instruction in six is another one for the same source, so that the base makes wrong edits and RL has
something to learn. The numbers of steps are fixed, so the work does not depend on the machine's
speed. Weights are saved in half precision in diffusers' folder format. Training is saved regularly:
a call with the same folder continues it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pretraining import Flow, PretrainArguments, Saved, begin, descend, muon_and_adam, report, timed

import torch  # isort: skip
import tyro
from demo_pipeline import save_halved
from diffusers import DiffusionPipeline, FluxKontextPipeline
from edit_pipeline import TEXT_WIDTH, WORDS, make_pipeline
from sheets import framed_sheet
from torch import Tensor, nn
from torch.nn import functional

from flowrl.demo import edit_world
from flowrl.demo.edit_world import EditPair
from flowrl.demo.world import SIZE, render
from flowrl.media.pictures import to_image
from flowrl.paths import find
from rewards.catalogue.edit_shapes import grade_edit
from rewards.catalogue.shapes import detect

CALL = {
    "height": SIZE,
    "width": SIZE,
    "max_area": SIZE * SIZE,
    "_auto_resize": False,
    "max_sequence_length": WORDS,
}
MISTOLD = 1 / 6
TIMES_MEAN, TIMES_SPREAD = 1.0, 1.2  # of the times' logits


@dataclass(frozen=True)
class Work:
    """Numbers of steps and samples; the defaults make the shipped weights."""

    pairs: int = 16_000
    text_steps: int = 200
    flow_steps: int = 1_600
    flow_batch: int = 128
    judged: int = 432  # edits of held-out instructions in the report

    @classmethod
    def quick(cls) -> "Work":
        """A smoke test; the images are noise."""
        return cls(64, 2, 3, 8, 4)


class EditData(NamedTuple):
    """Packed latents [n 16 16] of sources and targets, and what is asked of each source."""

    source: Tensor
    target: Tensor
    instructions: list[str]
    others: list[str]


@torch.no_grad()
def make_data(pipe: FluxKontextPipeline, pairs: Sequence[EditPair]) -> EditData:
    def latents(scenes: Sequence) -> Tensor:
        parts = [scenes[i : i + 250] for i in range(0, len(scenes), 250)]
        encoded = [pipe.vae.encode(render(part).mul(2).sub(1)).latents for part in parts]
        return torch.cat([pack(pipe, part) for part in encoded])

    return EditData(
        latents([pair.source for pair in pairs]),
        latents([pair.target for pair in pairs]),
        [pair.instruction for pair in pairs],
        [pair.other for pair in pairs],
    )


def pack(pipe: FluxKontextPipeline, latents: Tensor) -> Tensor:
    """Latents [n 4 8 8] as tokens [n 16 16] of 2 x 2 places."""
    return pipe._pack_latents(latents, *latents.shape)


def token_ids(pipe: FluxKontextPipeline) -> Tensor:
    """Places of the tokens of the sample and of its source [32 3], as the pipeline's own."""
    side = SIZE // pipe.vae_scale_factor // 2
    own = pipe._prepare_latent_image_ids(1, side, side, "cpu", torch.float32)
    of_source = own.clone()
    of_source[..., 0] = 1
    return torch.cat([own, of_source])


def flow_loss(pipe: FluxKontextPipeline, data: EditData, rows: Sequence[int]) -> Tensor:
    """Flow matching, arXiv:2403.03206, times near noise, where edits are decided.

    A share of MISTOLD of the rows has another instruction for its source: captions are wrong at
    times, and the demo corrects the result.
    """
    instructed = [
        (data.others if random.random() < MISTOLD else data.instructions)[row] for row in rows
    ]
    text, pooled, text_ids = pipe.encode_prompt(instructed, None, max_sequence_length=WORDS)
    x0, source = data.target[rows], data.source[rows]
    sigma = (TIMES_MEAN + TIMES_SPREAD * torch.randn(len(x0))).sigmoid()
    noise = torch.randn_like(x0)
    x = torch.lerp(x0, noise, sigma[:, None, None])
    velocity = pipe.transformer(
        hidden_states=torch.cat([x, source], 1),
        timestep=sigma,
        pooled_projections=pooled,
        encoder_hidden_states=text,
        txt_ids=text_ids,
        img_ids=token_ids(pipe),
        return_dict=False,
    )[0][:, : x.shape[1]]
    return functional.mse_loss(velocity.float(), noise - x0)


def train_text(pipe: FluxKontextPipeline, work: Work) -> None:
    """Text encoders alone: kind, colour, shape and result of an edit can be read off linearly, from
    the pooled text as from the mean of the words. The flow learns what they mean.
    """
    instructions = edit_world.instructions_of("train")
    edits = [edit_world.wanted_edit(text) for text in instructions]
    instructed = [[e.kind, e.colour, e.shape, str(e.to)] for e in edits]
    classes = [sorted(set(column)) for column in zip(*instructed, strict=True)]
    wanted = torch.tensor(
        [[names.index(v) for names, v in zip(classes, row, strict=True)] for row in instructed]
    )
    sizes = [len(names) for names in classes]
    heads = nn.ModuleList(nn.Linear(TEXT_WIDTH, sum(sizes)) for _ in range(2))
    encoders = (pipe.text_encoder, pipe.text_encoder_2)
    weights = [p for part in (*encoders, heads) for p in part.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.0)
    for _, note in timed("text", work.text_steps):
        text, pooled, _ = pipe.encode_prompt(instructions, None, max_sequence_length=WORDS)
        read = (heads[0](pooled), heads[1](text.mean(1)))
        parts = [pair for each in read for pair in zip(each.split(sizes, 1), wanted.T, strict=True)]
        loss = torch.stack([functional.cross_entropy(*pair) for pair in parts]).mean()
        descend(loss, weights, [optimizer], [])
        note(loss.item())


def flow_parts(pipe: FluxKontextPipeline) -> tuple[nn.Module, ...]:
    return pipe.transformer, pipe.text_encoder, pipe.text_encoder_2


def train_flow(pipe: FluxKontextPipeline, data: EditData, work: Work, saved: Saved) -> None:
    """Train transformer and text encoders; the pipeline ends with their averaged weights."""
    parts, transformer = flow_parts(pipe), pipe.transformer
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    named = [named for block in blocks for named in block.named_parameters()]
    matrices = [p for name, p in named if p.ndim == 2 and not name.startswith("norm")]
    optimizers = muon_and_adam(matrices, [p for part in parts for p in part.parameters()])

    def loss() -> Tensor:
        rows = torch.randint(len(data.source), (work.flow_batch,))
        return flow_loss(pipe, data, rows.tolist())

    Flow(parts, optimizers, work.flow_steps, saved).train(loss)


@torch.no_grad()
def judge(out: Path, picture: Path, work: Work) -> float:
    """Strict accuracy on held-out instructions, 10 steps; saves a sheet of sources and samples."""
    pipe = DiffusionPipeline.from_pretrained(out)
    pipe.set_progress_bar_config(disable=True)
    rng, held_out = random.Random("judged"), edit_world.instructions_of("held_out")
    asked = [held_out[i % len(held_out)] for i in range(work.judged)]
    sources = render([edit_world.draw_pair(text, rng).source for text in asked])
    parts = [
        pipe(
            image=[to_image(image) for image in sources[i : i + 64]],
            prompt=asked[i : i + 64],
            num_inference_steps=10,
            generator=torch.Generator().manual_seed(i),
            output_type="pt",
            **CALL,
        ).images
        for i in range(0, len(asked), 64)
    ]
    results = torch.cat(parts)
    found = zip(detect(sources), detect(results), asked, strict=True)
    right = [grade_edit(a, b, edit_world.wanted_edit(text)) == 1 for a, b, text in found]
    pairs = [*torch.cat([sources, results], -1)[:40]]
    framed_sheet(pairs, right, columns=5, scale=3).save(picture)
    return sum(right) / len(right)


def main(given: PretrainArguments) -> None:
    work, out = Work.quick() if given.quick else Work(), given.out
    rng, clock = begin(given.seed, given.threads)
    pipe = make_pipeline(given.autoencoder or find("flowrl/demo/shapes-sd3"))
    data = make_data(pipe, list(edit_world.draw_pairs(work.pairs, rng)))
    saved = given.saved(work)
    if not saved.path.is_file():
        train_text(pipe, work)
    train_flow(pipe, data, work, saved)
    save_halved(pipe, out)
    report(out, judge(out, given.beside(".png"), work), f"{work.judged} edits", clock)


if __name__ == "__main__":
    main(tyro.cli(PretrainArguments, description=__doc__))
