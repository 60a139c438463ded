"""A run as data: a recipe, a model, prompts, rewards and the training."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import Field, create_model, field_validator, model_validator

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

_MOST = {"steps": 250, "group": 10_000, "roots": 1_000, "branch": 100, "length": 1_000_000}
_MOST_OTHER = 10_000  # of a recipe's other integers
_MOST_LEAVES = 10_000  # samples of one tree


class RecipeSettings(Settings):
    """Settings of a recipe; its integers are bounded, since a plan holds each step and sample."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {"name": OnResume.NEVER}

    @model_validator(mode="after")
    def _leaves(self) -> "RecipeSettings":
        values = dict(self)
        cuts = max(1, len(values.get("at", ())))
        if len(values.get("at", ())) > _MOST["steps"]:
            raise ValueError(f"at: more steps than {_MOST['steps']}")
        leaves = values.get("roots", 1) * values.get("branch", 1) ** min(cuts, 20)
        if leaves > _MOST_LEAVES:
            raise ValueError(
                f"roots and branch make {leaves} samples per prompt; at most {_MOST_LEAVES}"
            )
        return self


def recipe_settings(name: str, recipe: Callable[..., Algorithm]) -> type[Settings]:
    """The keyword arguments of a recipe as a settings model."""
    fields: dict[str, Any] = {"name": (Literal[name], name)}  # type: ignore[valid-type]
    for parameter in inspect.signature(recipe).parameters.values():
        assert parameter.default is not inspect.Parameter.empty, (name, parameter.name)
        annotation = parameter.annotation
        if annotation is int:
            most = _MOST.get(parameter.name, _MOST_OTHER)
            annotation = Annotated[int, Field(le=most)]
        fields[parameter.name] = (annotation, parameter.default)
    return create_model(name, __base__=RecipeSettings, __doc__=recipe.__doc__, **fields)


RECIPE_SETTINGS = {name: recipe_settings(name, recipe) for name, recipe in RECIPES.items()}
Recipe = Annotated[
    Union[tuple(RECIPE_SETTINGS.values())],  # type: ignore[valid-type]  # noqa: UP007
    Field(discriminator="name"),
]


class Steer(Settings):
    """Feynman-Kac particles (arXiv:2501.06848) as the samples of some iterations: Flow-SDE steps,
    with resampling in proportion to exp(strength * reward) of the predicted sample. Only for losses
    on clean samples: AWM, NFT, DPO, reward-weighted."""

    iterations: tuple[int, int]
    """[first, stop): in other iterations the recipe samples."""
    at: tuple[int, ...] | None = None
    """Steps before which particles are resampled; null: every second one."""
    strength: float = Field(default=5.0, ge=0)
    """Weight of the reward in exp(strength * reward)."""
    potential: Literal["difference", "max", "sum", "terminal"] = "max"
    """The reward of a particle: its gain, its maximum or sum so far, or that of the last step."""
    adaptive: bool = True
    """Resample only if few particles hold most of the weight."""
    eta: float = Field(default=0.7, gt=0)
    """Noise of the Flow-SDE steps."""

    def around(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm with particles in these iterations. UserError for recipes of text."""
        if isinstance(algorithm.plan, TextPlanner):
            raise UserError("steer: particles are images or videos; leave it out for texts")
        at = self.at or tuple(range(1, algorithm.steps - 1, 2))
        how = FeynmanKac(at, self.strength, self.potential, start=None, adaptive=self.adaptive)
        plan = Particled(algorithm.plan, FlowSDE(self.eta), algorithm.group, how, *self.iterations)
        return replace(algorithm, plan=plan)


class Run(Settings):
    """All settings of a run."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "track": OnResume.FREE,
        "checkpoint": OnResume.FREE,
    }
    recipe: Recipe  # type: ignore[valid-type]
    model: ModelSettings
    prompts: PromptFiles
    rewards: tuple[RewardSpec, ...] = Field(min_length=1)
    """Rewards of training; their weighted sum is what samples are compared by."""
    held_out_rewards: tuple[RewardSpec, ...] = ()
    """Rewards of evaluations; those of training if empty."""
    budget: BudgetSettings = BudgetSettings()
    train: Train = Train()
    steer: Steer | None = None
    evaluate: EvaluateSettings = EvaluateSettings()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()

    @field_validator("rewards", "held_out_rewards", mode="before")
    @classmethod
    def _one_reward(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def algorithm(self) -> Algorithm:
        """The recipe with its settings, the server's correction, the steering and the budget.

        UserError for choices that cannot be combined.
        """
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
                "has one turn: name a function there that replies, or choose another recipe"
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
        """Denoising steps of evaluations, or the most tokens of a text."""
        return self.evaluate.steps or self.algorithm().steps

    @property
    def evaluation_guidance(self) -> float | None:
        """Guidance scale of evaluations; None is the pipeline's own."""
        e = self.evaluate
        return self.model.guidance.sample if e.guidance is None else e.guidance

    @property
    def evaluation_size(self) -> dict[str, int]:
        """Arguments of the pipeline's call that evaluations change: height and width."""
        own = {"height": self.evaluate.height, "width": self.evaluate.width}
        model = {"height": self.model.height, "width": self.model.width}
        return {k: v for k, v in own.items() if v is not None and v != model[k]}

    @property
    def exported(self) -> str:
        """Name of the folder with the last weights."""
        whole = "pipeline" if self.model.pipeline else "model"
        return "adapter" if self.model.lora else whole

    @property
    def recomputes_old(self) -> bool:
        """`train.recompute_old`, or its default: where rounding moves log-probabilities by more
        than a clip range, and no replayed sample has to keep those that it was drawn with."""
        if self.train.recompute_old is not None:
            return self.train.recompute_old
        return self.model.dtype in ("bfloat16", "float16") and not self.budget.replay

    @model_validator(mode="after")
    def _consistent(self) -> "Run":
        for place, specs in (
            ("rewards", self.rewards),
            ("held_out_rewards", self.held_out_rewards),
        ):
            labels = [spec.label for spec in specs]
            if len(set(labels)) < len(labels):
                raise ValueError(
                    f"{place}: {labels} are not distinct; remove one, or give it a `label`"
                )
        if self.budget.replay and self.train.recompute_old:
            raise ValueError(
                "budget.replay: a replayed sample keeps its old log-probabilities, which "
                "train.recompute_old would replace: leave one of the two out"
            )
        best = self.checkpoint.best
        if best is not None and best not in [spec.label for spec in self.judges]:
            known = ", ".join(spec.label for spec in self.judges)
            raise ValueError(f"checkpoint.best: {best!r} is not a held-out reward; one of {known}")
        return self
