"""A run as data: the settings of a YAML file. Unknown keys are errors."""

from flowrl.settings.adapters import Lora
from flowrl.settings.base import Settings
from flowrl.settings.budget import BudgetSettings
from flowrl.settings.data import PromptFiles, RewardSpec
from flowrl.settings.environment import EnvironmentSettings
from flowrl.settings.model import Guidance, ModelSettings, Vae
from flowrl.settings.recipe import (
    RECIPE_SETTINGS,
    RecipeSettings,
    recipe_function,
    recipe_kind,
    recipe_settings,
)
from flowrl.settings.run import Run, Steer
from flowrl.settings.server import CorrectionSettings, Server
from flowrl.settings.train import Checkpoint, EvaluateSettings, ScheduleSettings, Track, Train

__all__ = [
    "RECIPE_SETTINGS",
    "BudgetSettings",
    "Checkpoint",
    "CorrectionSettings",
    "EnvironmentSettings",
    "EvaluateSettings",
    "Guidance",
    "Lora",
    "ModelSettings",
    "PromptFiles",
    "RecipeSettings",
    "RewardSpec",
    "Run",
    "ScheduleSettings",
    "Server",
    "Settings",
    "Steer",
    "Track",
    "Train",
    "Vae",
    "recipe_function",
    "recipe_kind",
    "recipe_settings",
]
