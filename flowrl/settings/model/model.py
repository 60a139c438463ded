"""The model that is trained, and the arguments of its calls."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from flowrl.settings.base import OnResume, Settings
from flowrl.settings.model.adapters import FrozenAdapter, Lora
from flowrl.settings.model.environment import EnvironmentSettings, StepSettings
from flowrl.settings.model.form import FolderRights, PipelineForm, with_form
from flowrl.settings.model.levels import Sigmas, checked_sigmas
from flowrl.settings.model.own_model import OwnModelSettings
from flowrl.settings.model.quantization import Quantization
from flowrl.settings.model.server import Server
from flowrl.settings.words.exclusive import KIND_SETTINGS
from flowrl.settings.words.short_forms import (
    adapter_settings,
    guidance_settings,
    lora_settings,
    model_of_own,
)
from rewards.rights import KernelName, NameInFolder, ReadFile

GuidanceScale = Annotated[float, Field(ge=0)] | Literal["none"] | None


class Guidance(Settings):
    """Classifier-free guidance scales. `none` means no guidance, at a scale that is measured when
    the model is loaded: 1 for most pipelines, 0 for Z-Image and Krea2. A number is the pipeline's
    own scale; null is its default (7.0 for StableDiffusion3Pipeline), or no scale if its call takes
    none.

    A matching loss (AWM, NFT, DPO and their kin) regresses the velocity itself, so a guided `train`
    is refused there. A loss on ratios compares densities of one policy, so `train` equals `sample`.
    """

    sample: GuidanceScale = 1.0
    """Guidance scale for training samples and evaluations."""
    train: GuidanceScale | Literal["auto"] = "auto"
    """Guidance scale for the rows on which the loss is computed. auto: none in recipes with a
    matching loss, whose samples may be guided all the same, and `sample` in all others."""


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

    def model(self) -> "ModelSettings":
        """The settings of the language model, as for a run without a pipeline."""
        return ModelSettings(**{k: v for k, v in dict(self).items() if k != "template"})


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
    """Maximum MiB to keep; the least recently used encodings are dropped first."""


class ModelSettings(Settings):
    """A diffusers pipeline, a language model or a user's own model, with its arguments and its
    precision."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "gguf_file": OnResume.NEVER,
        "weights": OnResume.NEVER,
        "lora": OnResume.NEVER,
        "adapters": OnResume.NEVER,
        "scheduler": OnResume.NEVER,
        "form": OnResume.NEVER,
        "guider": OnResume.NEVER,
        "rights": OnResume.FREE,
        "offload": OnResume.FREE,
        "offload_experts": OnResume.FREE,
    }
    pipeline: str | None = None
    """A folder in diffusers' format, or a hub name. Set this, `language` or `own`."""
    form: PipelineForm = "classic"
    """How the pipeline is driven: by its call, or as a modular pipeline, by its blocks. A folder
    with modular_model_index.json alone is modular."""
    guider: dict[str, Any] | None = None
    """Guider of a modular pipeline, {name: CLASS, ...settings}, whose scale is `guidance`; null:
    that of its blocks, which a run's run.yaml names."""
    rights: FolderRights = ()
    """Rights of a modular pipeline's folder: code, to run blocks that it brings; network, to load
    components from other repositories that its index names."""
    language: str | None = None
    """A folder with a transformers causal language model and its tokenizer, or a hub name."""
    own: Annotated[
        OwnModelSettings | None,
        BeforeValidator(model_of_own, json_schema_input_type=OwnModelSettings | str | None),
    ] = None
    """Your own model, FILE.py:NAME or {name: FILE.py:NAME, ...settings}."""
    weights: ReadFile | None = None
    """A safetensors file with the weights of `own`; null: the weights that it is created with."""
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
    rewriter: RewriterSettings | None = None
    """Language model that writes the pipeline's prompts, for the recipe joint."""
    environment: EnvironmentSettings | None = None
    """Function that replies to the language model between its turns; null: one turn."""
    steps: StepSettings | None = None
    """Separator of a completion's steps, each with rewards of its own; null: one step."""
    height: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """float64 is for proofs, where a difference of 1e-10 is an error rather than rounding."""
    head_dtype: Literal["float32"] | None = None
    """float32: a half-precision language model computes its logits in float32, and trains an untied
    head in float32, for more accurate log-probabilities. null: model.dtype."""
    tf32: bool | None = None
    """On CUDA, round the inputs of float32 products and convolutions to TF32 (10 bits), which is
    faster; null: torch's default (only convolutions). It applies to the whole process."""
    cudnn_attention: bool = False
    """On CUDA, let PyTorch's attention use cuDNN, its default on newer GPUs. Off, since its
    backward pass has returned NaN for some lengths (PyTorch's issue 196678). It applies to the
    whole process."""
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
    """Adapters that are merged into the base weights, below the trained adapters: FILE, or {path,
    scale}."""
    quantization: Quantization | None = None
    """The frozen base in 8 or 4 bits, below adapters: {backend: bitsandbytes, bits: 4}."""
    guidance: Annotated[
        Guidance,
        BeforeValidator(guidance_settings, json_schema_input_type=Guidance | GuidanceScale),
    ] = Guidance()
    """Classifier-free guidance; one number, or none, applies to both sampling and training."""
    call: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of the pipeline's own call, such as max_sequence_length."""
    sigmas: Sigmas | None = None
    """Noise levels in place of the pipeline's own: {shift: 3.0}, evenly spaced levels with a shift;
    a list that decreases from at most 1, one per step (the final 0 may be left out); or
    FILE.py:FUNCTION, which maps a number of steps to such a list. For flows whose call takes
    `sigmas`."""
    scheduler: dict[str, Any] = Field(default_factory=dict)
    """Settings of the pipeline's scheduler in place of its folder's, such as {flow_shift: 12.0}."""
    offload: bool = False
    """Keep text encoders, image encoders and VAE on the CPU while they are not used."""
    offload_experts: bool = False
    """For a pipeline with two denoisers (Wan 2.2), keep the unused one on the CPU."""
    encodings: EncodingSettings = EncodingSettings()
    vae: Vae = Vae()
    attention: KernelName | None = None
    """Attention backend of diffusers (native, flash, flex, xformers, ...); for a language model,
    transformers' `attn_implementation` (sdpa, eager, flash_attention_2, ...)."""
    compile: bool | Literal["auto"] = False
    """Compile the denoiser's repeated blocks with torch.compile. auto: only on CUDA, and off if the
    noise floor of the first ratio exceeds the clip range."""
    context_parallel: int = Field(default=1, ge=1)
    """Number of processes that share each call of the denoiser, each with a part of the tokens: for
    videos and images whose activations do not fit into one process."""

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
        """Existing adapters, by the setting that names them."""
        named = {f"model.adapters, {i + 1}": each.path for i, each in enumerate(self.adapters)}
        begun = None if self.lora is None else self.lora.start
        return named if begun is None else named | {"model.lora.from": begun}

    @model_validator(mode="before")
    @classmethod
    def _named_form(cls, data: Any) -> Any:
        return with_form(data)

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
        known = KIND_SETTINGS[set_[0]]
        for name in sorted({name for names in KIND_SETTINGS.values() for name in names} - known):
            if getattr(self, name) != type(self).model_fields[name].get_default(
                call_default_factory=True, validated_data={}
            ):
                other = next(kind for kind, names in KIND_SETTINGS.items() if name in names)
                raise ValueError(f"{name} is a setting of {other} models: leave it out")
        if self.form == "classic" and (self.guider is not None or self.rights):
            name = "rights" if self.guider is None else "guider"
            raise ValueError(
                f"{name} belongs to modular pipelines: set form: modular, or leave it out"
            )
        if self.quantization is not None:
            self._fits(self.quantization)
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
                f"head_dtype: {self.head_dtype} is for half-precision models, but model.dtype is "
                f"{self.dtype}: leave it out"
            )
        return self

    def _fits(self, quantization: Quantization) -> None:
        """ValueError for settings that a quantized base excludes."""
        if self.lora is None:
            raise ValueError(
                "quantization: quantized weights take no gradient, and lora: null trains all "
                "weights: train adapters, or leave it out"
            )
        if self.lora.merge != "none":
            raise ValueError(
                "quantization: adapters cannot be summed with quantized weights: set lora.merge: "
                "none"
            )
        for name in ("adapters", "offload_experts"):
            if getattr(self, name):
                raise ValueError(f"quantization excludes {name}: leave one of the two out")
        if self.offload and quantization.components:
            raise ValueError(
                "quantization: quantized components stay on their device, and offload moves them: "
                "leave components or offload out"
            )
        if self.language is not None and (
            quantization.backend == "gguf" or self.gguf_file is not None
        ):
            raise ValueError(
                "quantization: a language model's GGUF file (gguf_file) is read in full precision: "
                "choose bitsandbytes, torchao or quanto, with a folder of safetensors"
            )
        if self.language is not None and quantization.components:
            raise ValueError("quantization: components are those of a pipeline: leave them out")

    @model_validator(mode="after")
    def _together(self) -> "ModelSettings":
        """Settings that exclude each other."""
        if self.scheduler and self.sigmas is not None:
            raise ValueError(
                "scheduler: its levels would be replaced by those of sigmas: leave one of the two "
                "out"
            )
        if self.offload_experts and self.lora is None:
            raise ValueError(
                "offload_experts: all weights are trained (lora: null), so optimizers need them "
                "on the device; train adapters, or leave it out"
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
                "lora.merge changes the model's own calls, but the server generates the samples: "
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
