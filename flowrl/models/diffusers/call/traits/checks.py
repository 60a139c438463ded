"""Checks of a pipeline before it runs: load it, check its arguments, refuse it."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import nn

from flowrl.errors import UserError
from flowrl.models import quantization
from flowrl.models.class_settings import check_keys
from flowrl.models.complete_weights import check_fits, complete_weights, refuse_meta
from flowrl.models.diffusers.call.drive.driver import DENOISERS, ENCODERS
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES
from flowrl.models.diffusers.call.inputs.columns import images
from flowrl.models.diffusers.call.levels.schedule import ModelOutput, edm_times
from flowrl.models.diffusers.call.levels.user_levels import UserLevels, refuse_levels
from flowrl.models.diffusers.modular.folder import ModularSource, set_scheduler
from flowrl.models.diffusers.modular.verdicts import refuse_known_modular
from flowrl.models.out_of_memory import out_of_memory, raise_memory
from flowrl.prompts.prompt_set import VIDEO_COLUMNS
from flowrl.settings.model.pipeline import GuidanceScale
from flowrl.settings.model.quantization import Quantization
from rewards.perception.hub import of_network

# arguments of __call__ that flowrl sets itself
OURS = frozenset(
    (
        "self", "prompt", "latents", "num_inference_steps", "generator", "output_type",
        "return_dict", "sigmas", "timesteps", "num_images_per_prompt", "num_videos_per_prompt",
        "callback_on_step_end", "callback_on_step_end_tensor_inputs",
    )
)  # fmt: skip

STAGED = "pyramid_num_inference_steps_list"  # of Helios' stages
IN_STAGES = (
    "steps each chunk in stages of growing resolution: between them it enlarges the state, and "
    "adds noise that no scheduler draws, so no state of one size goes through the loop; and its "
    "steps are a list, a number for each stage "
    f"({STAGED})"
)
PARTIAL = frozenset(("denoising_start", "denoising_end"))  # a base and its refiner share a list
Parameters = Mapping[str, inspect.Parameter]


def refuse_class(kind: type) -> None:
    """Raises UserError, with the reason, if no pipeline of this class can be driven."""
    name, parameters = kind.__name__, inspect.signature(kind.__call__).parameters
    if STAGED in parameters:
        raise UserError(f"{name} {IN_STAGES}")
    for argument in ("prompt", "num_inference_steps", "output_type"):
        if argument not in parameters:
            raise UserError(
                f"{name} takes no `{argument}`: its loop cannot be started at a given state"
            )
    if "latents" not in parameters and "prepare_latents" not in dir(kind):
        raise UserError(
            f"{name} has neither an argument `latents` nor prepare_latents: a state cannot be "
            "passed to it"
        )
    if not set(ENCODERS) & set(dir(kind)):
        raise UserError(f"{name} has no encode_prompt: prompts cannot be encoded once")


def refuse_parts(name: str, parts: Iterable[str]) -> None:
    if not set(parts) & set(DENOISERS):
        raise UserError(f"{name} has none of {', '.join(DENOISERS)}: there is nothing to train")


def refuse_pipeline(pipe: Any) -> None:
    """Raises UserError, with the reason, if the pipeline cannot be driven."""
    name = type(pipe).__name__
    refuse_parts(name, pipe.components)
    refuse_class(type(pipe))
    step = getattr(vars(pipe).get("scheduler"), "step", None)
    if not callable(step):
        raise UserError(
            f"{name} has no scheduler with a `step`: its integration cannot be observed"
        )
    takes = inspect.signature(step).parameters
    if not {"model_output", "timestep", "sample"} <= set(takes):
        raise UserError(
            f"{name}: its scheduler's step takes {', '.join(takes)} instead of model_output, "
            "timestep and sample: its integration cannot be observed"
        )


def prediction(scheduler: Any, owner: str) -> ModelOutput:
    """Kind of a model's prediction, from its scheduler's configuration.

    Raises UserError if the configuration does not determine it, or changes the prediction.
    """
    kind, config = type(scheduler).__name__, scheduler.config
    says = config.get("prediction_type")
    if kind.startswith("FlowMatch") or says == "flow_prediction":
        return "inverted" if config.get("invert_sigmas") else "flow"
    if says == "trigflow":
        return "v_prediction"  # cos t noise - sin t x0, at angles t in place of times
    for setting in ("clip_sample", "thresholding"):
        if config.get(setting):
            raise UserError(
                f"{owner}: {kind} has {setting} enabled, which changes the predicted clean "
                f"sample: set model.scheduler: {{{setting}: false}}"
            )
    if kind == "PNDMScheduler" and not config.get("skip_prk_steps"):
        raise UserError(
            f"{owner}: {kind} begins with Runge-Kutta steps of four calls each, which plans do "
            "not support: set model.scheduler: {skip_prk_steps: true}"
        )
    if says == "v_prediction" and config.get("sigma_data") == 1.0 and edm_times(scheduler):
        return says  # in EDM's formulation, c_in x is a variance-preserving state
    if says in ("epsilon", "v_prediction", "sample") and "alphas_cumprod" in vars(scheduler):
        return says
    if says is None and "alphas_cumprod" not in vars(scheduler) and "sigmas" in vars(scheduler):
        return "flow"  # the replay refuses it if its first step is not that of a flow
    raise UserError(
        f"{owner}: {kind} with prediction_type {says!r} does not determine the model's process: "
        "use one of diffusers' FlowMatch, DDIM, DDPM, Euler or DPM-Solver schedulers"
    )


def scheduler_of(pipe: Any, levels: UserLevels | None) -> Any:
    """Scheduler for driven calls: the pipeline's own, or a copy with the user's levels.

    Raises UserError if these levels cannot be set.
    """
    if levels is None:
        return pipe.scheduler
    name = type(pipe).__name__
    refuse_levels(name, inspect.signature(type(pipe).__call__).parameters)
    return levels.scheduler(pipe.scheduler, prediction(pipe.scheduler, name), name)


def needed_images(parameters: Parameters) -> list[list[str]]:
    """Sets of images that a pipeline may require, the most likely first:

    the images without a default; one image or one video, with a mask or a control; all images that
    it takes.
    """
    names = images(parameters)
    empty = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    still = [name for name in names if not VIDEO_COLUMNS.fullmatch(name)]
    moving = [name for name in names if VIDEO_COLUMNS.fullmatch(name)]
    masks = [name for name in still if "mask" in name]
    control = [name for name in names if "control" in name and name not in masks]
    pairs = [["image", *masks], ["image", *control], ["image", *masks, *control]]
    choices = [empty, ["image"], moving[:1], control, *pairs, moving, still, names]
    sets: list[list[str]] = []
    for choice in choices:
        whole = list(dict.fromkeys([*empty, *choice]))
        if choice and set(whole) <= set(names) and whole not in sets:
            sets.append(whole)
    return sets


def guidance_argument(parameters: Parameters, denoisers: Sequence[nn.Module]) -> str | None:
    """Name of the argument that `guidance` sets; None if there is none.

    Models with an embedded scale take it as `guidance_scale`; such pipelines have `true_cfg_scale`
    for classifier-free guidance (FLUX, Qwen-Image).
    """
    embedded = any(denoiser.config.get("guidance_embeds") for denoiser in denoisers)  # type: ignore
    names = ("guidance_scale",) if embedded else ("true_cfg_scale", "guidance_scale")
    return next((name for name in names if name in parameters), None)


def refuse_scale(owner: str, argument: str | None, scale: GuidanceScale) -> None:
    """UserError for a number as the guidance scale of a pipeline whose call has no argument for
    it."""
    if argument is None and isinstance(scale, int | float):
        raise UserError(
            f"{owner} takes no guidance scale: set model.guidance: null, since 1 is its default, "
            "and leave evaluate.guidance out (in Python: guidance=None)"
        )


def arguments(
    owner: str, call: Mapping[str, Any], parameters: Parameters, guidance: str | None
) -> dict[str, Any]:
    """The user's arguments of `__call__`, with their names checked."""
    for key in call:
        if key not in parameters:
            close = get_close_matches(key, list(parameters), n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise UserError(f"{owner} takes no argument {key!r}{hint}")
        if key in OURS or key == guidance:
            setters = {guidance: "guidance", "sigmas": "model.sigmas"}
            said = setters.get(key, "flowrl itself")
            raise UserError(f"{key!r} of {owner} is set by {said}: leave it out of `call`")
        if key in PARTIAL and call[key] is not None:
            raise UserError(
                f"{owner}: {key!r} leaves some noise levels to another pipeline, but flowrl "
                "samples all of them: leave it out of `call`"
            )
        if key.startswith(("prompt_embeds", "pooled_prompt_embeds")) and call[key] is not None:
            raise UserError(
                f"{owner}: {key!r} in `call` would apply to every prompt: leave it out, and write "
                "each prompt as a text, which the pipeline encodes"
            )
        if "ip_adapter" in key:
            raise UserError(f"{owner}: conditioning on {key!r} is not supported")
    for key, parameter in parameters.items():
        empty = parameter.default is inspect.Parameter.empty
        if (
            empty
            and key not in {*call, *OURS, *images(parameters)}
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ):
            raise UserError(f"{owner} cannot be called without {key!r}: set it in `call`")
    return dict(call)


def pipeline_class(index: Mapping[str, Any], source: str) -> Any:
    """The class that a model_index.json names. UserError for any but one of diffusers."""
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise UserError(
            f"{source}: model_index.json must name a class of diffusers, not {name!r}: pipelines "
            "with custom code cannot be loaded"
        )
    kind = getattr(diffusers, name, None)
    if kind is None:
        raise UserError(f"{source}: diffusers {diffusers.__version__} has no {name}")
    return kind


def with_settings(scheduler: Any, settings: Mapping[str, Any], owner: str) -> Any:
    """A scheduler with settings laid over its configuration. UserError for a setting that it does
    not have, or a value that it refuses."""
    kind = type(scheduler)
    check_keys(f"model.scheduler: the {kind.__name__} of {owner}", kind, settings)
    try:
        return kind.from_config(scheduler.config, **settings)
    except FAILURES as error:
        raise_memory(error)
        raise UserError(f"model.scheduler: {kind.__name__}: {error}") from error


def absent_parts(kind: Any, index: Mapping[str, Any]) -> dict[str, Any]:
    """None for each part of a pipeline's class that a folder's index lacks or lists as null (SD3
    without T5): diffusers' from_pretrained asks for them as arguments."""
    empty = (None, [None, None], (None, None))
    listed = {k for k, value in index.items() if not k.startswith("_") and value not in empty}
    expected, _ = kind._get_signature_keys(kind)
    return dict.fromkeys(set(expected) - listed)


def from_pretrained(
    source: str,
    dtype: torch.dtype,
    levels: UserLevels | None = None,
    quantized: Quantization | None = None,
    scheduler: Mapping[str, Any] = {},
) -> Any:
    """Load a pipeline; components that its index does not list are left out. `scheduler` are
    settings in place of those of its scheduler.

    Raises UserError, before weights are read, if `levels` cannot be set; and, with the reason, for
    a pipeline that cannot be loaded or that lacks weights.
    """
    try:
        index: Any = DiffusionPipeline.load_config(source)
    except Exception as error:
        if not of_network(error) and not isinstance(error, ValueError | RecursionError):
            raise
        raise UserError(f"{source!r} is not a diffusers pipeline: {error}") from error
    kind = pipeline_class(index, source)
    if levels is not None:
        refuse_levels(kind.__name__, inspect.signature(kind.__call__).parameters)
    load_arguments = absent_parts(kind, index)
    if quantized is not None:
        parts = [name for name in index if name in DENOISERS and name not in load_arguments]
        refuse_parts(kind.__name__, parts)
        load_arguments |= quantization.pipeline_arguments(quantized, index, parts, source, dtype)
    with quantization.loading(quantized), complete_weights(source), _loaded(source):
        pipe = kind.from_pretrained(source, dtype=dtype, **load_arguments)
    _check_whole(pipe, source)
    if scheduler:  # what is saved with the pipeline too
        pipe.scheduler = with_settings(pipe.scheduler, scheduler, kind.__name__)
    return pipe


def from_blocks(
    source: ModularSource,
    dtype: torch.dtype,
    levels: UserLevels | None = None,
    quantized: Quantization | None = None,
    scheduler: Mapping[str, Any] = {},
) -> Any:
    """Load a modular pipeline, with the face of a classic one, as `from_pretrained` does."""
    pipe = source.skeleton()
    name = type(pipe).__name__
    refuse_known_modular(name)
    if levels is not None:
        refuse_levels(name, inspect.signature(type(pipe).__call__).parameters)
    parts = [part for part in DENOISERS if part in pipe.components]
    refuse_parts(name, parts)
    configurations = None
    if quantized is not None:
        assert quantized.file is None, "the settings refuse it"
        libraries = {"diffusers": diffusers, "transformers": transformers}
        configurations = {
            part: quantization.configuration(quantized, libraries[library], dtype)
            for part, library in [(p, "diffusers") for p in parts]
            + [(p, "transformers") for p in quantized.components]
        }
    with quantization.loading(quantized), complete_weights(source.place), _loaded(source.place):
        pipe = source.load(dtype, configurations)
    _check_whole(pipe, source.place)
    if scheduler:
        set_scheduler(pipe, with_settings(pipe.scheduler, scheduler, name))
    return pipe


def _check_whole(pipe: Any, source: str) -> None:
    """UserError for a component without all of its weights, or with another model's."""
    for name, module in pipe.components.items():
        if isinstance(module, nn.Module):
            refuse_meta(module, source)
            if (folder := Path(source) / name).is_dir():
                check_fits(module, folder, "model.pipeline")


@contextmanager
def _loaded(source: str) -> Iterator[None]:
    """Turns errors of diffusers, transformers and file formats while loading into UserErrors."""
    try:
        yield
    except Exception as error:
        expected = isinstance(error, FAILURES) or of_network(error) or _of_file_format(error)
        if isinstance(error, UserError) or out_of_memory(error) or not expected:
            raise
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"model.pipeline: {source} cannot be loaded: {reason}") from error


def _of_file_format(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] in ("safetensors", "safetensors_rust", "pickle")
