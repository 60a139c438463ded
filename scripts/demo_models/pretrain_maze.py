"""Train the maze demo's language model from scratch, on walkers with a compass and no map.

    python scripts/demo_models/pretrain_maze.py --out flowrl/demo/maze-lm

Half of their moves go towards the goal as if there were no walls, half are random. So the model
knows the form of the game and the goals, but not the walls. Also writes the prompt files. Takes
about half a minute on one core.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from flowrl.demo.maze import CELLS, MOVES, TURNS, compass, move, prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.demo_models.pretrain_sums import (
    END,
    command_line,
    learn,
    model,
    save,
    tokenizer,
    write_lines,
)


@dataclass(frozen=True)
class Work:
    steps: int = 500
    batch: int = 128
    lr: float = 3e-3
    knows: float = 0.5  # of the moves, towards the goal
    width: int = 64
    layers: int = 2


def journey(prompt: str, knows: float, dice: Random) -> tuple[list[str], bool]:
    """The moves of a walker, each with the cell after it, and whether the walker arrives."""
    cell, goal, said = prompt[0], prompt[1], []
    for _ in range(TURNS):
        letter = compass(cell, goal, dice) if dice.random() < knows else dice.choice("nesw")
        cell = move(cell, letter)
        said.append(letter + cell)
        if cell == goal:
            return said, True
    return said, False


def encoded(
    words: PreTrainedTokenizerFast, work: Work, pairs: list[str], dice: Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [n t], padded, and which of them are the walker's: moves, and ends of turns."""
    width = 3 + 3 * TURNS
    ids, own = torch.zeros(work.batch, width, dtype=torch.int64), torch.zeros(work.batch, width)
    for row, prompt in enumerate(dice.choices(pairs, k=work.batch)):
        said, _ = journey(prompt, work.knows, dice)
        text = words(prompt + "".join(move[0] + END + move[1] for move in said)).input_ids
        ids[row, : len(text)] = torch.tensor(text)
        own[row, 3 : len(text)] = torch.tensor([1.0, 1.0, 0.0] * len(said))
    return ids, own.bool()


def train(work: Work, lm: LlamaForCausalLM, words: PreTrainedTokenizerFast, seed: int) -> None:
    dice, pairs = Random(seed), prompts("train")

    def rate(step: int) -> float:
        return work.lr * min(1.0, step / 50) * max(0.02, (1 - step / work.steps) ** 0.5)

    rates = [rate(step) for step in range(work.steps)]
    learn("maze", lm, rates, lambda _: encoded(words, work, pairs, dice))


def main() -> None:
    given = command_line(__doc__, "maze-lm")
    work = Work(steps=3, batch=8) if given.quick else Work()
    torch.manual_seed(given.seed)
    words = tokenizer(CELLS + "".join(MOVES) + ":")
    lm = model(work.width, work.layers, len(words), positions=64)
    print(f"{sum(p.numel() for p in lm.parameters()):,} weights")
    train(work, lm, words, given.seed)
    save(lm, words, given.out)
    given.prompts.mkdir(parents=True, exist_ok=True)
    for split in ("train", "held_out"):
        rows = [{"prompt": prompt} for prompt in prompts(split)]
        write_lines(rows, given.prompts / f"maze_{split}.jsonl")


if __name__ == "__main__":
    main()
