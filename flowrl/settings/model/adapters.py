"""Adapters: those that a run trains, and those that are merged into the base weights."""

from typing import Literal

from pydantic import Field, model_validator

from flowrl.settings.base import Name, Settings
from rewards.rights import ReadSource

MOST_RANK = 10_000  # above the sides of the layers of any model here


class Lora(Settings):
    """Adapters (low-rank updates) of linear layers."""

    start: ReadSource | None = Field(default=None, alias="from")
    """Adapters to start from: a file or a folder that the pipeline's load_lora_weights or peft
    reads, or a hub name. They have their own rank, alpha and targets, and are the policy `ref`."""
    rank: int = Field(default=16, ge=1, le=MOST_RANK)
    alpha: float = Field(default=32.0, gt=0)
    targets: tuple[Name, ...] | None = None
    """Names of linear layers; null: attention and feed-forward layers of the blocks."""
    dora: bool = False
    """DoRA (arXiv:2402.09353): the length of each row of an adapted weight is trained beside its
    low-rank change of direction. Each call also computes these lengths. For small ranks."""
    vision: bool = False
    """Whether the vision part of a vision-language model also gets adapters."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the adapters' products; the optimizer updates float32 weights in all cases. auto:
    bfloat16 with model.dtype: bfloat16, which is faster on a GPU and keeps no float32 copies of
    inputs; else float32."""
    merge: Literal["none", "evaluation", "untrained", "sampling"] = "none"
    """When adapters are merged into a second copy of the weights. evaluation: in evaluations.
    untrained: also in sampling steps whose density is not stored. sampling: in all sampling, with
    train.recompute_old."""

    @model_validator(mode="after")
    def _own_form(self) -> "Lora":
        form = (self.rank, self.alpha, self.targets, self.dora)
        if self.start is not None and form != (16, 32.0, None, False):
            raise ValueError(
                "from: these adapters have their own rank, alpha, targets and dora: leave these "
                "settings out"
            )
        return self

    @model_validator(mode="after")
    def _precise_lengths(self) -> "Lora":
        if self.dora and self.dtype == "bfloat16":
            raise ValueError(
                "dora: a length rounded to bfloat16 changes its row of the weight by up to 0.4 %: "
                "leave dtype out"
            )
        return self


class FrozenAdapter(Settings):
    """Existing adapters, merged into the base weights before anything else: a style, or a few-step
    student (Lightning, Hyper)."""

    path: ReadSource
    """A .safetensors file or a folder for the pipeline's load_lora_weights, or a hub name."""
    scale: float = 1.0
    component: Literal["transformer_2"] | None = None
    """transformer_2: for the second expert of a pipeline with two (Wan 2.2)."""
