"""A modular pipeline from its folder or hub name: its blocks first, then its components' weights.

`skeleton` builds the blocks and reads no weights. `load` names what is missing, and what needs a
right that the run does not have, before it reads any.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.modular_pipelines.modular_pipeline import ModularPipeline, ModularPipelineBlocks
from torch import nn

from flowrl.errors import UserError
from flowrl.models.class_settings import check_keys
from flowrl.models.diffusers.modular.face import (
    arguments_of,
    faced,
    loops_of,
    run_order,
    untalkative,
)
from flowrl.models.diffusers.modular.revisions import check_listed, load_component, pin
from flowrl.prompts.prompt_set import IMAGE_COLUMNS
from flowrl.settings.checks.model_files import check_weights, read_json
from flowrl.settings.model.form import BLOCKS_FILE, MODULAR_INDEX

PRETRAINED = "from_pretrained"


@dataclass(frozen=True)
class ModularSource:
    """A modular pipeline to load: its folder or hub name, the rights of that folder, the guider in
    place of its blocks' own (`model.guider`), and the names of the call's arguments that are given,
    since blocks run by what is given (LTX-2.5 guesses the frames of a video without a number)."""

    place: str
    rights: Collection[str] = ()
    guider: Mapping[str, Any] | None = None
    given: Collection[str] = ()

    def skeleton(self) -> Any:
        return skeleton(self.place, self.rights, self.guider)

    def revisions(self) -> dict[str, str]:
        """The repositories of components that are in no folder, "repository@commit" by name.
        UserError as `load` raises it, before any other repository is asked."""
        pipe = self.skeleton()
        check_components(pipe, self)
        return pin(_named(pipe, self.given), self.place)

    def load(self, dtype: torch.dtype, quantized: Mapping[str, Any] | None = None) -> Any:
        return load(self, dtype, quantized)


def skeleton(
    source: str, rights: Collection[str] = (), guider: Mapping[str, Any] | None = None
) -> Any:
    """The pipeline of a folder or hub name, with the face of a classic one, without weights.

    UserError for blocks that the repository brings, unless `rights` has code; for a classic folder
    whose class has no modular form; and for a guider that its blocks do not take.
    """
    _refuse_code(source, rights)
    with untalkative():
        try:
            pipe: Any = ModularPipeline.from_pretrained(source, trust_remote_code="code" in rights)
        except (AttributeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"model.form: modular: {source}: {reason}") from error
        if not list(loops_of(pipe._blocks)):
            raise UserError(f"model.form: modular: {source} names no blocks with a loop")
        _set_guider(pipe, guider)
        return faced(pipe)


def of_class(kind: type[ModularPipeline], guider: Mapping[str, Any] | None = None) -> Any:
    """The pipeline of a class's own blocks, with the face of a classic one, without components.
    UserError for a guider that its blocks do not take."""
    with untalkative():
        pipe = kind()
        _set_guider(pipe, guider)
        return faced(pipe)


def _refuse_code(source: str, rights: Collection[str]) -> None:
    file = Path(source) / BLOCKS_FILE
    if not file.is_file() or "code" in rights:
        return
    if read_json(file, "model.pipeline").get("auto_map"):
        raise UserError(
            f"model.pipeline: {source} brings blocks of its own (auto_map in {BLOCKS_FILE}), which "
            "are code: read them, then set model.rights: [code]"
        )


def _set_guider(pipe: ModularPipeline, guider: Mapping[str, Any] | None) -> None:
    """Replace the pipeline's guiders: all of them, or those that are named. UserError for one that
    does not exist, or does not fit."""
    if guider is None:
        return
    guiders = _guiders(pipe)
    if not guiders:
        raise UserError(f"model.guider: the blocks of {type(pipe).__name__} take no guider")
    wanted = dict.fromkeys(guiders, guider) if "name" in guider else guider
    new_guiders = {}
    for component, settings in wanted.items():
        if component not in guiders or not isinstance(settings, Mapping):
            raise UserError(
                f"model.guider: give {{name: CLASS, ...settings}}, or such for each of "
                f"{', '.join(guiders)}, not {component}"
            )
        arguments = dict(settings)
        kind = getattr(
            diffusers, str(arguments.pop("name", type(guiders[component]).__name__)), None
        )
        if not (isinstance(kind, type) and issubclass(kind, BaseGuidance)):
            raise UserError(
                f"model.guider: diffusers {diffusers.__version__} has no guider "
                f"{settings.get('name')!r}"
            )
        new_guiders[component] = _guider(guiders[component], kind, arguments)
    pipe.update_components(**new_guiders)


def _guider(current: BaseGuidance, kind: type[BaseGuidance], arguments: Mapping[str, Any]) -> Any:
    """A guider of a class with these settings, over those of the blocks' own if it is its class."""
    check_keys(f"model.guider: {kind.__name__}", kind, arguments)
    try:
        return current.new(**arguments) if type(current) is kind else kind(**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"model.guider: {kind.__name__}: {error}") from error


def _guiders(pipe: Any) -> dict[str, BaseGuidance]:
    return {n: part for n, part in pipe.components.items() if isinstance(part, BaseGuidance)}


def guiders_of(pipe: Any) -> dict[str, Any] | None:
    """The classes and settings of a pipeline's guiders by component, as `model.guider` takes them;
    None without any."""
    guiders = {
        component: {"name": type(part).__name__}
        | {key: value for key, value in part.config.items() if key[0] != "_"}
        for component, part in _guiders(pipe).items()
    }
    return guiders or None


def load(
    source: ModularSource, dtype: torch.dtype, quantized: Mapping[str, Any] | None = None
) -> Any:
    """Load a modular pipeline. `quantized` are configurations by component.

    UserError, before any weights are read, for what `check_components` refuses.
    """
    pipe = source.skeleton()
    check_components(pipe, source)
    named = list(_named(pipe, source.given))
    pin(named, source.place)
    for name, spec in named:
        check_listed(name, spec, source.place)
    components = {}
    for name, spec in named:
        arguments = {} if quantized is None or name not in quantized else {
            "quantization_config": quantized[name]
        }  # fmt: skip
        with untalkative():
            try:
                components[name] = load_component(
                    name, spec, source.place, dtype=dtype, **arguments
                )
            except UserError:
                raise
            except ValueError as error:
                reason = " ".join(str(error.__context__ or error).split())[:300]
                raise UserError(f"model.pipeline: {source.place}: {name}: {reason}") from error
    with untalkative():
        pipe.register_components(**components)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.eval()
    return pipe


def check_components(pipe: Any, modular: ModularSource) -> None:
    """UserError that names a component which the text blocks, the loop or the decoder need and the
    index lacks, whose files are missing, or that is in another repository, if the rights lack
    network."""
    source = modular.place
    wanted = needed(pipe._blocks, modular.given)
    named = dict(_named(pipe, modular.given))
    for name in wanted:
        spec = pipe._component_specs.get(name)
        if spec is None or spec.default_creation_method != PRETRAINED or name in named:
            continue
        kind = getattr(spec.type_hint, "__name__", "a model")
        raise UserError(
            f"model.pipeline: {source} has no {name} ({kind}), which {type(pipe).__name__} needs: "
            f"add it to {MODULAR_INDEX}, or give a whole folder"
        )
    for name, spec in named.items():
        path = str(spec.pretrained_model_name_or_path)
        folder = Path(path) / (spec.subfolder or "")
        if Path(path).is_dir():
            if not folder.is_dir():
                raise UserError(f"model.pipeline: {source} has no folder {folder} of its {name}")
            if _holds_weights(spec):
                check_weights(folder, "model.pipeline")
        elif path != source and "network" not in modular.rights:
            raise UserError(
                f"model.pipeline: {source} names {path} for its {name}, another repository, which "
                "is read over the network: download it into the folder, or set model.rights: "
                "[network]"
            )


def set_scheduler(pipe: ModularPipeline, scheduler: Any) -> None:
    """Replace the scheduler by one that saved folders contain, also where the blocks make theirs
    from settings of their own (FLUX.3)."""
    spec = pipe._component_specs["scheduler"]
    spec.default_creation_method = PRETRAINED
    with untalkative():
        pipe.update_components(scheduler=scheduler)


def needed(blocks: ModularPipelineBlocks, arguments: Collection[str] = ()) -> list[str]:
    """Names of the components of the blocks that run for a prompt and these arguments."""
    names = [
        str(c.name) for block in run_order(blocks, arguments) for c in block.expected_components
    ]
    return list(dict.fromkeys(names))


def components_reached(blocks: ModularPipelineBlocks, arguments: Collection[str] = ()) -> set[str]:
    """Names of the components of all branches that a prompt, its images and these arguments may
    choose.

    MiniMax-H3 has a second network for references, which only objects in Python can be.
    """
    images = [name for name in arguments_of(blocks) if IMAGE_COLUMNS.fullmatch(name)]
    names = set[str]()
    for more in ([], images, *([name] for name in images)):
        with suppress(ValueError):  # some blocks refuse two kinds of images at once
            names |= set(needed(blocks, {*arguments, *more}))
    return names


def _named(pipe: Any, arguments: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Components that are loaded: those of branches that may run, of which the index says where
    they are."""
    wanted = components_reached(pipe._blocks, arguments)
    for name, spec in pipe._component_specs.items():
        if name not in wanted:
            continue
        repository = spec.pretrained_model_name_or_path
        if spec.default_creation_method == PRETRAINED and repository:
            yield name, spec


def _holds_weights(spec: Any) -> bool:
    kind = spec.type_hint
    return isinstance(kind, type) and issubclass(kind, nn.Module)
