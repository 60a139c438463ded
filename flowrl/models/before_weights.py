"""Refusals of a model's load, from its classes and configuration files alone.

Every command that starts or plans a run asks here, and loading asks the same functions again of
what was loaded. Denoisers are built on torch's meta device: their classes answer without weights.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
from torch import nn

from flowrl.errors import UserError
from flowrl.models import savings
from flowrl.models.complete_weights import check_component_files, check_fits
from flowrl.models.description import Description, describe, local_folder
from flowrl.models.diffusers.call.drive.driver import DENOISERS
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES
from flowrl.models.diffusers.call.levels.user_levels import refuse_levels
from flowrl.models.diffusers.call.traits import checks, verdicts
from flowrl.models.diffusers.lora.lora import chosen_targets
from flowrl.models.diffusers.memory.experts import refuse_single_denoiser
from flowrl.models.diffusers.modular.verdicts import refuse_known_modular
from flowrl.models.image_tokens.policy import ImageTokenPolicy
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.open import (
    check_image_steps,
    refuse_images,
    refuse_long_stops,
    refuse_sizes,
    text_use,
)
from flowrl.models.quantization import refuse_further_denoisers
from flowrl.settings import LanguageSettings, PipelineSettings, RunSettings
from flowrl.settings.checks.machine import reading_model
from flowrl.settings.checks.model_files import pipeline_index, read_json, scheduler_config
from flowrl.settings.model.form import PIPELINE_INDEX

TRIED = 64  # prompts of a file that its chat template renders before a start


def check_before_weights(run: RunSettings) -> None:
    """UserError for a model that this run could not drive or train, in the words of its load.
    Checks nothing of a model whose configuration is not on this machine."""
    m = run.model
    with reading_model(m):
        if isinstance(m, PipelineSettings):
            _check_pipeline(run, m)
        elif isinstance(m, LanguageSettings):
            if m.image is None:
                refuse_images(run, m.language)
            _check_language(run, m)
    if run.prompt_writer is not None:
        check_before_weights(run.prompt_writer)


def _check_pipeline(run: RunSettings, m: PipelineSettings) -> None:
    folder = local_folder(m.pipeline)
    if folder is not None and m.form == "classic" and (folder / PIPELINE_INDEX).is_file():
        index = pipeline_index(folder)
        kind = checks.pipeline_class(index, m.pipeline)
        empty = (None, [None, None])
        parts = [k for k, v in index.items() if not k.startswith("_") and v not in empty]
        checks.refuse_parts(kind.__name__, parts)
    described = describe(m)
    if described is None or described.pipeline is None:
        return
    kind = described.kind
    if described.in_blocks:
        refuse_known_modular(kind.__name__)
    checks.refuse_class(kind)
    verdicts.refuse_known(kind.__name__)
    parameters = inspect.signature(kind.__call__).parameters
    if m.sigmas is not None:
        refuse_levels(kind.__name__, parameters)
    if folder is not None:
        _check_scheduler(folder, kind.__name__, m)
    refuse_sizes(run, kind.__name__, parameters)
    call = {"height": m.height, "width": m.width, **m.call}
    configs = [SimpleNamespace(config=described.configs[n]) for n in DENOISERS
               if n in described.configs]  # fmt: skip
    guidance = checks.guidance_argument(parameters, configs)  # type: ignore[arg-type]
    if not described.in_blocks:  # a guider's scale is no argument of such a call
        for scale in (run.guidance.sample, run.training_guidance, run.evaluation_guidance):
            checks.refuse_scale(kind.__name__, guidance, scale)
    arguments = {key: value for key, value in call.items() if value is not None}
    checks.arguments(kind.__name__, arguments, parameters, guidance)
    try:
        checks.arguments(kind.__name__, arguments | run.evaluate.call, parameters, guidance)
    except UserError as error:
        raise UserError(f"evaluate.call: {error}") from error
    if (denoisers := _built(described)) is None:
        return
    _check_savings(run, m, kind, described)
    if folder is not None and described.modular is None:
        check_component_files(folder, denoisers)
    if m.lora is not None and m.lora.start is None:
        for denoiser in denoisers.values():
            chosen_targets(denoiser, m.lora.targets)


def _built(described: Description) -> Mapping[str, nn.Module] | None:
    """The denoisers on torch's meta device; None for a class that cannot be built there, whose
    settings its load judges."""
    try:
        return described.denoisers
    except UserError:
        raise
    except FAILURES:  # a class's own constructor, which may ask for values
        return None


def _check_scheduler(folder: Path, owner: str, m: PipelineSettings) -> None:
    """UserError for settings that the scheduler does not have, and for a configuration that does
    not determine the model's process."""
    if not (folder / m.configuration).is_file():  # a download that ended before it
        return
    index = read_json(folder / m.configuration, "model.pipeline")
    config = scheduler_config(folder, index, "model.pipeline")
    kind = getattr(diffusers, str(config.get("_class_name")), None)
    if kind is not None:
        scheduler = checks.with_settings(kind.from_config(config), m.scheduler, owner)
        checks.prediction(scheduler, owner)


def _check_savings(
    run: RunSettings, m: PipelineSettings, kind: type, described: Description
) -> None:
    denoisers = described.denoisers
    if m.attention is not None:
        savings.attention(denoisers.values(), m.attention)
    if m.compile is True:
        savings.refuse_without_blocks(denoisers.values())
    if run.train.gradient_checkpointing:
        savings.checkpoint_denoisers(denoisers.values())
    if m.quantized is not None:
        refuse_further_denoisers(m.quantized.file, list(denoisers))
    if m.offload_experts:
        refuse_single_denoiser(denoisers)
    if (m.vae.tiling or m.vae.slicing) and "vae" in described.configs:
        like = _named_like(kind, {"vae": described.component("vae")})
        savings.decoder(like, tiling=m.vae.tiling, slicing=m.vae.slicing)


def _named_like(kind: type, parts: Mapping[str, Any]) -> Any:
    """An object with these parts, whose class has the pipeline's name."""
    return type(kind.__name__, (SimpleNamespace,), {})(**parts)


def _check_language(run: RunSettings, m: LanguageSettings) -> None:
    """UserError for a language model without what a setting needs, and for prompts that its chat
    template refuses."""
    folder = local_folder(m.source)
    if folder is None or m.gguf_file is not None or not (folder / "config.json").is_file():
        return
    try:
        policy = _unloaded(str(folder), run, m)
    except UserError:
        raise
    except FAILURES:  # likewise
        return
    check_fits(policy.model, folder, "model.language")
    if isinstance(policy, ImageTokenPolicy):
        check_image_steps(policy, run)
    elif m.server is not None:
        refuse_long_stops(policy.stops)
    if run.train.gradient_checkpointing:
        policy.checkpoint_gradients()
    if m.lora is not None and m.lora.start is None:
        policy.add_lora(rank=1, alpha=1, targets=m.lora.targets, seed=0, dora=m.lora.dora)
    reads_images = isinstance(policy, CausalPolicy) and policy.vision is not None
    for place in run.prompts.given:
        if run.prompts.on_disk(place) and not reads_images:
            for text in run.prompts.read(place).texts[:TRIED]:
                policy.encode(text)


def _unloaded(
    source: str, run: RunSettings, m: LanguageSettings
) -> CausalPolicy | ImageTokenPolicy:
    if m.image is None:
        return CausalPolicy.without_weights(source, m.attention, text_use(run, m))
    return ImageTokenPolicy.without_weights(source, m.image, m.attention, text_use(run, m))
