"""Settings of models of all kinds: precision, device and adapters."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, model_validator

from flowrl.settings.base import OnResume, Settings
from flowrl.settings.model.adapters import Lora
from flowrl.settings.model.quantization import Quantization
from flowrl.settings.words.short_forms import lora_settings


class ModelSettings(Settings):
    """A model with its precision and its adapters. Each kind of model is a class of its own, whose
    first setting names a model of the kind: `flowrl.settings.model.kinds` lists them."""

    KIND: ClassVar[str]  # the setting that names a model of this kind
    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {"lora": OnResume.NEVER}
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """float64 is for proofs, where a difference of 1e-10 is an error rather than rounding."""
    tf32: bool | None = None
    """On CUDA, round the inputs of float32 products and convolutions to TF32 (10 bits), which is
    faster; null: torch's default (only convolutions). It applies to the whole process."""
    cudnn_attention: bool | Literal["unmasked"] = False
    """On CUDA, let PyTorch's attention use cuDNN, its default on newer GPUs; unmasked: only in
    calls without a mask and with more than one query, since its backward pass has returned NaN for
    some lengths with a mask (PyTorch's issue 196678) and for one query (cudnn-frontend's 1072).
    Off, because torch 2.11 also returned wrong gradients where one model's come in two layouts, as
    FLUX.1's do: both other values now bring them into one, which no GPU has run yet. It applies to
    the whole process."""
    device: str = "auto"
    lora: Annotated[
        Lora | None,
        BeforeValidator(lora_settings, json_schema_input_type=Lora | bool | int | None),
    ] = Lora()
    """null trains all weights of the denoiser or of the language model. A number is the rank."""

    @property
    @abstractmethod
    def source(self) -> str:
        """The folder, the hub name, or FILE.py:NAME."""

    @property
    def configuration(self) -> str:
        """Name of the file with the configuration, in the folder `source`."""
        return "config.json"

    @property
    def half_adapters(self) -> bool:
        """Whether adapters compute in bfloat16, beside float32 masters."""
        if self.lora is None or self.lora.dora:  # DoRA's lengths need more digits
            return False
        dtype = self.lora.dtype
        return dtype == "bfloat16" or (dtype == "auto" and self.dtype == "bfloat16")

    @property
    def given_adapters(self) -> dict[str, str]:
        """Existing adapters, by the setting that names them."""
        begun = None if self.lora is None else self.lora.start
        return {} if begun is None else {"model.lora.from": begun}

    @property
    def compiles(self) -> bool | Literal["auto"]:
        """Whether blocks of the model are compiled; auto: only on CUDA."""
        return False

    @property
    def quantized(self) -> Quantization | None:
        """The quantization of the frozen base, if any."""
        return None

    @property
    def sharers(self) -> int:
        """Number of processes that share each call of the model."""
        return 1

    @model_validator(mode="after")
    def _precise_adapters(self) -> "ModelSettings":
        if self.lora is not None and self.lora.dtype == "bfloat16" != self.dtype:
            raise ValueError(
                f"lora.dtype: bfloat16 adapters of a {self.dtype} model would lose its "
                "precision: set model.dtype: bfloat16, or leave lora.dtype out"
            )
        return self
