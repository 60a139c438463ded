"""The Python API: everything that `from flowrl import ...` offers. docs/api.md has examples."""

from flowrl.api.sampling import SampledPlan, SteeredSamples, sample, steer
from flowrl.api.scoring import RewardEvaluation, evaluate_rewards, serve_reward
from flowrl.api.trained import Best, TrainedRun
from flowrl.api.training import recipe, train
from flowrl.errors import Stopped, UserError
from flowrl.run.live import Callback, Event

__all__ = [
    "Best",
    "Callback",
    "Event",
    "RewardEvaluation",
    "SampledPlan",
    "SteeredSamples",
    "Stopped",
    "TrainedRun",
    "UserError",
    "evaluate_rewards",
    "recipe",
    "sample",
    "serve_reward",
    "steer",
    "train",
]
