"""FLUX.1-dev's size: an iteration of the published Flow-GRPO run with one prompt."""

from scripts.gpu.full_size import two_precisions, whole_iteration
from scripts.gpu.subjects import FLUX
from scripts.gpu.trial import Trial

SMALLER = {"recipe": {"group": 2, "steps": 2}, "model": {"height": 256, "width": 256},
           "train": {"rows_per_call": 1, "updates": 1}}  # fmt: skip


def measure(trial: Trial) -> None:
    whole_iteration(trial, FLUX)
    two_precisions(trial, FLUX, SMALLER)
