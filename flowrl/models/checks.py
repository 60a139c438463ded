"""What can be said of a pipeline before it runs: load it, check its arguments, refuse it."""

import inspect
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import diffusers
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import nn

from flowrl.errors import UserError
from flowrl.models.drive import DENOISERS

# arguments of __call__ that flowrl sets itself
OURS = frozenset(
    (
        "self", "prompt", "latents", "num_inference_steps", "generator", "output_type",
        "return_dict", "sigmas", "timesteps", "num_images_per_prompt", "num_videos_per_prompt",
        "callback_on_step_end", "callback_on_step_end_tensor_inputs",
    )
)  # fmt: skip
# texts of which a batch takes one a row
TEXTS = re.compile(r"(negative_)?prompt(_\d+)?")

Parameters = Mapping[str, inspect.Parameter]


def refuse(pipe: Any, parameters: Parameters) -> None:
    """Raises UserError for what cannot be driven, with the reason."""
    name = type(pipe).__name__
    parts = set(pipe.components)
    if not parts & set(DENOISERS):
        raise UserError(f"{name} has none of {', '.join(DENOISERS)}: there is nothing to train")
    for argument in ("latents", "prompt", "num_inference_steps", "output_type"):
        if argument not in parameters:
            raise UserError(
                f"{name} takes no `{argument}`: its loop cannot be entered from outside"
            )
    if "encode_prompt" not in dir(pipe):
        raise UserError(f"{name} has no encode_prompt: prompts cannot be encoded once")
    scheduler = vars(pipe).get("scheduler")
    if not callable(getattr(scheduler, "step", None)):
        raise UserError(f"{name} has no scheduler with a `step`: what it integrates cannot be seen")
    kind = type(scheduler).__name__
    config = scheduler.config  # type: ignore[union-attr]
    flow = kind.startswith("FlowMatch") or config.get("prediction_type") == "flow_prediction"
    if not flow:
        raise UserError(
            f"{name} samples with {kind}, which is not flow matching: models that predict epsilon "
            "or v are not supported yet"
        )
    if config.get("invert_sigmas"):
        raise UserError(
            f"{name}: {kind} with invert_sigmas runs from 0 to 1, which is not supported"
        )


def guidance_argument(parameters: Parameters, denoisers: Sequence[nn.Module]) -> str | None:
    """Name of the argument that `guidance` stands for; None if there is none.

    Models with an embedded scale take it as `guidance_scale`; beside them `true_cfg_scale` is the
    classifier-free one (FLUX, Qwen-Image).
    """
    embedded = any(denoiser.config.get("guidance_embeds") for denoiser in denoisers)  # type: ignore
    names = ("guidance_scale",) if embedded else ("true_cfg_scale", "guidance_scale")
    return next((name for name in names if name in parameters), None)


def arguments(
    owner: str, call: Mapping[str, Any], parameters: Parameters, guidance: str | None
) -> dict[str, Any]:
    """The user's arguments of `__call__`, checked by name."""
    for key in call:
        if key not in parameters:
            close = get_close_matches(key, list(parameters), n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise UserError(f"{owner} takes no argument {key!r}{hint}")
        if key in OURS or key == guidance:
            said = "guidance" if key == guidance else "flowrl itself"
            raise UserError(f"{key!r} of {owner} is set by {said}: leave it out of `call`")
        if "image" in key or "video" in key:
            raise UserError(f"{owner}: conditioning on {key!r} is not supported")
    for key, parameter in parameters.items():
        empty = parameter.default is inspect.Parameter.empty
        if (
            empty
            and key not in {*call, *OURS}
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ):
            raise UserError(f"{owner} cannot be called without {key!r}: give it in `call`")
    return dict(call)


def from_pretrained(source: str, dtype: torch.dtype) -> Any:
    """A pipeline; components that its index does not list are left out."""
    try:
        index: Any = DiffusionPipeline.load_config(source)
    except OSError as error:
        raise UserError(f"no diffusers pipeline at {source!r}: {error}") from error
    kind = getattr(diffusers, index["_class_name"], None)
    if kind is None:
        raise UserError(
            f"{source}: diffusers {diffusers.__version__} has no {index['_class_name']}"
        )
    # from_pretrained wants to be told even of what the index lists as null (SD3 without T5)
    empty = (None, [None, None], (None, None))
    listed = {k for k, value in index.items() if not k.startswith("_") and value not in empty}
    expected, _ = kind._get_signature_keys(kind)
    absent = dict.fromkeys(set(expected) - listed)
    return kind.from_pretrained(source, dtype=dtype, **absent)
