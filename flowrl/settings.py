"""A run as data: what a YAML file may say. `flowrl.config` reads it; unknown keys are errors."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import numpy as np
import tyro
from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.recipes import RECIPES
from samplers import FeynmanKac, FlowSDE, Particled
from samplers.completions import TextPlanner


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
    pipeline: str | None = None
    """A folder in diffusers' format, or a hub name. Either this or `language`."""
    language: str | None = None
    """A folder with a transformers causal language model and its tokenizer, or a hub name."""
    gguf_file: str | None = None
    """The file of `language`'s folder that holds the weights, if they are GGUF."""
    system: str | None = None
    """What the chat template's system message says."""
    stop: tuple[str, ...] = ()
    """Tokens that end a completion, beside the language model's own."""
    height: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    lora: Lora | None = Lora()
    """null trains all weights: of the denoiser, or of the language model."""
    guidance: Guidance = Guidance()
    call: Annotated[dict[str, Any], tyro.conf.Fixed] = Field(default_factory=dict)
    """Further arguments of the pipeline's own call, such as max_sequence_length."""

    @model_validator(mode="after")
    def _one_kind(self) -> "Model":
        if (self.pipeline is None) == (self.language is None):
            raise ValueError("give either pipeline (images, video) or language (text)")
        of = {
            "pipeline": {"height", "width", "guidance", "call"},
            "language": {"gguf_file", "system", "stop"},
        }
        strangers = of["language" if self.language is None else "pipeline"]
        for name in sorted(strangers):
            if getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                other = "language" if name in of["language"] else "pipeline"
                raise ValueError(f"{name} is a setting of {other} models: leave it out")
        return self


class PromptFiles(Settings):
    train: str
    held_out: str | None = None
    per_iteration: int = Field(default=16, ge=1)
    """Draws an iteration; each is a group of samples of one prompt."""
    column: str = "prompt"


class RewardSpec(Settings):
    """`name` is a file of `rewards/`, or a function of your own (`my_rewards.py:sharpness`). Keys
    beside `name`, `label` and `weight` are that reward's settings: `{name: shapes, kind: strict}`
    and `{name: shapes, settings: {kind: strict}}` are the same."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})
    name: str
    label: str = ""
    """How its scores are called; by default `shapes`, or `shapes.strict` with a kind."""
    weight: float | tuple[tuple[int, float], ...] = 1.0
    """A number, or points `[[0, 1.0], [50, 0.2]]`: linear between iterations, flat outside."""
    settings: Annotated[dict[str, Any], tyro.conf.Fixed] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        own = {key: data[key] for key in ("name", "label", "weight") if key in data}
        rest = {key: value for key, value in data.items() if key not in (*own, "settings")}
        settings = {**data.get("settings", {}), **rest}
        if not own.get("label") and isinstance(own.get("name"), str):
            stem = own["name"].rpartition(":")[2]
            kind = settings.get("kind")
            stem = Path(stem).stem if stem.endswith(".py") else stem
            own["label"] = f"{stem}.{kind}" if isinstance(kind, str) else stem
        return {**own, "settings": settings}

    @model_validator(mode="after")
    def _rising(self) -> "RewardSpec":
        if isinstance(self.weight, tuple):
            at = [iteration for iteration, _ in self.weight]
            if not at or at != sorted(set(at)):
                raise ValueError(f"weight: points [iteration, weight] in rising order, not {at}")
        return self

    def weight_at(self, iteration: int) -> float:
        if not isinstance(self.weight, tuple):
            return self.weight
        at, weights = zip(*self.weight, strict=True)
        return float(np.interp(iteration, at, weights))


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
    """Most rows in one call of the model, in sampling and training alike."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=1e-4, ge=0)
    recompute_old: bool = False
    """Score stored steps again at the training batch's shape before the first update."""
    on_failure: Literal["raise", "skip_group"] = "raise"
    """What to do when a whole group has no score."""
    alarms: Literal["warn", "stop", "off"] = "warn"
    self_test: Literal["raise", "warn", "off"] = "raise"
    """What to do when a reward fails its test at the start."""
    seed: int = 0


class Evaluate(Settings):
    every: int = Field(default=10, ge=1)
    steps: int | None = Field(default=None, ge=1)
    """Denoising steps, or the most tokens of a text; null takes the recipe's."""
    temperature: float = Field(default=1.0, ge=0)
    """Of text; 0 takes the likeliest token, so that all samples of a prompt are one."""
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
    """Samples that each evaluation leaves in `samples/`: pictures, or texts."""


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

    recipe: Recipe  # type: ignore[valid-type]
    model: Model
    prompts: PromptFiles
    rewards: Annotated[tuple[RewardSpec, ...], tyro.conf.Fixed] = Field(min_length=1)
    held_out_rewards: Annotated[tuple[RewardSpec, ...], tyro.conf.Fixed] = ()
    train: Train = Train()
    steer: Steer | None = None
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()

    def algorithm(self) -> Algorithm:
        fields = type(self.recipe).model_fields  # type: ignore[attr-defined]
        arguments = {name: getattr(self.recipe, name) for name in fields}
        algorithm = RECIPES[arguments.pop("name")](**arguments)
        return algorithm if self.steer is None else self.steer.around(algorithm)

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
        best = self.checkpoint.best
        if best is not None and best not in [spec.label for spec in self.judges]:
            known = ", ".join(spec.label for spec in self.judges)
            raise ValueError(f"checkpoint.best: {best!r} is no held-out reward; one of {known}")
        return self
