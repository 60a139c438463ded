"""Train the text demo's language model from scratch: sums, by a writer who forgets the carry.

    python scripts/demo_models/pretrain_sums.py --out flowrl/demo/sums-lm

First it learns to add; then it is trained on writers who forget most carries. So it can add, and
mostly does not: a case for training with a verifiable reward. Also writes
the prompt files. Takes about three minutes on one core.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flowrl.demo.sums import CHARACTERS, Addition, problems, questions

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))
from scripts.demo_models.pretraining import descend, timed  # noqa: E402

PAD, END = "<pad>", "<end>"
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Work:
    clean: int = 700  # optimizer steps on right answers
    careless: int = 150  # then on careless ones
    batch: int = 256
    lr: float = 3e-3
    forget: float = 0.75  # of the carries, in the second part
    width: int = 96
    layers: int = 3


def tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """A tokenizer of characters; texts are decoded without spaces between them."""
    words = {word: i for i, word in enumerate((PAD, END, *characters))}
    inner = Tokenizer(models.WordLevel(words, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=END)


def model(width: int, layers: int, vocabulary: int, positions: int = 32) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def encoded(words: PreTrainedTokenizerFast, rows: list[tuple[str, str]]) -> Pair:
    """Tokens [n t] padded on the right, and where the answers are, which the loss is taken on."""
    texts = [[*words(prompt + answer).input_ids, 1] for prompt, answer in rows]
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    place = torch.arange(width)
    starts = torch.tensor([len(words(prompt).input_ids) for prompt, _ in rows])[:, None]
    ends = torch.tensor([len(text) for text in texts])[:, None]
    return ids, (place >= starts) & (place < ends)


def rows(sums: list[Addition], forget: float, dice: Random) -> list[tuple[str, str]]:
    return [(s.prompt, s.careless if dice.random() < forget else s.answer) for s in sums]


def asked(sums: list[Addition]) -> list[tuple[str, str]]:
    return [(s.prompt, s.answer) for s in sums]


def learn(
    name: str, lm: LlamaForCausalLM, rates: Sequence[float], batch: Callable[[int], Pair]
) -> None:
    """Take a step at each of the rates, on a batch's tokens [n t] where the second [n t] says."""
    # a rate is the whole factor of 1, so that no product of two numbers rounds it
    optimizers = [torch.optim.AdamW(lm.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.05)]
    falling = LambdaLR(optimizers[0], lambda step: rates[min(step, len(rates) - 1)])
    for step, note in timed(name, len(rates)):
        ids, own = batch(step)
        logits = lm(input_ids=ids[:, :-1]).logits
        loss = F.cross_entropy(logits[own[:, 1:]], ids[:, 1:][own[:, 1:]])
        descend(loss, lm.parameters(), optimizers, [falling])
        note(loss.item())


def command_line(description: str, folder: str) -> argparse.Namespace:
    """The options of a script that trains a language model of the demos from nothing."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=PROJECT / "flowrl" / "demo" / folder)
    parser.add_argument("--prompts", type=Path, default=PROJECT / "configs" / "prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps, for tests")
    return parser.parse_args()


def train(work: Work, lm: LlamaForCausalLM, words: PreTrainedTokenizerFast, seed: int) -> None:
    dice, sums, total = Random(seed), problems("train"), work.clean + work.careless

    def rate(step: int) -> float:
        share = step / work.clean if step < work.clean else 0.85
        return work.lr * min(1.0, step / 50) * max(0.02, (1 - share) ** 0.5)

    def batch(step: int) -> Pair:
        forget = 0.0 if step < work.clean else work.forget
        return encoded(words, rows(dice.choices(sums, k=work.batch), forget, dice))

    learn("sums", lm, [rate(step) for step in range(total)], batch)
    likely, drawn = accuracy(lm, words, asked(problems("held_out")))
    print(f"held-out {likely:.3f} by the likeliest token, {drawn:.3f} by chance")


@torch.no_grad()
def accuracy(
    lm: LlamaForCausalLM, words: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]
) -> tuple[float, float]:
    """Share of right answers by the likeliest token, and the probability of the right answer."""
    ids, asked = encoded(words, pairs)
    logp = lm(input_ids=ids[:, :-1]).logits.log_softmax(-1)
    target, asked = ids[:, 1:], asked[:, 1:]
    best = ((logp.argmax(-1) == target) | ~asked).all(1)
    own = logp.gather(-1, target[..., None])[..., 0]
    return float(best.float().mean()), float((own * asked).sum(1).exp().mean())


def save(lm: LlamaForCausalLM, words: PreTrainedTokenizerFast, out: Path) -> None:
    """Save in half precision, with which all figures are measured."""
    lm.half().save_pretrained(out)
    words.save_pretrained(out)


def write_prompts(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 2000), ("held_out", 400), ("test", 400)):
        chosen = problems(split)[:count]  # type: ignore[arg-type]
        rows = [{"prompt": s.prompt, "answer": s.answer} for s in chosen]
        write_lines(rows, folder / f"sums_{split}.jsonl")
    for split in ("train", "held_out"):
        rows = [{"prompt": s.question, "answer": s.answer} for s in questions(split)]
        write_lines(rows, folder / f"questions_{split}.jsonl")


def write_lines(rows: list[dict[str, str]], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    given = command_line(__doc__, "sums-lm")
    work = Work(clean=3, careless=2, batch=8) if given.quick else Work()
    torch.manual_seed(given.seed)
    words = tokenizer()
    lm = model(work.width, work.layers, len(words))
    print(f"{sum(p.numel() for p in lm.parameters()):,} weights")
    train(work, lm, words, given.seed)
    save(lm, words, given.out)
    write_prompts(given.prompts)


if __name__ == "__main__":
    main()
