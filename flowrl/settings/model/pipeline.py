"""`model: {pipeline: ...}`: a diffusers pipeline, with the arguments of its calls."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from flowrl.paths import find
from flowrl.settings.base import OnResume, Settings
from flowrl.settings.model.adapters import FrozenAdapter
from flowrl.settings.model.engine import EngineSettings
from flowrl.settings.model.form import (
    MODULAR_INDEX,
    PIPELINE_INDEX,
    FolderRights,
    PipelineForm,
    modular_alone,
    with_form,
)
from flowrl.settings.model.language import RewriterSettings
from flowrl.settings.model.levels import Sigmas, checked_sigmas
from flowrl.settings.model.model import ModelSettings
from flowrl.settings.model.quantization import Quantization
from flowrl.settings.words.short_forms import adapter_settings, guidance_settings
from rewards.rights import KernelName

GuidanceScale = Annotated[float, Field(ge=0)] | Literal["none"] | None


class Guidance(Settings):
    """Classifier-free guidance scales. `none` means no guidance, at a scale that is measured when
    the model is loaded: 1 for most pipelines, 0 for Z-Image and Krea2. A number is the pipeline's
    own scale; null is its default (7.0 for StableDiffusion3Pipeline). A call that takes no scale
    (HunyuanVideo-1.5, whose guider is a component) needs null, or none.

    A matching loss (AWM, NFT, DPO and their kin) regresses the velocity itself, so a guided `train`
    is refused there. A loss on ratios compares densities of one policy, so `train` equals `sample`.
    """

    sample: GuidanceScale = 1.0
    """Guidance scale for training samples and evaluations."""
    train: GuidanceScale | Literal["auto"] = "auto"
    """Guidance scale for the rows on which the loss is computed. auto: none in recipes with a
    matching loss, whose samples may be guided all the same, and `sample` in all others."""
    through: Literal["both", "cond"] = "both"
    """What a reward's gradient flows through where the velocity is guided: both predictions, or
    cond, the prompt's alone, which keeps the activations of one."""


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


class NamedPipeline(Settings):
    """The setting that names a pipeline. It is a class so that it comes before the settings of all
    models, in files and in help."""

    pipeline: str
    """A folder in diffusers' format, or a hub name. Set this, `language` or `own`."""


class PipelineSettings(ModelSettings, NamedPipeline):
    """A diffusers pipeline of images or videos."""

    KIND: ClassVar[str] = "pipeline"
    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        **ModelSettings.ON_RESUME,
        "adapters": OnResume.NEVER,
        "scheduler": OnResume.NEVER,
        "form": OnResume.NEVER,
        "guider": OnResume.NEVER,
        "rights": OnResume.FREE,
        "offload": OnResume.FREE,
        "offload_experts": OnResume.FREE,
    }
    form: PipelineForm = "classic"
    """How the pipeline is driven: by its call, or as a modular pipeline, by its blocks. A folder
    with modular_model_index.json alone is modular."""
    guider: dict[str, Any] | None = None
    """Guider of a modular pipeline, {name: CLASS, ...settings}, whose scale is `guidance`; null:
    that of its blocks, which a run's run.yaml names."""
    rights: FolderRights = ()
    """Rights of a modular pipeline's folder: code, to run blocks that it brings; network, to load
    components from other repositories that its index names."""
    rewriter: RewriterSettings | None = None
    """Language model that writes the pipeline's prompts, for the recipe joint."""
    height: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
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
    engine: EngineSettings | None = None
    """A sampler elsewhere that draws the samples of training: {own: FILE.py:NAME} or {url:
    http://localhost:8200}; null: the pipeline itself samples."""

    @property
    def source(self) -> str:
        return self.pipeline

    @property
    def configuration(self) -> str:
        if self.form == "classic":
            return PIPELINE_INDEX
        folder = find(self.pipeline)
        blocks = not folder.is_dir() or (folder / MODULAR_INDEX).is_file()
        return MODULAR_INDEX if blocks else PIPELINE_INDEX

    @property
    def given_adapters(self) -> dict[str, str]:
        named = {
            f"model.adapters, {i + 1}": adapter.path for i, adapter in enumerate(self.adapters)
        }
        return named | super().given_adapters

    @property
    def compiles(self) -> bool | Literal["auto"]:
        return self.compile

    @property
    def quantized(self) -> Quantization | None:
        return self.quantization

    @property
    def sharers(self) -> int:
        return self.context_parallel

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
    def _together(self) -> "PipelineSettings":
        """Settings that exclude each other."""
        if self.form == "classic" and (self.guider is not None or self.rights):
            name = "rights" if self.guider is None else "guider"
            raise ValueError(
                f"{name} belongs to modular pipelines: set form: modular, or leave it out"
            )
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
        if self.context_parallel > 1 and (self.compile or self.attention not in (None, "native")):
            raise ValueError(
                f"context_parallel: {self.context_parallel} needs diffusers' native attention "
                "without compilation: leave attention and compile out"
            )
        return self

    @model_validator(mode="after")
    def _fits_engine(self) -> "PipelineSettings":
        if self.engine is None:
            return self
        if self.lora is not None and self.lora.merge != "none":
            raise ValueError(
                "lora.merge changes the pipeline's own calls, but the engine draws the samples: "
                "leave it out"
            )
        if self.context_parallel > 1:
            raise ValueError(
                f"context_parallel: {self.context_parallel} shares the pipeline's own calls, but "
                "the engine draws the samples: leave one of the two out"
            )
        if self.rewriter is not None:
            raise ValueError(
                "rewriter: its prompts are written while samples are drawn, which an engine does "
                "elsewhere: leave engine out"
            )
        return self

    @model_validator(mode="after")
    def _fits_quantization(self) -> "PipelineSettings":
        if self.quantization is None:
            return self
        self.quantization.check_adapters(self.lora)
        if self.quantization.file is not None and self.form == "modular":
            classic = (
                f"give a folder with {PIPELINE_INDEX}"
                if modular_alone(self.pipeline)
                else "set form: classic"
            )
            raise ValueError(
                "quantization.file: a GGUF file is read in a pipeline's classic form: choose "
                f"another backend, or {classic}"
            )
        for name in ("adapters", "offload_experts"):
            if getattr(self, name):
                raise ValueError(f"quantization excludes {name}: leave one of the two out")
        if self.offload and self.quantization.components:
            raise ValueError(
                "quantization: quantized components stay on their device, and offload moves them: "
                "leave components or offload out"
            )
        return self
