"""The world of the multi-turn demo: find the way through a maze, one move per turn.

The maze has 25 cells, A to Y in rows of five from the north-west, and walls. A prompt such as `CH:`
names the start and the goal. A turn is a move, n, e, s or w, which a wall stops; the reply is the
cell after it. `flowrl/demo/maze.py:reply` is the environment, `nearer` the same with a reward for
each turn, `reached` a reward for the outcome.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import permutations
from random import Random
from typing import Any, Literal

import torch

from rewards import Samples
from samplers.noise import key_hash

MAZE_SIZE = 5
CELLS = "ABCDEFGHIJKLMNOPQRSTUVWXY"
MOVES = {"n": -MAZE_SIZE, "e": 1, "s": MAZE_SIZE, "w": -1}
WALLS = {"BG", "CH", "DI", "LQ", "MR", "NS"}  # between cells of a row and of the next one
TURNS = 12
MazeSplit = Literal["train", "held_out"]


def move(cell: str, move: str) -> str:
    """The cell after a move; the same cell if there is a wall."""
    at, to = CELLS.index(cell), CELLS.index(cell) + MOVES[move]
    inside = to // MAZE_SIZE == at // MAZE_SIZE if move in "ew" else 0 <= to < len(CELLS)
    if not inside or "".join(sorted(cell + CELLS[to])) in WALLS:
        return cell
    return CELLS[to]


def walk(start: str, text: str) -> str:
    """The last cell of a walk. Letters that are not moves are ignored."""
    cell = start
    for letter in text:
        cell = move(cell, letter) if letter in MOVES else cell
    return cell


def reply(prompt: str, _meta: Mapping[str, Any], turns: Sequence[str]) -> dict[str, str] | None:
    """Reply to the last turn, with its state: the cell, or the prompt at the start."""
    start, goal = prompt[:2]
    cell = walk(start, "".join(turns))
    if cell == goal:
        return None
    return {"reply": cell, "state": prompt if cell == start else cell}


def nearer(prompt: str, meta: Mapping[str, Any], turns: Sequence[str]) -> dict[str, Any]:
    """The reply, with a reward for the turn: 0.1 if it came nearer to the goal, -0.1 if farther."""
    last = walk(prompt[0], "".join(turns))
    before = walk(prompt[0], "".join(turns[:-1]))
    gain = distances(prompt[1])[before] - distances(prompt[1])[last]
    answer = reply(prompt, meta, turns) or {"reply": None}
    return {**answer, "reward": gain / 10}


@cache
def distances(goal: str) -> dict[str, int]:
    """Moves from each cell to the goal on the shortest way."""
    steps, edge = {goal: 0}, [goal]
    for cell in edge:
        for neighbour in CELLS:
            if neighbour not in steps and cell in {
                move(neighbour, direction) for direction in MOVES
            }:
                steps[neighbour] = steps[cell] + 1
                edge.append(neighbour)
    return steps


def reached(samples: Samples) -> list[float]:
    """1 for transcripts that end at the goal."""
    pairs = zip(samples.prompts, samples.media, strict=True)
    return [float(walk(prompt[0], text) == prompt[1]) for prompt, text in pairs]


def examples() -> Samples:
    """Two transcripts, the better one first."""
    return Samples(["sFs", "sFe"], ["AK:"] * 2, torch.zeros(2, dtype=torch.long))


def compass(cell: str, goal: str, dice: Random) -> str:
    """A move towards the goal that ignores walls."""
    (y, x), (v, u) = (divmod(CELLS.index(place), MAZE_SIZE) for place in (cell, goal))
    return dice.choice("s" * (v > y) + "n" * (v < y) + "e" * (u > x) + "w" * (u < x))


def prompts(split: MazeSplit) -> list[str]:
    """All pairs of cells in a fixed random order; one in eight is held out."""
    pairs = ["".join(pair) + ":" for pair in permutations(CELLS, 2)]
    pairs = [p for p in pairs if (key_hash("maze", p) % 8 == 0) == (split == "held_out")]
    Random(0).shuffle(pairs)
    return pairs
