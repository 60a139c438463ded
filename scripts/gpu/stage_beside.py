"""SD3.5-medium's size: an iteration by turns with a plain loop of exactly its calls.

The plain loop is the floor of any program that makes the same calls: it repeats the recorded calls
of the denoiser, the encoders and the decoder, and the rewards, with nothing between them.
"""

import torch

from flowrl.cli.floor import Floor, Opened
from flowrl.estimate.memory import estimate
from scripts.gpu.full_size import forget, two_precisions
from scripts.gpu.lines import spread
from scripts.gpu.subjects import SD35, opened
from scripts.gpu.trial import GIB, Trial

TURNS = 3
SMALLER = {"recipe": {"group": 4, "steps": 2}, "model": {"height": 256, "width": 256},
           "train": {"updates": 1}}  # fmt: skip


def measure(trial: Trial) -> None:
    with opened(SD35, rehearse=trial.rehearse) as session:
        kept = Opened(session)
        kept.turn()
        floor = Floor.of(kept)
        torch.cuda.reset_peak_memory_stats()
        kept.progress.iteration = 1
        kept.turn()
        peak = torch.cuda.max_memory_allocated() / GIB
        turns = 1 if trial.rehearse else TURNS
        iterations, plain = floor.by_turns(turns)
        ratios = [one / other for one, other in zip(iterations, plain, strict=True)]
        planned = estimate(session.run)
        found = {"iteration": spread(iterations), "plain loop": spread(plain)}
        trial.measured(
            "iteration", seconds=found["iteration"]["median"], GiB=peak, spread=found["iteration"],
            planned_GiB=None if planned is None else planned.total / GIB,
        )  # fmt: skip
        trial.measured(
            "plain loop", seconds=found["plain loop"]["median"], spread=found["plain loop"],
            ratio=spread(ratios)["median"], ratios=spread(ratios),
        )  # fmt: skip
        del floor
    forget()
    two_precisions(trial, SD35, SMALLER)
