"""Scores of samples. This package depends on no sampler, policy or training code."""

from rewards.combine import score_all
from rewards.load import check_reward, load
from rewards.types import Judge, Reward, Samples, Scores

__all__ = [
    "Judge",
    "Reward",
    "Samples",
    "Scores",
    "check_reward",
    "load",
    "score_all",
]
