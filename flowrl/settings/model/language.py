"""`model: {language: ...}`: a causal language model, and the one that writes prompts."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from flowrl.settings.base import OnResume, Settings
from flowrl.settings.model.adapters import Lora
from flowrl.settings.model.environment import EnvironmentSettings, StepSettings
from flowrl.settings.model.image_tokens import ImageTokenSettings
from flowrl.settings.model.model import ModelSettings
from flowrl.settings.model.quantization import Quantization
from flowrl.settings.model.server import Server
from flowrl.settings.words.short_forms import lora_settings
from rewards.rights import KernelName, NameInFolder


class NamedLanguageModel(Settings):
    """The setting that names a language model, before the settings of all models."""

    language: str
    """A folder with a transformers causal language model and its tokenizer, or a hub name."""


class LanguageSettings(ModelSettings, NamedLanguageModel):
    """A causal language model of transformers."""

    KIND: ClassVar[str] = "language"
    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        **ModelSettings.ON_RESUME,
        "gguf_file": OnResume.NEVER,
    }
    gguf_file: NameInFolder | None = None
    """The file with the weights in the folder of `language`, if they are GGUF."""
    system: str | None = None
    """System message for the chat template, for prompts without one of their own."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of the chat template, such as {enable_thinking: false} for Qwen3."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the language model's own stop tokens and the end of a
    turn in its chat template. Rewards see the text before them."""
    server: Server | None = None
    """Server that generates the completions for training and its evaluations; null: the model."""
    environment: EnvironmentSettings | None = None
    """Function that replies to the language model between its turns; null: one turn."""
    steps: StepSettings | None = None
    """Separator of a completion's steps, each with rewards of its own; null: one step."""
    image: ImageTokenSettings | None = None
    """Images in place of texts, for a model that writes them as tokens: {guidance: 5.0}, or {} for
    the model's own `generate`; null: its completions are texts."""
    head_dtype: Literal["float32"] | None = None
    """float32: a half-precision language model computes its logits in float32, and trains an untied
    head in float32, for more accurate log-probabilities. null: model.dtype."""
    quantization: Quantization | None = None
    """The frozen base in 8 or 4 bits, below adapters: {backend: bitsandbytes, bits: 4}."""
    attention: KernelName | None = None
    """Attention backend of diffusers (native, flash, flex, xformers, ...); for a language model,
    transformers' `attn_implementation` (sdpa, eager, flash_attention_2, ...)."""

    @property
    def source(self) -> str:
        return self.language

    @property
    def configuration(self) -> str:
        return self.gguf_file or "config.json"

    @property
    def quantized(self) -> Quantization | None:
        return self.quantization

    @model_validator(mode="after")
    def _precise_head(self) -> "LanguageSettings":
        if self.head_dtype and self.dtype not in ("bfloat16", "float16"):
            raise ValueError(
                f"head_dtype: {self.head_dtype} is for half-precision models, but model.dtype is "
                f"{self.dtype}: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _fits_images(self) -> "LanguageSettings":
        if self.image is None:
            return self
        reasons = {
            "server": "servers return texts, not the tokens of images",
            "environment": "an image has no turns",
            "steps": "an image has no separators between steps",
            "stop": "an image always has all of its tokens",
            "gguf_file": "GGUF files hold no decoder of images",
            "quantization": "the decoder of images would be quantized too",
            "head_dtype": "logits of images are guided in float32 already",
        }
        defaults = {name: LanguageSettings.model_fields[name].default for name in reasons}
        for name, reason in reasons.items():
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name}: the model writes images (image), and {reason}: leave it out"
                )
        if self.lora is not None and self.lora.vision:
            raise ValueError(
                "lora.vision: the model writes images (image), and reads none: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _fits_server(self) -> "LanguageSettings":
        if self.server is not None and self.lora is not None and self.lora.merge != "none":
            raise ValueError(
                "lora.merge changes the model's own calls, but the server generates the samples: "
                "leave it out"
            )
        if self.server is not None and self.server.sync == "lora" and self.lora is None:
            raise ValueError(
                "server.sync: lora sends adapters, but all weights are trained (lora: null); train "
                "adapters, or set server.sync: weights or none"
            )
        if self.server is not None and self.lora is not None and self.lora.dora:
            raise ValueError(
                "lora.dora: servers load adapters of products alone: leave it out, or sample "
                "without a server"
            )
        if self.server is not None and self.server.sync == "weights" and self.lora is not None:
            raise ValueError(
                "server.sync: weights sends all weights, but adapters are trained: set "
                "server.sync: lora"
            )
        return self

    @model_validator(mode="after")
    def _fits_quantization(self) -> "LanguageSettings":
        if self.quantization is None:
            return self
        self.quantization.check_adapters(self.lora)
        if self.quantization.backend == "gguf" or self.gguf_file is not None:
            raise ValueError(
                "quantization: a language model's GGUF file (gguf_file) is read in full precision: "
                "choose bitsandbytes, torchao or quanto, with a folder of safetensors"
            )
        if self.quantization.components:
            raise ValueError("quantization: components are those of a pipeline: leave them out")
        return self


class RewriterSettings(Settings):
    """The language model of a joint run, which writes the pipeline's prompts."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "gguf_file": OnResume.NEVER,
        "lora": OnResume.NEVER,
    }
    language: str
    """A folder with a transformers causal language model and its tokenizer, or a hub name."""
    template: str = "{prompt}"
    """Text that the model gets, with {prompt} in place of the run's prompt. Its completion,
    stripped of whitespace, is the pipeline's prompt; rewards read the run's prompt."""
    system: str | None = None
    """As model.system."""
    stop: tuple[str, ...] = ()
    """As model.stop."""
    server: Server | None = None
    """As model.server."""
    gguf_file: NameInFolder | None = None
    """As model.gguf_file."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    device: Literal["auto", "cpu"] = "auto"
    """auto: the pipeline's device. cpu: the language model and its optimizer stay on the CPU."""
    lora: Annotated[
        Lora | None,
        BeforeValidator(lora_settings, json_schema_input_type=Lora | bool | int | None),
    ] = Lora()
    """As model.lora."""

    @field_validator("template")
    @classmethod
    def _has_prompt(cls, value: str) -> str:
        if value.count("{prompt}") != 1:
            raise ValueError("needs {prompt} exactly once, in place of the run's prompt")
        return value

    def model(self) -> LanguageSettings:
        """The settings of the language model, as for a run without a pipeline."""
        return LanguageSettings(**{k: v for k, v in dict(self).items() if k != "template"})
