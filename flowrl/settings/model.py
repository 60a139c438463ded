"""What to train, and how it is called."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import tyro
from pydantic import Field, model_validator

from flowrl.settings.base import OnResume, Settings
from flowrl.settings.environment import EnvironmentSettings
from flowrl.settings.server import Server


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


class Vae(Settings):
    """For a decoder that does not fit: it works on one tile, or on one sample, at a time."""

    tiling: bool = False
    slicing: bool = False


class ModelSettings(Settings):
    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "gguf_file": OnResume.NEVER,
        "lora": OnResume.NEVER,
        "offload": OnResume.FREE,
    }
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
    server: Server | None = None
    """Draws the completions of training and of its evaluations; null: the model itself does."""
    environment: EnvironmentSettings | None = None
    """Answers the language model, which then takes another turn; null: a completion is one turn."""
    height: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """float64 is for proofs: what differs by 1e-10 there is a mistake, and not rounding."""
    device: str = "auto"
    lora: Lora | None = Lora()
    """null trains all weights: of the denoiser, or of the language model."""
    guidance: Guidance = Guidance()
    call: Annotated[dict[str, Any], tyro.conf.Fixed] = Field(default_factory=dict)
    """Further arguments of the pipeline's own call, such as max_sequence_length."""
    offload: bool = False
    """Text encoders, image encoders and VAE wait on the CPU while they are not used."""
    vae: Vae = Vae()
    attention: str | None = None
    """An attention backend of diffusers: native, flash, flex, xformers, ..."""
    compile: bool = False
    """torch.compile of the denoiser's repeated blocks."""
    context_parallel: int = Field(default=1, ge=1)
    """Processes that share each call of the denoiser, a part of its tokens each: for films and
    pictures whose activations one process cannot hold."""

    @model_validator(mode="after")
    def _one_kind(self) -> "ModelSettings":
        if (self.pipeline is None) == (self.language is None):
            raise ValueError("give either pipeline (images, video) or language (text)")
        of = {
            "pipeline": {"height", "width", "guidance", "call"}
            | {"offload", "vae", "attention", "compile", "context_parallel"},
            "language": {"gguf_file", "system", "stop", "server", "environment"},
        }
        strangers = of["language" if self.language is None else "pipeline"]
        for name in sorted(strangers):
            if getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                other = "language" if name in of["language"] else "pipeline"
                raise ValueError(f"{name} is a setting of {other} models: leave it out")
        if self.context_parallel > 1 and (self.compile or self.attention not in (None, "native")):
            raise ValueError(
                f"context_parallel: {self.context_parallel} was proven with diffusers' native "
                "attention, not compiled: leave attention and compile out"
            )
        if self.server is not None and self.server.sync == "lora" and self.lora is None:
            raise ValueError(
                "server.sync: lora sends adapters, and all weights are trained (lora: null); train "
                "adapters, or set server.sync: none"
            )
        return self
