"""Score samples. Knows nothing of samplers, policies or training."""

from rewards.combine import WinRate, score_all
from rewards.load import check_reward, load, load_judge
from rewards.types import Judge, Reward, Samples, Scores

__all__ = [
    "Judge",
    "Reward",
    "Samples",
    "Scores",
    "WinRate",
    "check_reward",
    "load",
    "load_judge",
    "score_all",
]
