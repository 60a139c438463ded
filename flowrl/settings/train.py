"""How long, how fast, and what is looked at and kept on the way."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from flowrl.settings.base import OnResume, Settings


class ScheduleSettings(Settings):
    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = Field(default=0, ge=0)
    """Iterations of linear warm-up."""


class Train(Settings):
    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "rows_per_call": OnResume.FREE,
        "gradient_checkpointing": OnResume.FREE,
        "on_failure": OnResume.FREE,
        "alarms": OnResume.FREE,
        "self_test": OnResume.FREE,
        "optimizer": OnResume.NEVER,
    }
    iterations: int = Field(default=100, ge=1)
    lr: float = Field(default=3e-4, gt=0, allow_inf_nan=False)
    schedule: ScheduleSettings = ScheduleSettings()
    updates: int = Field(default=1, ge=1)
    """Optimizer steps an iteration; each sees an equal share of the samples at every step."""
    rows_per_call: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Most rows in one call of the model, in sampling and training alike."""
    gradient_checkpointing: bool = False
    """Keep the inputs of the model's blocks alone, and run the blocks again for gradients: a third
    more time for a fraction of the memory."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit, of bitsandbytes, keeps 2 bytes a trained weight instead of 8."""
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


class EvaluateSettings(Settings):
    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {"average": OnResume.NEVER}
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
    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {"best": OnResume.SAID}
    every: int = Field(default=10, ge=1)
    keep: int = Field(default=2, ge=1)
    best: str | None = None
    """Held-out reward whose best evaluation is kept; null takes the first."""


class Track(Settings):
    trackers: tuple[str, ...] = Field(default=(), alias="with")
    """Of accelerate: tensorboard, wandb, trackio, ..."""
    images: int = Field(default=16, ge=0)
    """Samples that each evaluation leaves in `samples/`: pictures, or texts."""
