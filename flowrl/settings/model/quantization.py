"""`model.quantization`: a frozen base whose linear layers have fewer bits."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from flowrl.errors import UserError
from flowrl.paths import find
from flowrl.settings.base import OnResume, Settings
from flowrl.settings.model.adapters import Lora
from rewards.perception.weight_files import damage_of
from rewards.rights import ReadFile

Backend = Literal["bitsandbytes", "torchao", "quanto", "gguf"]
PIP_NAMES: Mapping[Backend, tuple[str, str]] = {  # module, and what pip installs
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
    "torchao": ("torchao", "torchao"),
    "quanto": ("optimum.quanto", "optimum-quanto"),
    "gguf": ("gguf", "gguf"),
}


class Quantization(Settings):
    """Linear layers of the frozen base in fewer bits, as diffusers and transformers load them.
    Adapters, norms and embeddings keep their precision, and products are computed in model.dtype
    (QLoRA, arXiv:2305.14314)."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = dict.fromkeys(
        ("backend", "bits", "file", "components", "arguments"), OnResume.NEVER
    )
    backend: Backend
    """The library, which has to be installed. bitsandbytes needs a GPU for pipelines."""
    bits: Literal[4, 8] | None = None
    """Bits of a weight; of gguf, the file's. 4 bits are NF4 of bitsandbytes, and integers of the
    others."""
    file: ReadFile | None = None
    """The .gguf file of the denoiser's weights, for gguf; everything else is read from
    `pipeline`."""
    components: tuple[str, ...] = ()
    """Further components of a pipeline to quantize, such as text_encoder_3."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the library's configuration, such as bnb_4bit_use_double_quant."""

    @model_validator(mode="after")
    def _complete(self) -> "Quantization":
        gguf = self.backend == "gguf"
        if gguf != (self.file is not None):
            raise ValueError(
                "file: backend gguf needs the .gguf file of the denoiser"
                if gguf
                else f"file: {self.backend} quantizes the model's own weights: leave it out"
            )
        if gguf != (self.bits is None):
            raise ValueError(
                "bits: a GGUF file has its own: leave it out"
                if gguf
                else f"bits: {self.backend} needs 4 or 8"
            )
        if gguf and (self.components or self.arguments):
            raise ValueError("backend gguf takes a file alone: leave components and arguments out")
        return self

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a quantized weight. NF4 has a float32 scale for each 64 weights; scales of whole
        rows are left out."""
        assert self.bits is not None, "a GGUF file has sizes of its own"
        scales = 4 / 64 if (self.backend, self.bits) == ("bitsandbytes", 4) else 0
        return self.bits / 8 + scales

    def check_adapters(self, lora: Lora | None) -> None:
        """ValueError for a run that trains the quantized weights, or adds adapters to them."""
        if lora is None:
            raise ValueError(
                "quantization: quantized weights take no gradient, and lora: null trains all "
                "weights: train adapters, or leave it out"
            )
        if lora.merge != "none":
            raise ValueError(
                "quantization: adapters cannot be summed with quantized weights: set lora.merge: "
                "none"
            )

    def check(self) -> None:
        """UserError for a file or a package that does not exist."""
        if self.file is not None and not find(self.file).is_file():
            raise UserError(f"model.quantization: there is no file {self.file}")
        if self.file is not None and (damage := damage_of(find(self.file))):
            raise UserError(f"model.quantization: {self.file} {damage}")
        module, package = PIP_NAMES[self.backend]
        if find_spec(module.partition(".")[0]) is None or find_spec(module) is None:
            raise UserError(f"model.quantization: {self.backend} needs: pip install {package}")
