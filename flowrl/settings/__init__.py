"""A run as data: what a YAML file may say. `flowrl.settings.read` reads it; unknown keys are errors."""

from flowrl.settings.base import Settings
from flowrl.settings.budget import Budget
from flowrl.settings.data import PromptFiles, RewardSpec
from flowrl.settings.environment import Environment
from flowrl.settings.model import Guidance, Lora, Model, Vae
from flowrl.settings.run import RECIPE_SETTINGS, Recipe, Run, Steer, recipe_settings
from flowrl.settings.server import Correction, Server
from flowrl.settings.train import Checkpoint, Evaluate, Schedule, Track, Train

__all__ = [
    "RECIPE_SETTINGS",
    "Budget",
    "Checkpoint",
    "Correction",
    "Environment",
    "Evaluate",
    "Guidance",
    "Lora",
    "Model",
    "PromptFiles",
    "Recipe",
    "RewardSpec",
    "Run",
    "Schedule",
    "Server",
    "Settings",
    "Steer",
    "Track",
    "Train",
    "Vae",
    "recipe_settings",
]
