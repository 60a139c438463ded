"""Make the demo's learned reward from nothing: a CLIPModel for images of shapes.

    python scripts/demo_models/train_demo_clip.py --out my-shapes-clip

Images and captions come from `flowrl.demo.world`, captions of its train split only: neither a
held-out nor a test prompt is seen, not even as a wrong caption. Each image comes with a second
one that differs by one word (or by its two objects in swapped places), so a batch is full of near
misses. The number of steps is fixed. Weights are saved in half precision in transformers' folder
format, and the reward `clip` loads the folder like any other CLIP model.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pretraining import begin, descend, falling, megabytes, muon_and_adam, timed

import torch  # isort: skip
import tyro
from demo_pipeline import WORDS, make_tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

from flowrl.demo import world
from rewards.catalogue.shapes import COLOURS, NUMBER_WORDS, RELATIONS, SHAPES, WantedShapes

MEAN, STD = [0.5] * 3, [0.5] * 3
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
WORD_OF = {number: word for word, number in NUMBER_WORDS.items()}
HIGHEST_SCALE = 50.0  # of the logits; CLIP itself stops at 100


@dataclass(frozen=True)
class Work:
    """Numbers of steps and samples; the defaults make the shipped weights."""

    steps: int = 700
    pairs: int = 64  # a batch has twice as many images and captions
    judged: int = 1_000

    @classmethod
    def quick(cls) -> "Work":
        """A smoke test."""
        return cls(3, 8, 16)


def make_model(tokenizer: PreTrainedTokenizerFast) -> CLIPModel:
    """About 0.3 M parameters: patches of 4 pixels, three layers for images, two for text."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": WORDS,
        "hidden_act": "gelu",
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "image_size": world.SIZE,
        "patch_size": 4,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "hidden_act": "gelu",
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


def caption(wanted: WantedShapes) -> str:
    """The prompt that `rewards.catalogue.shapes.parse_shapes` reads as `wanted`."""
    first = " ".join(wanted.things[0])
    if wanted.relation is not None:
        return f"a {first} {wanted.relation} a {' '.join(wanted.things[1])}"
    count = len(wanted.things)
    return f"a {first}" if count == 1 else f"{WORD_OF[count]} {first}s"


def meaning(wanted: WantedShapes) -> WantedShapes:
    """A key that captions true of the same images share: left of is right of, reversed."""
    if wanted.relation in ("right of", "below"):
        return WantedShapes(wanted.things[::-1], OPPOSITE[wanted.relation])
    return wanted


def near_miss(wanted: WantedShapes, rng: random.Random) -> WantedShapes:
    """A false caption with one change: a train prompt of the world."""
    while True:
        other = changed(wanted, rng)
        if meaning(other) != meaning(wanted) and caption(other) in train_prompts():
            return other


@cache
def train_prompts() -> frozenset[str]:
    return frozenset(world.prompts_of("train"))


def changed(wanted: WantedShapes, rng: random.Random) -> WantedShapes:
    """A random change of colour, shape, relation, order or number; it may be no change at all."""
    place = rng.randrange(len(wanted.things))
    colour, shape = wanted.things[place]
    kinds = ["colour", "shape"]
    kinds += ["number"] if wanted.relation is None else ["relation", "order", "order"]
    match rng.choice(kinds):
        case "colour":
            thing = (rng.choice(list(COLOURS)), shape)
        case "shape":
            thing = (colour, rng.choice(SHAPES))
        case "relation":
            return replace(wanted, relation=rng.choice(RELATIONS))
        case "order":
            return replace(wanted, things=wanted.things[::-1])
        case _:
            return WantedShapes(wanted.things[:1] * rng.randint(1, 3))
    if wanted.relation is None:
        return WantedShapes((thing,) * len(wanted.things))
    things = list(wanted.things)
    things[place] = thing
    return replace(wanted, things=tuple(things))


def weathered(pictures: Tensor) -> Tensor:
    """Images [n 3 h w] with noise and blur of random strength, as a generator's may have."""
    n = len(pictures)
    blurred = functional.avg_pool2d(pictures, 3, 1, 1, count_include_pad=False)
    pictures = torch.lerp(pictures, blurred, torch.rand(n, 1, 1, 1))
    return (pictures + 0.1 * torch.rand(n, 1, 1, 1) * torch.randn_like(pictures)).clamp(0, 1)


def normal(pictures: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (pictures - mean) / std


def contrast(
    model: CLIPModel, tokenizer: PreTrainedTokenizerFast, wanted: Sequence[WantedShapes], x: Tensor
) -> Tensor:
    """CLIP's loss, arXiv:2103.00020, where captions true of the same images are no negatives."""
    text = tokenizer([caption(w) for w in wanted], padding="max_length", return_tensors="pt")
    text.pop("token_type_ids", None)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(pixel_values=normal(weathered(x)), **text)
    image, words = (
        functional.normalize(e.float(), dim=-1) for e in (out.image_embeds, out.text_embeds)
    )
    logits = model.logit_scale.exp().clamp(max=HIGHEST_SCALE) * image @ words.T
    number: dict[WantedShapes, int] = {}
    ids = torch.tensor([number.setdefault(meaning(w), len(number)) for w in wanted])
    also_true = (ids[:, None] == ids).fill_diagonal_(False)
    logits = logits.masked_fill(also_true, -torch.inf)
    target = torch.arange(len(x))
    return functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)


def draw(prompts: Sequence[str], rng: random.Random) -> tuple[list[WantedShapes], Tensor]:
    """Draw prompts, as many near misses, and an image of each."""
    wanted = [world.wanted_shapes(prompt) for prompt in prompts]
    wanted += [near_miss(w, rng) for w in wanted]
    return wanted, world.render([world.arrange(w, rng) for w in wanted])


def train(
    model: CLIPModel, tokenizer: PreTrainedTokenizerFast, work: Work, rng: random.Random
) -> None:
    """Muon for the layers' matrices, AdamW for the rest; the rate falls over the second half."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and ".layers." in name]
    optimizers = muon_and_adam(matrices, named.values(), second=0.98)
    rates = falling(optimizers, lambda share: (1 - share) / 0.5, work.steps, rise=30, least=0.02)
    model.train()
    for _, note in timed("clip", work.steps):
        wanted, pictures = draw(world.draw_prompts(work.pairs, rng), rng)
        loss = contrast(model, tokenizer, wanted, pictures)
        descend(loss, model.parameters(), optimizers, rates)
        note(loss.item())
    model.eval()


def save(model: CLIPModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Weights in float16, loaded as float32; images of any size are resized to 32 x 32."""
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    side = world.SIZE
    processor = CLIPImageProcessor(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_mean=MEAN,
        image_std=STD,
    )
    processor.save_pretrained(out)
    for file in out.glob("*.json"):
        # names that transformers 4 knows too, and weights that load as float32
        text = file.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast")
        text = text.replace("CLIPImageProcessorPil", "CLIPImageProcessor")
        file.write_text(text.replace('"dtype": "float16"', '"dtype": "float32"'))


@torch.no_grad()
def judge(out: Path, work: Work, split: world.Split) -> float:
    """The share of images that score higher than a near miss's image; saved weights."""
    model = CLIPModel.from_pretrained(out)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    rng = random.Random(f"judge {split}")
    wanted, pictures = draw(world.draw_prompts(work.judged, rng, split), rng)
    text = tokenizer(
        [caption(w) for w in wanted[: work.judged]], padding="max_length", return_tensors="pt"
    )
    text.pop("token_type_ids", None)
    rows = pictures.split(250)
    image = torch.cat(
        [model.visual_projection(model.vision_model(normal(part)).pooler_output) for part in rows]
    )
    words = model.text_projection(model.text_model(**text).pooler_output)
    right, wrong = functional.normalize(image, dim=-1).view(2, work.judged, -1)
    return ((right - wrong) * words).sum(-1).gt(0).float().mean().item()


def main(out: Path, seed: int = 0, quick: bool = False, threads: int = 2) -> None:
    """Train the demo's learned reward.

    Args:
        out: Folder of the model.
        seed: Of everything random.
        quick: A few small steps, as a smoke test.
        threads: Processor threads; more than there are idle cores is much slower.
    """
    work = Work.quick() if quick else Work()
    rng, clock = begin(seed, threads)
    tokenizer = make_tokenizer(world.all_prompts())
    model = make_model(tokenizer)
    train(model, tokenizer, work, rng)
    save(model, tokenizer, out)
    print(f"{out}: {megabytes(out):.2f} MB; {clock}")
    for split in ("train", "held_out"):
        print(f"right above near miss, {split} prompts: {judge(out, work, split):.1%}")


if __name__ == "__main__":
    tyro.cli(main)
