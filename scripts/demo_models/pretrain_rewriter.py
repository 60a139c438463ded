"""Train the joint demo's language model from scratch: everyday words into the shapes world's own.

    python scripts/demo_models/pretrain_rewriter.py --out flowrl/demo/everyday-lm

Its writers are careless: they take a fifth of the words, and more than half of the hard ones, for
others. Also writes the prompt files. Takes about a minute on one core.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.demo.everyday import VOCABULARY, everyday, rows, write_everyday
from flowrl.demo.world import prompts_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.demo_models.pretrain_sums import (
    END,
    PAD,
    Pair,
    accuracy,
    command_line,
    encoded,
    learn,
    model,
    save,
)

TEMPLATE = "{prompt} ="


@dataclass(frozen=True)
class Work:
    steps: int = 500
    batch: int = 192
    lr: float = 3e-3
    width: int = 64
    layers: int = 2


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words; texts are decoded with spaces between them."""
    words = {word: i for i, word in enumerate((PAD, END, *VOCABULARY))}
    inner = Tokenizer(models.WordLevel(words, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=END)


def asked(prompt: str) -> str:
    return TEMPLATE.replace("{prompt}", prompt) + " "


def main() -> None:
    given = command_line(__doc__, "everyday-lm")
    work = Work(steps=3, batch=8) if given.quick else Work()
    torch.manual_seed(given.seed)
    words, dice, known = tokenizer(), Random(given.seed), prompts_of("train")
    lm = model(work.width, work.layers, len(words), positions=64)
    print(f"{sum(p.numel() for p in lm.parameters()):,} weights")

    def batch(_: int) -> Pair:
        pairs = [everyday(each, dice) for each in dice.choices(known, k=work.batch)]
        return encoded(words, [(asked(e.prompt), e.careless) for e in pairs])

    rates = [work.lr * min(1.0, i / 30) * (1 - i / work.steps) for i in range(work.steps)]
    learn("rewriter", lm, rates, batch)
    held = [(asked(e.prompt), e.shows) for e in rows("held_out")]
    likely, drawn = accuracy(lm, words, held)
    print(f"held-out {likely:.3f} by the likeliest word, {drawn:.3f} by chance")
    save(lm, words, given.out)
    given.prompts.mkdir(parents=True, exist_ok=True)
    write_everyday(given.prompts)


if __name__ == "__main__":
    main()
