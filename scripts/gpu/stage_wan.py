"""Wan 2.1 14B's size: an iteration of three steps, with two samples."""

from scripts.gpu.full_size import two_precisions, whole_iteration
from scripts.gpu.subjects import WAN
from scripts.gpu.trial import Trial

SMALLER = {"model": {"height": 128, "width": 208, "call": {"num_frames": 5}},
           "train": {"updates": 1}}  # fmt: skip


def measure(trial: Trial) -> None:
    whole_iteration(trial, WAN, repeats=1)  # a call takes seconds
    two_precisions(trial, WAN, SMALLER)
