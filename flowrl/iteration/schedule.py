"""The learning rate of an iteration."""

import math

from flowrl.settings import RunSettings


def learning_rate(run: RunSettings, iteration: int) -> float:
    """Learning rate as a pure function of the iteration, so that no state is saved."""
    t = run.train
    warm = min(1.0, (iteration + 1) / (t.schedule.warmup + 1))
    share = iteration / t.iterations
    decay = {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share))}
    return t.lr * warm * decay[t.schedule.name]
