"""The model that is trained, and the arguments of its calls."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from flowrl.settings.base import OnResume, Settings
from flowrl.settings.environment import EnvironmentSettings
from flowrl.settings.levels import Sigmas, checked_sigmas
from flowrl.settings.own_model import OwnModelSettings
from flowrl.settings.server import Server
from flowrl.settings.short_forms import adapter_settings, guidance_settings, lora_settings

GuidanceScale = Annotated[float, Field(ge=0)] | Literal["none"] | None


class Guidance(Settings):
    """Classifier-free guidance scales. `none` means no guidance, at the scale that is measured
    when the model opens: 1 for most pipelines, 0 for Z-Image and Krea2. A number is the pipeline's
    own scale; null is its default (7.0 for StableDiffusion3Pipeline), also if its call takes no
    scale.

    A matching loss regresses the velocity itself, so AWM, NFT and DPO need `train: none`.
    """

    sample: GuidanceScale = 1.0
    """Guidance scale of training samples and of evaluations."""
    train: GuidanceScale = 1.0
    """Guidance scale of the rows that the loss is computed on."""


class Lora(Settings):
    """Adapters (low-rank updates) of linear layers."""

    start: str | None = Field(default=None, alias="from")
    """Adapters to begin with: a file or a folder that the pipeline's load_lora_weights or peft
    reads, or a hub name. They have their own rank, alpha and targets; `ref` is this start."""
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: tuple[str, ...] | None = None
    """Names of linear layers; null: attention and feed-forward layers of the blocks."""
    vision: bool = False
    """Whether the part of a vision-language model that reads images has adapters too."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the adapters' products; the optimizer steps float32 weights in any. auto: bfloat16 with
    model.dtype: bfloat16, which is faster on a GPU and keeps no float32 copies of inputs, else
    float32."""
    merge: Literal["none", "evaluation", "untrained", "sampling"] = "none"
    """Where adapters are merged into a second copy of the weights: in evaluations; also in steps of
    sampling that no density is stored of; or in all sampling, with train.recompute_old."""

    @model_validator(mode="after")
    def _own_form(self) -> "Lora":
        own = (self.rank, self.alpha, self.targets)
        if self.start is not None and own != (16, 32.0, None):
            raise ValueError(
                "from: these adapters have their own rank, alpha and targets: leave those out"
            )
        return self


class RewriterSettings(Settings):
    """The language model of a joint run, which writes the pipeline's prompts."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {"lora": OnResume.NEVER}
    language: str
    """A folder with a transformers causal language model and its tokenizer, or a hub name."""
    template: str = "{prompt}"
    """Text that the model is given, with {prompt} where the run's prompt stands. Its completion,
    without spaces at its ends, is the pipeline's prompt; rewards read the run's."""
    system: str | None = None
    """As model.system."""
    stop: tuple[str, ...] = ()
    """As model.stop."""
    server: Server | None = None
    """As model.server."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    device: Literal["auto", "cpu"] = "auto"
    """auto: the pipeline's. cpu: the language model stays on the CPU, with its optimizer."""
    lora: Annotated[
        Lora | None,
        BeforeValidator(lora_settings, json_schema_input_type=Lora | bool | int | None),
    ] = Lora()
    """As model.lora."""

    @field_validator("template")
    @classmethod
    def _has_prompt(cls, value: str) -> str:
        if value.count("{prompt}") != 1:
            raise ValueError("needs {prompt} once, where the run's prompt stands")
        return value

    def model(self) -> "ModelSettings":
        """The settings as those of a run of the language model alone."""
        return ModelSettings(**{k: v for k, v in dict(self).items() if k != "template"})


class FrozenAdapter(Settings):
    """Someone else's adapters, merged into the base before anything else: a style, or a student
    that needs few steps (Lightning, Hyper)."""

    path: str
    """A .safetensors file or a folder for the pipeline's load_lora_weights, or a hub name."""
    scale: float = 1.0
    component: Literal["transformer_2"] | None = None
    """transformer_2: the second expert's, of a pipeline with two (Wan 2.2)."""


class Vae(Settings):
    """Memory savings for a decoder that does not fit: decode one tile, or one sample, at a time."""

    tiling: bool = False
    slicing: bool = False


class EncodingSettings(Settings):
    """Caching of prompt encodings across iterations. Each prompt is then encoded alone."""

    keep: Literal["no", "cpu", "disk"] = "no"
    """no: encode the prompts of an iteration together, in each iteration. cpu: keep encodings in
    the CPU's memory. disk: in temporary files."""
    most: int = Field(default=2048, ge=1)
    """Most MiB that are kept; the encodings that were not used for longest go first."""


class ModelSettings(Settings):
    """A diffusers pipeline, a language model or a user's own model, with its arguments and its
    precision."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "gguf_file": OnResume.NEVER,
        "weights": OnResume.NEVER,
        "lora": OnResume.NEVER,
        "adapters": OnResume.NEVER,
        "offload": OnResume.FREE,
        "offload_experts": OnResume.FREE,
    }
    pipeline: str | None = None
    """A folder in diffusers' format, or a hub name. Set this, `language` or `own`."""
    language: str | None = None
    """A folder with a transformers causal language model and its tokenizer, or a hub name."""
    own: OwnModelSettings | None = None
    """A model of your own, FILE.py:NAME or {name: FILE.py:NAME, ...settings}."""
    weights: str | None = None
    """The safetensors file of `own`'s weights; null: those that it is made with."""
    gguf_file: str | None = None
    """The file of `language`'s folder that holds the weights, if they are GGUF."""
    system: str | None = None
    """Text of the chat template's system message, for prompts that have none of their own."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, such as {enable_thinking: false} of Qwen3."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the language model's own stop tokens. Rewards see the
    text before them."""
    server: Server | None = None
    """Server that generates the completions of training and of its evaluations; null: the model."""
    rewriter: RewriterSettings | None = None
    """Language model that writes the pipeline's prompts, for the recipe joint."""
    environment: EnvironmentSettings | None = None
    """Function that replies to the language model between its turns; null: one turn."""
    height: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """float64 is for proofs: a difference of 1e-10 there is an error, and not rounding."""
    head_dtype: Literal["float32"] | None = None
    """float32: a language model of half precision computes its logits in float32, and trains an
    untied head in it, for log-probabilities of less rounding. null: model.dtype."""
    tf32: bool | None = None
    """On CUDA, round the inputs of float32 products and convolutions to TF32 (10 bits), which is
    faster; null: torch's own (convolutions alone). It holds for the whole process."""
    device: str = "auto"
    lora: Annotated[
        Lora | None,
        BeforeValidator(lora_settings, json_schema_input_type=Lora | bool | int | None),
    ] = Lora()
    """null trains all weights of the denoiser or of the language model. A number is the rank."""
    adapters: tuple[
        Annotated[
            FrozenAdapter,
            BeforeValidator(adapter_settings, json_schema_input_type=FrozenAdapter | str),
        ],
        ...,
    ] = ()
    """Adapters that are merged into the base, below the trained ones: FILE, or {path, scale}."""
    guidance: Annotated[
        Guidance,
        BeforeValidator(guidance_settings, json_schema_input_type=Guidance | GuidanceScale),
    ] = Guidance()
    """Classifier-free guidance; one number, or none, is that of sampling and of training."""
    call: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the pipeline's own call, such as max_sequence_length."""
    sigmas: Sigmas | None = None
    """Noise levels in place of the pipeline's own: {shift: 3.0}, evenly spaced ones with a shift; a
    list that falls from at most 1, one per step (the final 0 may be left out); or FILE.py:FUNCTION,
    which maps a number of steps to such a list. For flows whose call takes `sigmas`."""
    offload: bool = False
    """Keep text encoders, image encoders and VAE on the CPU while they are not used."""
    offload_experts: bool = False
    """Of a pipeline with two denoisers (Wan 2.2), keep the one that is not called on the CPU."""
    encodings: EncodingSettings = EncodingSettings()
    vae: Vae = Vae()
    attention: str | None = None
    """Attention backend of diffusers (native, flash, flex, xformers, ...); of a language model
    transformers' `attn_implementation` (sdpa, eager, flash_attention_2, ...)."""
    compile: bool | Literal["auto"] = False
    """torch.compile of the denoiser's repeated blocks. auto: on CUDA alone, until the first ratio
    leaves its limit."""
    context_parallel: int = Field(default=1, ge=1)
    """Processes that share each call of the denoiser, with a part of its tokens each: for videos
    and images whose activations do not fit into one process."""

    @property
    def half_adapters(self) -> bool:
        """Whether adapters compute in bfloat16, beside float32 masters."""
        own = None if self.lora is None else self.lora.dtype
        return own == "bfloat16" or (own == "auto" and self.dtype == "bfloat16")

    @property
    def source(self) -> str:
        """The folder, the hub name, or FILE.py:NAME."""
        return self.pipeline or self.language or ("" if self.own is None else self.own.name)

    @property
    def given_adapters(self) -> dict[str, str]:
        """Someone else's adapters, by the setting that names them."""
        named = {f"model.adapters, {i + 1}": each.path for i, each in enumerate(self.adapters)}
        begun = None if self.lora is None else self.lora.start
        return named if begun is None else named | {"model.lora.from": begun}

    @field_validator("sigmas", mode="before")
    @classmethod
    def _levels(cls, value: Any) -> Any:
        return checked_sigmas(value)

    @field_validator("call")
    @classmethod
    def _no_eta(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "eta" in value:
            raise ValueError(
                "eta has no effect, since recipes set the noise of a step: leave it out"
            )
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> "ModelSettings":
        kinds = {"pipeline": self.pipeline, "language": self.language, "own": self.own}
        set_ = [name for name, value in kinds.items() if value is not None]
        if len(set_) != 1:
            raise ValueError("set either pipeline (images, video), language (text) or own")
        of = {
            "pipeline": {"height", "width", "guidance", "call", "sigmas"}
            | {
                "adapters",
                "encodings",
                "rewriter",
                "offload",
                "offload_experts",
                "vae",
                "attention",
                "compile",
                "context_parallel",
            },
            "language": {"gguf_file", "head_dtype", "system", "template", "stop", "server"}
            | {"environment", "attention"},
            "own": {"sigmas", "weights"},
        }
        known = of[set_[0]]
        for name in sorted({name for names in of.values() for name in names} - known):
            if getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True, validated_data={}
            ):
                other = next(kind for kind, names in of.items() if name in names)
                raise ValueError(f"{name} is a setting of {other} models: leave it out")
        if self.context_parallel > 1 and (self.compile or self.attention not in (None, "native")):
            raise ValueError(
                f"context_parallel: {self.context_parallel} needs diffusers' native attention "
                "without compilation: leave attention and compile out"
            )
        if self.lora is not None and self.lora.dtype == "bfloat16" != self.dtype:
            raise ValueError(
                f"lora.dtype: bfloat16 adapters of a {self.dtype} model would lose its "
                "precision: set model.dtype: bfloat16, or leave lora.dtype out"
            )
        if self.head_dtype and self.dtype not in ("bfloat16", "float16"):
            raise ValueError(
                f"head_dtype: {self.head_dtype} is for models of half precision, and model.dtype "
                f"is {self.dtype}: leave it out"
            )
        if self.offload_experts and self.lora is None:
            raise ValueError(
                "offload_experts: all weights are trained (lora: null), so optimizers need "
                "them in place; train adapters, or leave it out"
            )
        if self.offload_experts and (self.compile or self.context_parallel > 1):
            other = "compile" if self.compile else "context_parallel"
            raise ValueError(
                "offload_experts moves weights between calls, which is incompatible with "
                f"{other}: leave one of the two out"
            )
        if self.offload_experts and self.lora is not None and self.lora.merge != "none":
            raise ValueError(
                "offload_experts moves weights between calls, which is incompatible with "
                "lora.merge: leave one of the two out"
            )
        if self.server is not None and self.lora is not None and self.lora.merge != "none":
            raise ValueError(
                "lora.merge changes the model's own calls, and the server generates the samples: "
                "leave it out"
            )
        if self.server is not None and self.server.sync == "lora" and self.lora is None:
            raise ValueError(
                "server.sync: lora sends adapters, but all weights are trained (lora: null); train "
                "adapters, or set server.sync: weights or none"
            )
        if self.server is not None and self.server.sync == "weights" and self.lora is not None:
            raise ValueError(
                "server.sync: weights sends all weights, but adapters are trained: set "
                "server.sync: lora"
            )
        return self
