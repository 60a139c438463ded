"""A run as data: what a YAML file may say. `flowrl.config` reads it; unknown keys are errors."""

from flowrl.settings.base import Settings
from flowrl.settings.data import PromptFiles, RewardSpec
from flowrl.settings.model import Guidance, Lora, Model
from flowrl.settings.run import RECIPE_SETTINGS, Recipe, Run, Steer, recipe_settings
from flowrl.settings.train import Checkpoint, Evaluate, Schedule, Track, Train

__all__ = [
    "RECIPE_SETTINGS",
    "Checkpoint",
    "Evaluate",
    "Guidance",
    "Lora",
    "Model",
    "PromptFiles",
    "Recipe",
    "RewardSpec",
    "Run",
    "Schedule",
    "Settings",
    "Steer",
    "Track",
    "Train",
    "recipe_settings",
]
