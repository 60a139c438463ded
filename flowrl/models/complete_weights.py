"""Components with all their weights: what a file lacks, transformers fills in with random numbers
and only logs, and diffusers leaves without values."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from flowrl.errors import UserError

_HEAD = re.compile(r"(.+\.)?lm_head\..+")  # of an encoder, which a pipeline never reads


@contextmanager
def complete_weights(source: str) -> Iterator[None]:
    """UserError for a component of the pipeline `source`, loaded in the body, whose file lacks
    weights."""
    lacking = dict[str, list[str]]()
    original = vars(PreTrainedModel)["from_pretrained"]

    def loaded(kind: type, *words: Any, output_loading_info: bool = False, **named: Any) -> Any:
        model, info = original.__func__(kind, *words, output_loading_info=True, **named)
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


def lacks(missing: list[str], kind: str) -> str:
    """A sentence about weights that a model's files lack."""
    more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
    return (
        f"its files lack weights of {kind}, which would be random: {', '.join(missing[:2])}{more}: "
        "save the whole model with `save_pretrained`"
    )
