"""A run as data: what a YAML file may say. `flowrl.config` reads it; unknown keys are errors."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union

import tyro
from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from flowrl.algorithm import Algorithm
from flowrl.recipes import RECIPES


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Guidance(Settings):
    """Classifier-free guidance scales; 1 is none.

    A matching loss regresses the velocity itself, so AWM, NFT and DPO want `train: 1`.
    """

    sample: float = Field(default=1.0, ge=0)
    train: float = Field(default=1.0, ge=0)


class Lora(Settings):
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: tuple[str, ...] | None = None
    """Names of linear layers; null takes attention and feed-forward layers of the blocks."""


class Model(Settings):
    pipeline: str
    """A folder in diffusers' format, or a hub name."""
    height: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    lora: Lora | None = Lora()
    """null trains all weights of the denoiser."""
    guidance: Guidance = Guidance()
    call: Annotated[dict[str, Any], tyro.conf.Fixed] = Field(default_factory=dict)
    """Further arguments of the pipeline's own call, such as max_sequence_length."""


class PromptFiles(Settings):
    train: str
    held_out: str | None = None
    per_iteration: int = Field(default=16, ge=1)
    """Draws an iteration; each is a group of samples of one prompt."""
    column: str = "prompt"


class RewardSpec(Settings):
    """`name` is a file of `rewards/`. Keys beside `name` and `weight` are that reward's settings:
    `{name: shapes, kind: strict}` and `{name: shapes, settings: {kind: strict}}` are the same."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})
    name: str
    weight: float = 1.0
    settings: Annotated[dict[str, Any], tyro.conf.Fixed] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        own = {key: data[key] for key in ("name", "weight") if key in data}
        rest = {key: value for key, value in data.items() if key not in (*own, "settings")}
        return {**own, "settings": {**data.get("settings", {}), **rest}}

    @property
    def label(self) -> str:
        """How its scores are called: `shapes` or `shapes.strict`."""
        kind = self.settings.get("kind")
        return f"{self.name}.{kind}" if isinstance(kind, str) else self.name


class Schedule(Settings):
    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = Field(default=0, ge=0)
    """Iterations of linear warm-up."""


class Train(Settings):
    iterations: int = Field(default=100, ge=1)
    lr: float = Field(default=3e-4, gt=0)
    schedule: Schedule = Schedule()
    updates: int = Field(default=1, ge=1)
    """Optimizer steps an iteration; each sees an equal share of the samples at every step."""
    rows_per_call: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Most rows in one call of the denoiser, in sampling and training alike."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=1e-4, ge=0)
    recompute_old: bool = False
    """Score stored steps again at the training batch's shape before the first update."""
    on_failure: Literal["raise", "skip_group"] = "raise"
    """What to do when a whole group has no score."""
    alarms: Literal["warn", "stop", "off"] = "warn"
    seed: int = 0


class Evaluate(Settings):
    every: int = Field(default=10, ge=1)
    steps: int = Field(default=10, ge=1)
    samples: int = Field(default=512, ge=1)
    per_prompt: int = Field(default=4, ge=1)
    """At least so many samples of each prompt, which the diversity is measured on."""
    seed: int = 1234
    average: float | None = Field(default=None, gt=0, lt=1)
    """Evaluate and save an average of the weights that decays by this factor an iteration."""


class Checkpoint(Settings):
    every: int = Field(default=10, ge=1)
    keep: int = Field(default=2, ge=1)
    best: str | None = None
    """Held-out reward whose best evaluation is kept; null takes the first."""


class Track(Settings):
    trackers: tuple[str, ...] = Field(default=(), alias="with")
    """Of accelerate: tensorboard, wandb, trackio, ..."""
    images: int = Field(default=16, ge=0)


def recipe_settings(name: str, recipe: Callable[..., Algorithm]) -> type[Settings]:
    """The keyword arguments of a recipe as a settings model."""
    fields: dict[str, Any] = {"name": (Literal[name], name)}  # type: ignore[valid-type]
    for parameter in inspect.signature(recipe).parameters.values():
        assert parameter.default is not inspect.Parameter.empty, (name, parameter.name)
        fields[parameter.name] = (parameter.annotation, parameter.default)
    return create_model(name, __base__=Settings, __doc__=recipe.__doc__, **fields)


RECIPE_SETTINGS = {name: recipe_settings(name, recipe) for name, recipe in RECIPES.items()}
Recipe = Annotated[
    Union[tuple(RECIPE_SETTINGS.values())],  # type: ignore[valid-type]  # noqa: UP007
    Field(discriminator="name"),
    tyro.conf.AvoidSubcommands,
]


class Run(Settings):
    """Everything that a run needs to know."""

    recipe: Recipe  # type: ignore[valid-type]
    model: Model
    prompts: PromptFiles
    rewards: Annotated[tuple[RewardSpec, ...], tyro.conf.Fixed] = Field(min_length=1)
    held_out_rewards: Annotated[tuple[RewardSpec, ...], tyro.conf.Fixed] = ()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()

    def algorithm(self) -> Algorithm:
        fields = type(self.recipe).model_fields  # type: ignore[attr-defined]
        arguments = {name: getattr(self.recipe, name) for name in fields}
        return RECIPES[arguments.pop("name")](**arguments)

    @property
    def judges(self) -> tuple[RewardSpec, ...]:
        """The rewards of evaluations: the held-out ones, or those of training."""
        return self.held_out_rewards or self.rewards

    @model_validator(mode="after")
    def _consistent(self) -> "Run":
        for place, specs in (
            ("rewards", self.rewards),
            ("held_out_rewards", self.held_out_rewards),
        ):
            labels = [spec.label for spec in specs]
            if len(set(labels)) < len(labels):
                raise ValueError(f"{place}: {labels} are not distinct; remove the double")
        best = self.checkpoint.best
        if best is not None and best not in [spec.label for spec in self.judges]:
            known = ", ".join(spec.label for spec in self.judges)
            raise ValueError(f"checkpoint.best: {best!r} is no held-out reward; one of {known}")
        return self
