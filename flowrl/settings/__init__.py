"""A run as data: the settings of a YAML file. Unknown keys are errors."""

from flowrl.settings.base import Settings
from flowrl.settings.model.adapters import Lora
from flowrl.settings.model.engine import EngineSettings
from flowrl.settings.model.environment import EnvironmentSettings
from flowrl.settings.model.language import LanguageSettings
from flowrl.settings.model.model import ModelSettings
from flowrl.settings.model.own_model import OwnSettings
from flowrl.settings.model.pipeline import Guidance, PipelineSettings, Vae
from flowrl.settings.model.server import CorrectionSettings, Server
from flowrl.settings.sections.budget import BudgetSettings
from flowrl.settings.sections.data import PromptFiles, RewardSpec
from flowrl.settings.sections.recipe import (
    RECIPE_SETTINGS,
    RecipeSettings,
    recipe_function,
    recipe_settings,
)
from flowrl.settings.sections.recipe_kinds import recipe_kind
from flowrl.settings.sections.run import RunSettings, Steer
from flowrl.settings.sections.train import (
    Checkpoint,
    EvaluateSettings,
    ScheduleSettings,
    Track,
    Train,
)

__all__ = [
    "RECIPE_SETTINGS",
    "BudgetSettings",
    "Checkpoint",
    "CorrectionSettings",
    "EngineSettings",
    "EnvironmentSettings",
    "EvaluateSettings",
    "Guidance",
    "LanguageSettings",
    "Lora",
    "ModelSettings",
    "OwnSettings",
    "PipelineSettings",
    "PromptFiles",
    "RecipeSettings",
    "RewardSpec",
    "RunSettings",
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
