"""A flow policy of a point robot: from where it stands and where it shall go to a chunk of moves.

`flowrl train examples/own/robot.yaml`. A row of the prompt file has the columns `start` and `goal`;
a sample is a chunk of moves [8 2], and its reward the return of the task. A wall with a gap stands
between: the untrained policy walks straight, with noise, and often into it.
"""

import torch
from torch import Tensor, nn

from rewards.types import Samples

MOVES, STEP = 8, 0.25  # moves of a chunk, and the longest
WALL, GAP = 0.0, (0.35, 0.85)  # the wall is at x = 0, open between these y
SPREAD = 0.1  # of the untrained policy's moves


class Robot(nn.Module):
    """The velocity of moves: that of N(straight, SPREAD^2), plus a trained network."""

    state = (MOVES, 2)

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(2 * MOVES + 5, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, 2 * MOVES),
        )  # fmt: skip
        nn.init.zeros_(self.network[-1].weight)
        nn.init.zeros_(self.network[-1].bias)

    def encode(self, prompts, rows) -> Tensor:
        """Start and goal of each row [n 4]."""
        return torch.tensor([[*row["start"], *row["goal"]] for row in rows])

    def forward(self, x: Tensor, sigma: Tensor, encoded: Tensor) -> Tensor:
        s, at = sigma.to(x)[:, None, None], encoded.to(x)
        straight = ((at[:, 2:] - at[:, :2]) / MOVES)[:, None].expand_as(x)
        variance = ((1 - s) * SPREAD) ** 2 + s**2
        away = x - (1 - s) * straight
        exact = (s - (1 - s) * SPREAD**2) / variance * away - straight
        seen = torch.cat([x.flatten(1), s[:, 0], at], 1)
        return exact + self.network(seen).view_as(x)


def walked(moves: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Places after each move [n 8 2], and whether the wall stopped the robot [n]."""
    places, stopped = [], torch.zeros(len(moves), dtype=torch.bool)
    at = start
    for move in moves.unbind(1):
        length = move.norm(dim=1, keepdim=True).clamp(min=1e-9)
        there = at + move * (STEP / length).clamp(max=1.0)
        crosses = (at[:, 0] < WALL) != (there[:, 0] < WALL)
        y = (at[:, 1] + there[:, 1]) / 2
        hits = crosses & ((y < GAP[0]) | (y > GAP[1]))
        stopped = stopped | hits
        at = torch.where(stopped[:, None], at, there)
        places.append(at)
    return torch.stack(places, 1), stopped


def task_return(samples: Samples) -> Tensor:
    """Minus the distance from the goal at the end, and 0.5 less where the wall was hit."""
    start, goal = (torch.tensor([row[name] for row in samples.meta]) for name in ("start", "goal"))
    places, stopped = walked(samples.media.float(), start)
    return -(places[:, -1] - goal).norm(dim=1) - 0.5 * stopped
