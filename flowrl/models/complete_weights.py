"""Components with all their weights: what a file lacks, transformers fills in with random numbers
and only logs, and diffusers leaves without values."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.models.modeling_utils import ModelMixin
from torch import nn
from transformers import PreTrainedModel

from flowrl.errors import UserError
from flowrl.settings.checks.model_files import pipeline_index, read_json
from rewards.perception.weight_files import absent, misfit

# of a component's own constructor, which may ask for more than its configuration
OF_CONSTRUCTORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
    NotImplementedError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
_HEAD = re.compile(r"(.+\.)?lm_head\..+")  # of an encoder, which a pipeline never reads


@contextmanager
def complete_weights(source: str) -> Iterator[None]:
    """UserError for a component of the pipeline `source`, loaded in the body, whose file lacks
    weights."""
    lacking = dict[str, list[str]]()
    original = vars(PreTrainedModel)["from_pretrained"]

    def loaded(kind: type, *words: Any, output_loading_info: bool = False, **given: Any) -> Any:
        model, info = original.__func__(kind, *words, output_loading_info=True, **given)
        missing = sorted(key for key in info["missing_keys"] if not _HEAD.fullmatch(key))
        if missing:
            lacking[kind.__name__] = missing
        return (model, info) if output_loading_info else model

    PreTrainedModel.from_pretrained = classmethod(loaded)  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = original  # type: ignore[method-assign]
    for kind, missing in lacking.items():
        raise UserError(f"model.pipeline: {source}: {lacks(missing, kind)}")


def refuse_meta(module: nn.Module, source: str) -> None:
    """UserError for a component of diffusers whose file lacks weights, which have no values."""
    missing = [name for name, tensor in module.state_dict().items() if tensor.is_meta]
    if missing:
        raise UserError(f"model.pipeline: {source}: {lacks(missing, type(module).__name__)}")


def check_fits(model: nn.Module, folder: Path, place: str) -> None:
    """UserError, which begins with `place`, for weights in a model's folder whose tensors have
    other shapes or types than the model's, which may be on the meta device. A folder without
    configuration, and files of a quantized model, are left to their reader."""
    if not (folder / "config.json").is_file() or _quantized(folder, place):
        return
    own = model.state_dict()
    for file in sorted(folder.glob("*.safetensors")):
        if what := misfit(file, own):
            raise UserError(
                f"{place}: {file} {what}: it belongs to another model; download the folder again"
            )


def _quantized(folder: Path, place: str) -> bool:
    return "quantization_config" in read_json(folder / "config.json", place)


def check_component_files(folder: Path, known: Mapping[str, nn.Module] = {}) -> None:
    """UserError, before any weights load, for files of a pipeline's components that lack weights,
    or are another model's. `known`: components on torch's meta device; others are built there, as
    far as their classes can be."""
    for name, kind in pipeline_index(folder).items():
        part = folder / name
        if not (part / "config.json").is_file() or not isinstance(kind, list):
            continue
        module = known[name] if name in known else unloaded(part, kind)
        if module is None:
            continue
        check_fits(module, part, "model.pipeline")
        if _quantized(part, "model.pipeline"):
            continue
        if isinstance(module, ModelMixin) and (missing := absent(part, module.state_dict())):
            raise UserError(f"model.pipeline: {folder}: {lacks(missing, type(module).__name__)}")


def unloaded(folder: Path, named: Sequence[Any]) -> nn.Module | None:
    """A component on torch's meta device, of its class at its folder's configuration; None for a
    class of another library, or one that cannot be built there."""
    library = {"diffusers": diffusers, "transformers": transformers}.get(str(named[0]))
    kind = None if library is None else getattr(library, str(named[1]), None)
    if kind is None:
        return None
    try:
        with torch.device("meta"):
            if library is diffusers:
                built = kind.from_config(read_json(folder / "config.json", "model.pipeline"))
            else:
                built = kind(kind.config_class.from_pretrained(folder))
    except (*OF_CONSTRUCTORS, OSError):  # a class's own constructor, which may ask for more
        return None
    return built


def lacks(missing: list[str], kind: str) -> str:
    """A sentence about weights that a model's files lack."""
    more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
    return (
        f"its files lack weights of {kind}, which would be random: {', '.join(missing[:2])}{more}: "
        "save the whole model with `save_pretrained`, or download it again"
    )
