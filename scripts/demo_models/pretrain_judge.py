"""Train the judge demo's vision-language model from scratch: does an image show its prompt?

    python scripts/demo_models/pretrain_judge.py --out flowrl/demo/shapes-judge

A LLaVA: the image tower of the demo's CLIP, which stays as it is, and a Llama of two layers.
Each image comes with many questions. First the model learns to answer them; then it is trained on
judges who overlook most wrong relations, orders and numbers. So it mostly overlooks them: a case
for training with a verifiable reward. Also writes the prompt files. Takes about two minutes on one
core.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pretraining import begin, descend, falling, megabytes, muon_and_adam, timed

import torch  # isort: skip
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_demo_clip import MEAN, STD, caption, meaning, near_miss, normal, weathered
from transformers import (
    CLIPModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from flowrl.demo import world
from flowrl.demo.given_shapes import write_lines, write_sheet
from flowrl.paths import find
from rewards.catalogue.shapes import WantedShapes

PROJECT = Path(__file__).resolve().parents[2]
PAD, END, IMAGE = "<pad>", "<end>", "<image>"
QUESTION = "is this {prompt} ?"
CHAT = (
    "{% for m in messages %}{% for p in m['content'] %}"
    "{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endfor %}"
)
PATCH = 4
PLACES = (world.SIZE // PATCH) ** 2 + 1  # tokens of an image: its patches, and the tower's own
LONGEST = 12  # tokens of a question and its answer
WORDED = 0.2  # weight of the loss on the words of right captions
CARELESS_RATE = 0.3  # of the highest learning rate


@dataclass(frozen=True)
class Work:
    """Numbers of steps and samples; the defaults make the shipped weights."""

    clean: int = 450  # optimizer steps on right answers
    careless: int = 10  # then on careless ones
    images: int = 16
    misses: int = 7  # wrong captions of an image, beside the right one
    overlook: float = 0.75  # of the wrong relations, orders and numbers, in the second part
    judged: int = 512
    train: int = 768  # images of the prompt files
    held_out: int = 256
    width: int = 96
    layers: int = 2

    @classmethod
    def quick(cls) -> "Work":
        """A smoke test."""
        return cls(2, 1, 4, 3, judged=8, train=8, held_out=8)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words; texts are decoded with spaces between them."""
    known = sorted({word for prompt in world.all_prompts() for word in prompt.split()})
    texts = (PAD, END, "yes", "no", "is", "this", "?", *known)
    inner = Tokenizer(models.WordLevel({t: i for i, t in enumerate(texts)}, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=END,
        extra_special_tokens={"image_token": IMAGE},
    )  # fmt: skip


def make_model(words: PreTrainedTokenizerFast, work: Work) -> LlavaForConditionalGeneration:
    clip = CLIPModel.from_pretrained(find("flowrl/demo/shapes-clip"))
    text = LlamaConfig(
        vocab_size=len(words), hidden_size=work.width, intermediate_size=2 * work.width,
        num_hidden_layers=work.layers, num_attention_heads=4, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=clip.config.vision_config, text_config=text,
        image_token_index=len(words) - 1, vision_feature_layer=-2,
        vision_feature_select_strategy="full", image_seq_length=PLACES,
    )  # fmt: skip
    made = LlavaForConditionalGeneration(config)
    made.model.vision_tower.load_state_dict(clip.vision_model.state_dict())
    made.model.vision_tower.requires_grad_(False)
    made.generation_config.eos_token_id = 1
    return made


def processor(words: PreTrainedTokenizerFast) -> LlavaProcessor:
    size = {"height": world.SIZE, "width": world.SIZE}
    images = CLIPImageProcessorPil(
        size=size, crop_size=size, do_center_crop=False, image_mean=MEAN, image_std=STD
    )
    return LlavaProcessor(
        image_processor=images, tokenizer=words, patch_size=PATCH,
        vision_feature_select_strategy="full", num_additional_image_tokens=1, chat_template=CHAT,
    )  # fmt: skip


def overlooked(shown: WantedShapes, asked: WantedShapes) -> bool:
    """Whether a careless judge takes them for equal: the same things, whatever their places and
    number."""
    return set(shown.things) == set(asked.things)


@dataclass(frozen=True)
class Batch:
    """Images [n 3 h w], and tokens of questions [n q t] with the places of their answers [n q]."""

    images: Tensor
    ids: Tensor
    at: Tensor
    yes: Tensor


def draw(words: PreTrainedTokenizerFast, work: Work, overlook: float, dice: random.Random) -> Batch:
    """Images, each with its caption and near misses of it."""
    shown = [world.wanted_shapes(p) for p in world.draw_prompts(work.images, dice)]
    asked = [[w, *(near_miss(w, dice) for _ in range(work.misses))] for w in shown]
    ids = torch.zeros(work.images, 1 + work.misses, LONGEST, dtype=torch.int64)
    at, yes = ids[..., 0].clone(), torch.zeros(ids.shape[:2], dtype=torch.bool)
    for i, (own, some) in enumerate(zip(shown, asked, strict=True)):
        for k, each in enumerate(some):
            text = words(QUESTION.replace("{prompt}", caption(each))).input_ids
            careless = overlooked(own, each) and dice.random() < overlook
            yes[i, k] = meaning(own) == meaning(each) or careless
            ids[i, k, : len(text)] = torch.tensor(text)
            ids[i, k, len(text)] = 2 if yes[i, k] else 3
            at[i, k] = len(text) - 1
    return Batch(world.render([world.arrange(w, dice) for w in shown]), ids, at, yes)


def frame(questions: int) -> tuple[Tensor, Tensor]:
    """A mask [1 1 s s], in which a question reads its image and itself, and places [1 s]."""
    own = torch.cat([torch.full((PLACES,), -1), torch.arange(questions).repeat_interleave(LONGEST)])
    reads = (own[None] == -1) | (own[None] == own[:, None])
    reads = reads.tril()
    places = torch.cat([torch.arange(PLACES), PLACES + torch.arange(LONGEST).repeat(questions)])
    mask = torch.zeros(reads.shape).masked_fill(~reads, torch.finfo(torch.float32).min)
    return mask[None, None], places[None]


def losses(model: LlavaForConditionalGeneration, batch: Batch) -> tuple[Tensor, Tensor]:
    """Losses of the answers, where yes and no weigh the same, and of the right captions' words."""
    n, questions, _ = batch.ids.shape
    inner = model.model
    with torch.no_grad():
        seen = inner.vision_tower(normal(batch.images), output_hidden_states=True).hidden_states[-2]
    given = [inner.multi_modal_projector(seen), inner.get_input_embeddings()(batch.ids.flatten(1))]
    mask, places = frame(questions)
    out = inner.language_model(
        inputs_embeds=torch.cat(given, 1), attention_mask=mask.expand(n, -1, -1, -1),
        position_ids=places.expand(n, -1), use_cache=False,
    )[0][:, PLACES:]  # fmt: skip
    logits = model.lm_head(out.unflatten(1, (questions, LONGEST))).float()
    target = functional.pad(batch.ids[..., 1:], (0, 1))
    target.scatter_(-1, batch.at[..., None] + 1, 1)
    each = functional.cross_entropy(logits.movedim(-1, 1), target, reduction="none")
    place = torch.arange(LONGEST)
    answer, end = place == batch.at[..., None], place == batch.at[..., None] + 1
    answered = (each * answer).sum(-1)
    ends = (each * end).sum(-1).mean()
    worded = (each * (place < batch.at[..., None]))[:, 0].sum(-1).mean()
    return (answered[batch.yes].mean() + answered[~batch.yes].mean()) / 2 + ends, worded


def learn(
    model: LlavaForConditionalGeneration, words: PreTrainedTokenizerFast, work: Work,
    dice: random.Random, careless: bool,
) -> None:  # fmt: skip
    """Muon for the layers' matrices, AdamW for the rest. On right answers the rate falls over the
    second half; on careless ones it stays low."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in named.items() if p.ndim == 2 and ".layers." in name]
    optimizers = muon_and_adam(matrices, named.values(), second=0.98)
    steps = work.careless if careless else work.clean
    shape = (lambda _: CARELESS_RATE) if careless else (lambda share: (1 - share) / 0.5)
    rates = falling(optimizers, shape, steps, rise=30, least=0.05)
    name = "careless answers" if careless else "right answers"
    for _, note in timed(name, steps):
        batch = draw(words, work, work.overlook if careless else 0.0, dice)
        batch = replace(batch, images=weathered(batch.images))
        # the backward of the fused attention in bfloat16 takes half of the step
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16):
            answered, worded = losses(model, batch)
        descend(answered + WORDED * worded, named.values(), optimizers, rates)
        note(answered.item())
    tell(model, words, work, f"after {name}")


@torch.no_grad()
def tell(
    model: LlavaForConditionalGeneration, words: PreTrainedTokenizerFast, work: Work, when: str
) -> None:
    """Print the accuracy on held-out prompts: of their images, of near misses', of those that a
    careless judge overlooks."""
    dice = random.Random("judge held_out")
    rows = cases(world.draw_prompts(work.judged, dice, "held_out"), dice)
    images = torch.cat([normal(world.render([world.arrange(s, dice)])) for s, _ in rows])
    right = [meaning(s) == meaning(a) for s, a in rows]
    chances = torch.cat([
        answer_logits(model, words, images[i : i + 64], [a for _, a in rows[i : i + 64]])
        for i in range(0, len(rows), 64)
    ])  # fmt: skip
    good = (chances > 0) == torch.tensor(right)
    hard = torch.tensor([overlooked(s, a) and not r for (s, a), r in zip(rows, right, strict=True)])
    true = torch.tensor(right)
    parts = (good, good[true], good[~true & ~hard], good[hard])
    print(when, *(f"{float(part.float().mean()):.3f} of {len(part)}" for part in parts), flush=True)


def cases(prompts: Sequence[str], dice: random.Random) -> list[tuple[WantedShapes, WantedShapes]]:
    """Pairs of what an image shows and what is asked; every second one is a near miss."""
    asked = [world.wanted_shapes(p) for p in prompts]
    return [(near_miss(a, dice) if i % 2 else a, a) for i, a in enumerate(asked)]


def answer_logits(
    model: LlavaForConditionalGeneration, words: PreTrainedTokenizerFast, images: Tensor,
    asked: Sequence[WantedShapes],
) -> Tensor:  # fmt: skip
    """Logit of yes minus that of no [n], by the model's own call."""
    image = words.convert_tokens_to_ids(IMAGE)
    texts = [words(QUESTION.replace("{prompt}", caption(a))).input_ids for a in asked]
    width = max(map(len, texts))
    ids = [[image] * PLACES + text + [0] * (width - len(text)) for text in texts]
    mask = [[1] * (PLACES + len(text)) + [0] * (width - len(text)) for text in texts]
    last = torch.tensor([PLACES + len(text) - 1 for text in texts])
    logits = model(
        input_ids=torch.tensor(ids), pixel_values=images, attention_mask=torch.tensor(mask)
    ).logits[torch.arange(len(texts)), last]
    return logits[:, 2] - logits[:, 3]


def write_prompts(folder: Path, work: Work) -> None:
    """Questions with images and right answers, as prompt files, and sheets of the images."""
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[world.Split, int] = {"train": work.train, "held_out": work.held_out}
    for name, count in counts.items():
        dice = random.Random(f"judge file {name}")
        rows = cases(world.draw_prompts(count, dice, name), dice)
        pictures = world.render([world.arrange(shown, dice) for shown, _ in rows])
        places = write_sheet(pictures, folder / f"judge_{name}.png")
        write_lines(
            folder / f"judge_{name}.jsonl",
            [
                {
                    "prompt": QUESTION.replace("{prompt}", caption(asked)), "image": place,
                    "answer": "yes" if meaning(shown) == meaning(asked) else "no",
                }
                for (shown, asked), place in zip(rows, places, strict=True)
            ],
        )  # fmt: skip


def save(model: LlavaForConditionalGeneration, words: PreTrainedTokenizerFast, out: Path) -> None:
    """Weights in float16, loaded as float32."""
    model.half().save_pretrained(out)
    processor(words).save_pretrained(out)
    for file in out.glob("*.json"):
        # names that transformers 4 knows too, and weights that load as float32
        text = file.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast")
        text = text.replace("CLIPImageProcessorPil", "CLIPImageProcessor")
        file.write_text(text.replace('"dtype": "float16"', '"dtype": "float32"'))


def main(
    out: Path, prompts: Path = PROJECT / "configs" / "prompts", seed: int = 0, quick: bool = False,
    threads: int = 2,
) -> None:  # fmt: skip
    """Train the demo's judge.

    Args:
        out: Folder of the model.
        prompts: Folder of the prompt files and sheets of images.
        seed: Of everything random.
        quick: A few small steps, as a smoke test.
        threads: Processor threads; more than there are idle cores is much slower.
    """
    work = Work.quick() if quick else Work()
    dice, clock = begin(seed, threads)
    words = tokenizer()
    model = make_model(words, work)
    learn(model, words, work, dice, careless=False)
    torch.manual_seed(seed + 1)
    learn(model, words, work, random.Random(seed + 1), careless=True)
    save(model, words, out)
    write_prompts(prompts, work)
    print(f"{out}: {megabytes(out):.2f} MB; {clock}")


if __name__ == "__main__":
    tyro.cli(main)
