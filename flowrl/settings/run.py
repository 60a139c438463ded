"""A run as data: a recipe, a model, prompts, rewards, and how to train."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Union

import tyro
from pydantic import Field, create_model, model_validator

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.recipes import RECIPES
from flowrl.settings.base import OnResume, Settings
from flowrl.settings.budget import BudgetSettings
from flowrl.settings.data import PromptFiles, RewardSpec
from flowrl.settings.model import ModelSettings
from flowrl.settings.train import Checkpoint, EvaluateSettings, Track, Train
from samplers import FeynmanKac, FlowSDE, Particled
from samplers.completions import TextPlanner


class RecipeSettings(Settings):
    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {"name": OnResume.NEVER}


def recipe_settings(name: str, recipe: Callable[..., Algorithm]) -> type[Settings]:
    """The keyword arguments of a recipe as a settings model."""
    fields: dict[str, Any] = {"name": (Literal[name], name)}  # type: ignore[valid-type]
    for parameter in inspect.signature(recipe).parameters.values():
        assert parameter.default is not inspect.Parameter.empty, (name, parameter.name)
        fields[parameter.name] = (parameter.annotation, parameter.default)
    return create_model(name, __base__=RecipeSettings, __doc__=recipe.__doc__, **fields)


RECIPE_SETTINGS = {name: recipe_settings(name, recipe) for name, recipe in RECIPES.items()}
Recipe = Annotated[
    Union[tuple(RECIPE_SETTINGS.values())],  # type: ignore[valid-type]  # noqa: UP007
    Field(discriminator="name"),
    tyro.conf.AvoidSubcommands,
]


class Steer(Settings):
    """Feynman-Kac particles (arXiv:2501.06848) as the samples of some iterations: steps of Flow-SDE
    noise, weighed by exp(strength reward) of the predicted sample and drawn anew on the way. Only
    for losses that learn from clean samples: AWM, NFT, DPO, reward-weighted."""

    iterations: tuple[int, int]
    """[first, stop): in the others the recipe samples."""
    at: tuple[int, ...] | None = None
    """Steps before which particles are weighed; null takes every second one."""
    strength: float = Field(default=5.0, ge=0)
    potential: Literal["difference", "max", "sum", "terminal"] = "max"
    adaptive: bool = True
    """Draw anew only where few particles hold most of the weight."""
    eta: float = Field(default=0.7, gt=0)

    def around(self, algorithm: Algorithm) -> Algorithm:
        if isinstance(algorithm.plan, TextPlanner):
            raise UserError("steer: particles are of pictures and films; leave it out for texts")
        at = self.at or tuple(range(1, algorithm.steps - 1, 2))
        how = FeynmanKac(at, self.strength, self.potential, start=None, adaptive=self.adaptive)
        plan = Particled(algorithm.plan, FlowSDE(self.eta), algorithm.group, how, *self.iterations)
        return replace(algorithm, plan=plan)


class Run(Settings):
    """Everything that a run needs to know."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "track": OnResume.FREE,
        "checkpoint": OnResume.FREE,
    }
    recipe: Recipe  # type: ignore[valid-type]
    model: ModelSettings
    prompts: PromptFiles
    rewards: Annotated[tuple[RewardSpec, ...], tyro.conf.Fixed] = Field(min_length=1)
    held_out_rewards: Annotated[tuple[RewardSpec, ...], tyro.conf.Fixed] = ()
    budget: BudgetSettings = BudgetSettings()
    train: Train = Train()
    steer: Steer | None = None
    evaluate: EvaluateSettings = EvaluateSettings()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()

    def algorithm(self) -> Algorithm:
        fields = type(self.recipe).model_fields  # type: ignore[attr-defined]
        arguments = {name: getattr(self.recipe, name) for name in fields}
        algorithm = RECIPES[arguments.pop("name")](**arguments)
        if self.model.server is not None and algorithm.text:
            algorithm = self.model.server.around(algorithm)
        if self.model.environment is not None and algorithm.text:
            self.model.environment.check(algorithm)
        elif algorithm.by_turn:
            raise UserError(
                "this recipe compares the turns of a text, and without model.environment a text "
                "has one: name a function there that answers, or take another recipe"
            )
        if self.steer is not None:
            algorithm = self.steer.around(algorithm)
        return self.budget.around(algorithm)

    @property
    def judges(self) -> tuple[RewardSpec, ...]:
        """The rewards of evaluations: the held-out ones, or those of training."""
        return self.held_out_rewards or self.rewards

    @property
    def evaluation_steps(self) -> int:
        return self.evaluate.steps or self.algorithm().steps

    @property
    def exported(self) -> str:
        """The folder that the last weights go to."""
        whole = "pipeline" if self.model.pipeline else "model"
        return "adapter" if self.model.lora else whole

    @model_validator(mode="after")
    def _consistent(self) -> "Run":
        for place, specs in (
            ("rewards", self.rewards),
            ("held_out_rewards", self.held_out_rewards),
        ):
            labels = [spec.label for spec in specs]
            if len(set(labels)) < len(labels):
                raise ValueError(
                    f"{place}: {labels} are not distinct; remove the double, or give it a `label`"
                )
        if self.budget.replay and self.train.recompute_old:
            raise ValueError(
                "budget.replay: a success keeps the log-probabilities that it was drawn with, and "
                "train.recompute_old would replace them: leave one of the two out"
            )
        best = self.checkpoint.best
        if best is not None and best not in [spec.label for spec in self.judges]:
            known = ", ".join(spec.label for spec in self.judges)
            raise ValueError(f"checkpoint.best: {best!r} is no held-out reward; one of {known}")
        return self
