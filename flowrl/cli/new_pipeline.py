"""The files of `flowrl new --model PIPELINE`: by its name, by the family of its index, or by what
its class says."""

import inspect
from dataclasses import dataclass
from typing import Any

import diffusers

from flowrl.cli.families import FEW, Family, distilled, family_of, image_columns
from flowrl.cli.new_files import ClassDefaults, Files, image_files, known_files
from flowrl.models.description import describe
from flowrl.models.diffusers.call.traits.checks import guidance_argument
from flowrl.models.model_index import HubSilent, ModelIndex, read_index
from flowrl.models.public_configs import PUBLIC_MODELS
from flowrl.paths import CONFIGS_FOLDER, find
from flowrl.settings.checks.machine import check_pipeline
from flowrl.settings.file.inherit import read_tree
from flowrl.settings.model.pipeline import PipelineSettings


@dataclass(frozen=True)
class PipelineStart:
    """Files of a new run, and sentences on where their values come from.

    guesses  whether guidance, steps and sizes are not the checkpoint's own
    """

    files: Files
    notes: tuple[str, ...]
    guesses: bool


def pipeline_files(model: str, recipe: str | None) -> PipelineStart:
    """Files for a pipeline's folder or hub name. UserError for a name that the hub refuses."""
    if (published := known_model(model)) is not None:
        base, kind = published
        note = f"the model's settings come from {base}: see that file, and `flowrl plan`"
        return PipelineStart(
            known_files(model, recipe, base, image_columns(kind)), (note,), guesses=False
        )
    check_pipeline(model, PipelineSettings(pipeline=model).form)
    try:
        index = read_index(model)
    except HubSilent as silence:
        note = (
            f"{model} is assumed to be a diffusers pipeline, and nothing is known of it, since "
            f"{silence}: where there is a network, `hf download {model}` and this command again "
            "find its settings; use --text for a language model"
        )
        return PipelineStart(image_files(model, recipe or "nft"), (note,), guesses=True)
    family = family_of(index)
    if family is not None:
        return _of_family(model, recipe, index, family)
    files = image_files(model, recipe or "nft", _own(model, index))
    note = (
        f"{index.kind} has no configuration in flowrl: guidance, steps and sizes are the defaults "
        "of its class"
    )
    return PipelineStart(files, (note,), guesses=True)


def _of_family(model: str, recipe: str | None, index: ModelIndex, family: Family) -> PipelineStart:
    changes = {name: dict(section) for name, section in family.changes.items()}
    base = read_tree(find(family.file))[0]["model"]
    parameters = inspect.signature(getattr(diffusers, index.kind).__call__).parameters
    lacking = [name for name in ("height", "width") if name in base and name not in parameters]
    changes["model"] = {
        **dict.fromkeys(lacking), **family.sizes(index), **changes.get("model", {})
    }  # fmt: skip
    columns = family.images or image_columns(index.kind)
    files = known_files(model, recipe, family.file, columns, changes)
    of = base["pipeline"]
    note = f"its index names {index.kind}; settings come from {family.file}, made for {of}"
    notes = (note, f"changes of them for this class: {family.why}") if family.why else (note,)
    return PipelineStart(files, notes, guesses=True)


def _own(model: str, index: ModelIndex) -> ClassDefaults:
    """Settings that the class of a pipeline says, and its index."""
    described = describe(PipelineSettings(pipeline=model))
    assert described is not None and described.pipeline is not None, model
    parameters = inspect.signature(described.kind.__call__).parameters
    argument = guidance_argument(parameters, list(described.denoisers.values()))
    scale = None if argument is None else parameters[argument].default
    number = isinstance(scale, int | float)
    defaults: dict[str, Any] = {
        name: p.default for name, p in parameters.items() if isinstance(p.default, int | float)
    }
    few = distilled(index)
    steps = min(int(defaults.get("num_inference_steps", 50)), FEW if few else 1000)
    call = {name: defaults[name] for name in ("num_frames",) if name in defaults}
    if argument == "true_cfg_scale" and "negative_prompt" in parameters:
        call["negative_prompt"] = " "  # without one this scale has no effect
    guidance = f"{{sample: {float(scale):g}}}" if number else "null"
    source = "the default of its class" if number else "the pipeline's own"
    if few and number:
        guidance, source = "none", "it is distilled"
    video = "num_frames" in parameters
    return ClassDefaults(
        guidance=f"{guidance:<32}# {source}; see the model's card",
        sizes={name: defaults[name] for name in ("height", "width") if name in defaults},
        call=call,
        steps=steps,
        few=steps <= FEW,
        columns=() if index.modular else image_columns(index.kind),
        train=", gradient_checkpointing: true" + (", rows_per_call: 1" if video else ""),
        evaluate=f", steps: {steps}, guidance: "
        + ("none" if few and number else f"{float(scale):g}" if number else "null"),
    )


def known_model(model: str) -> tuple[str, str] | None:
    """flowrl's file `configs/models/...` for a hub name, or for a folder with the same name, and
    the name of the pipeline's class."""
    folder = find(model)
    name = folder.resolve().name if folder.is_dir() else model
    for path in sorted((CONFIGS_FOLDER / "models").glob("*.yaml")):
        tree, _ = read_tree(path)
        source = tree["model"].get("pipeline", "")
        if name.lower() in (source.lower(), source.rpartition("/")[2].lower()):
            return f"configs/models/{path.name}", str(PUBLIC_MODELS[source].pipeline)
    return None
