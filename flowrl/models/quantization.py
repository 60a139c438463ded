"""Quantized bases: configurations of diffusers and transformers, made from `model.quantization`."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import diffusers
import torch
import transformers
from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig
from diffusers.quantizers.quantization_config import GGUFQuantizationConfig
from torch import nn

from flowrl.errors import UserError
from flowrl.models.out_of_memory import out_of_memory
from flowrl.paths import find
from flowrl.settings.model.quantization import PIP_NAMES, Quantization

QUANTIZED = "model.quantization"


def pipeline_arguments(
    quantization: Quantization,
    index: Mapping[str, Any],
    denoisers: Sequence[str],
    source: str,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Arguments of a pipeline's `from_pretrained` that load its denoisers quantized.

    index   model_index.json: (library, class) by component
    Raises UserError for components that the pipeline does not have.
    """
    if quantization.file is not None:
        return {denoisers[0]: _from_gguf(quantization.file, index, denoisers, source, dtype)}
    libraries = {"diffusers": diffusers, "transformers": transformers}
    mapping: dict[str, Any] = {}
    for name in (*denoisers, *quantization.components):
        library = index[name][0] if name in index else None
        if library not in libraries:
            raise UserError(f"{QUANTIZED}.components: the pipeline has no model {name}")
        mapping[name] = configuration(quantization, libraries[library], dtype)
    return {"quantization_config": PipelineQuantizationConfig(quant_mapping=mapping)}


def _from_gguf(
    file: str, index: Mapping[str, Any], denoisers: Sequence[str], source: str, dtype: torch.dtype
) -> nn.Module:
    refuse_further_denoisers(file, denoisers)
    kind = getattr(diffusers, index[denoisers[0]][1])
    config = GGUFQuantizationConfig(compute_dtype=dtype)
    return kind.from_single_file(
        str(find(file)), config=source, subfolder=denoisers[0], quantization_config=config,
        dtype=dtype,
    )  # fmt: skip


def refuse_further_denoisers(file: str | None, denoisers: Sequence[str]) -> None:
    """UserError for a file of quantized weights and a pipeline with several denoisers."""
    if file is not None and len(denoisers) > 1:
        raise UserError(
            f"{QUANTIZED}.file: the pipeline has {' and '.join(denoisers)}, and a file holds one "
            "of them: choose another backend"
        )


def configuration(quantization: Quantization, library: Any, dtype: torch.dtype) -> Any:
    """The configuration class of `library` (diffusers or transformers), with its arguments.
    UserError for arguments that it does not take."""
    bits, arguments = quantization.bits, quantization.arguments
    if quantization.backend == "bitsandbytes":
        kind = library.BitsAndBytesConfig
        four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        precision = {f"load_in_{bits}bit": True} | (four if bits == 4 else {})
    elif quantization.backend == "torchao":
        kinds: Any = import_module("torchao.quantization")
        kind, precision = library.TorchAoConfig, {}
        weights = kinds.Int4WeightOnlyConfig if bits == 4 else kinds.Int8WeightOnlyConfig
        _known(quantization, weights)
        with _arguments(quantization):
            return kind(weights(**arguments))
    else:
        kind = library.QuantoConfig
        precision = {"weights_dtype" if library is diffusers else "weights": f"int{bits}"}
    _known(quantization, kind)
    with _arguments(quantization):
        return kind(**precision, **arguments)


def _known(quantization: Quantization, kind: Any) -> None:
    """UserError for arguments that the class does not name: some classes ignore them."""
    names = [n for n in inspect.signature(kind).parameters if n not in ("self", "kwargs")]
    for name in quantization.arguments:
        if name not in names:
            raise UserError(
                f"{QUANTIZED}.arguments: {quantization.backend} takes no {name}; it takes "
                f"{', '.join(names)}"
            )


@contextmanager
def _arguments(quantization: Quantization) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UserError(f"{QUANTIZED}.arguments: {quantization.backend}: {error}") from error


@contextmanager
def loading(quantization: Quantization | None) -> Iterator[None]:
    """Turns what a library refuses while it loads (no GPU, an old version) into a UserError."""
    try:
        yield
    except (ImportError, RuntimeError, NotImplementedError, AssertionError) as error:
        if quantization is None or out_of_memory(error):
            raise
        package = PIP_NAMES[quantization.backend][1]
        raise UserError(f"{QUANTIZED}: {package} cannot load this model: {error}") from error


def keep_differentiable(model: nn.Module, quantization: Quantization | None) -> None:
    """Keep bitsandbytes from packing weights of 4 bits for CPUs with AVX-512: products of packed
    weights have no gradient, and modules in evaluation mode pack theirs at the first call."""
    if quantization is None or quantization.backend != "bitsandbytes":
        return
    layers: Any = import_module("bitsandbytes.nn")
    for module in model.modules():
        if isinstance(module, layers.Linear4bit):
            vars(module)["support_avx512bf16_for_cpu"] = False


def refuse_quantized(module: Any, name: str) -> None:
    """UserError for a model that its own files quantize, whose weights cannot be trained."""
    if getattr(module, "hf_quantizer", None) is not None:
        raise UserError(
            f"model.lora: null trains all weights, and those of {name} are quantized: set "
            "model.lora"
        )
