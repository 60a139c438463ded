"""Checks of the files in a model's local folder before any weights load: what is missing, cut off
or damaged. Only indices and headers are read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.bounded_files import bounded_bytes, parsed_json
from flowrl.errors import UserError
from flowrl.settings.model.form import MODULAR_INDEX, PIPELINE_INDEX, PipelineForm
from rewards.perception.contents import FIRST_BYTES, unlike_its_name
from rewards.perception.reachable import reachable, way_to_read
from rewards.perception.weight_files import (
    adapter_damage,
    check_shards,
    check_texts_beside,
    damage_of,
)

_WEIGHTS = re.compile(
    r"(model|pytorch_model|diffusion_pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)"
)
_VARIANT = re.compile(
    r"(?:model|pytorch_model|diffusion_pytorch_model)\.(\w+?)(?:-\d+-of-\d+)?\.(?:safetensors|bin)"
)
MOST_CONFIGURATION = 2**24  # bytes
_CONFIGURATIONS = {"Scheduler": "scheduler_config.json"}  # by the end of a class's name
_VOCABULARIES = (
    "tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model", "vocab.txt",
    "sentencepiece.bpe.model", "spm.model", "sentencepiece.model",
)  # fmt: skip
ANOTHER = "load other weights, such as those of another checkpoint, or copy the folder again"
_SUFFIXES = (".safetensors", ".bin")  # of saved weights, the first that a folder has
_LIBRARIES = ("diffusers", "transformers")  # whose models have a config.json
NO_MODEL = re.compile(r"Tokenizer|Processor|Extractor|Scheduler|Guider|Guidance")


def read_json(file: Path, place: str) -> dict[str, Any]:
    """The object in a JSON file. UserErrors begin with `place`."""
    try:
        data = bounded_bytes(file, MOST_CONFIGURATION)
        damage = unlike_its_name(file.name, data[:FIRST_BYTES])
        content = parsed_json(data) if damage is None else {}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        way = way_to_read(file, error)
        raise UserError(f"{place}: {file} cannot be read ({reason}): {way}") from error
    if damage is not None:
        raise UserError(f"{place}: {file} cannot be read: it {damage}")
    if not isinstance(content, dict):
        raise UserError(f"{place}: {file} does not hold a JSON object: download it again")
    return content


def check_index(folder: Path, source: str, form: PipelineForm = "classic") -> None:
    """UserError for a folder without a pipeline's index. A modular pipeline's blocks also read a
    classic index."""
    if (folder / PIPELINE_INDEX).is_file():
        return
    if (folder / MODULAR_INDEX).is_file():
        if form == "modular":
            return
        raise UserError(
            f"model.pipeline: {source} has the index of a modular pipeline alone "
            f"({MODULAR_INDEX}): leave model.form out, or set it to modular"
        )
    raise UserError(f"model.pipeline: {source} has no {PIPELINE_INDEX}; give a diffusers folder")


def component_parts(folder: Path, form: PipelineForm) -> dict[str, str]:
    """The classes of a pipeline's components that have a folder of their own in its folder."""
    modular = form == "modular" and (folder / MODULAR_INDEX).is_file()
    index = read_json(folder / (MODULAR_INDEX if modular else PIPELINE_INDEX), "model.pipeline")
    named = {n: v for n, v in index.items() if n[0] != "_" and isinstance(v, list) and len(v) > 1}
    return {name: str(value[1]) for name, value in named.items() if (folder / name).is_dir()}


def scheduler_config(folder: Path, index: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The configuration of a pipeline's scheduler; empty without one. Its class is the one that the
    pipeline's index names, which is loaded from the file whatever class wrote it. UserErrors begin
    with `place`."""
    file = folder / "scheduler" / _CONFIGURATIONS["Scheduler"]
    if not file.is_file():
        return {}
    config, named = read_json(file, place), index.get("scheduler")
    if isinstance(named, list) and len(named) > 1 and named[1] is not None:
        config["_class_name"] = str(named[1])
    return config


def pipeline_index(folder: Path) -> dict[str, Any]:
    """A pipeline's model_index.json. UserError unless it names a class."""
    check_index(folder, str(folder))
    index = read_json(folder / PIPELINE_INDEX, "model.pipeline")
    if not isinstance(index.get("_class_name"), str):
        raise UserError(
            f"{folder}: model_index.json must name a class of diffusers, not "
            f"{index.get('_class_name')!r}: pipelines with custom code cannot be loaded"
        )
    return index


def check_no_own_code(folder: Path, place: str) -> None:
    """UserError for a language model whose class is code in its own folder (`auto_map`), which is
    never run. One that transformers has a class for too is loaded by that class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = read_json(folder / "config.json", place)
    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING:
        raise UserError(
            f"{place}: {folder} has code of its own (auto_map in its config.json), which flowrl "
            f"does not run, and transformers has no model {config.get('model_type')!r:.80}: use a "
            "model that transformers has, or wrap it as your own model (docs/own_models.md)"
        )


def check_pipeline_files(folder: Path, form: PipelineForm = "classic") -> None:
    """UserError for a component of a pipeline whose files could not be loaded."""
    check_text_files(folder, "model.pipeline")
    for name in component_parts(folder, form):
        check_text_files(folder / name, "model.pipeline")
    if form == "modular":
        for name, kind in component_parts(folder, form).items():
            if (folder / name / "config.json").is_file() and not NO_MODEL.search(kind):
                read_json(folder / name / "config.json", "model.pipeline")
                check_weights(folder / name, "model.pipeline")
        return
    for name, value in pipeline_index(folder).items():
        if name.startswith("_") or not isinstance(value, list) or None in value:
            continue
        part, kind = folder / name, str(value[-1])
        for ending, file in _CONFIGURATIONS.items():
            if kind.endswith(ending) and not read_json(part / file, "model.pipeline"):
                raise UserError(f"model.pipeline: {part / file} is empty: download it again")
        if "Tokenizer" in kind and not any((part / file).is_file() for file in _VOCABULARIES):
            raise UserError(
                f"model.pipeline: {part} has no vocabulary ({', '.join(_VOCABULARIES[:3])} or the "
                "like): download it again"
            )
        loadable = value[0] in _LIBRARIES or (part / "config.json").is_file()
        if loadable and not NO_MODEL.search(kind):
            config = read_json(part / "config.json", "model.pipeline")
            if value[0] == "diffusers" and not isinstance(config.get("_class_name"), str):
                raise UserError(
                    f"model.pipeline: {part / 'config.json'} names no class (_class_name): "
                    "download it again"
                )
            check_weights(part, "model.pipeline")


def check_text_files(folder: Path, place: str) -> None:
    """UserError, which begins with `place`, for a configuration, vocabulary or template in the
    folder itself that is not what its name says. Weights are left to `check_weights`, since a
    folder may have some that nothing loads."""
    try:
        check_texts_beside(folder)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from error


def check_weights(folder: Path, place: str) -> None:
    """UserError, which begins with `place`, if the folder's weights are missing, pointers of Git
    LFS, cut off, or shards without all others."""
    names = sorted(path.name for path in folder.iterdir())
    whole = [name for name in names if _WEIGHTS.fullmatch(name)]
    if not whole:
        variants = {match[1] for name in names if (match := _VARIANT.fullmatch(name))}
        variant = min(variants, default="")
        raise UserError(
            f"{place}: {folder} has only weights of the variant {variant}: load the model with "
            f"variant={variant!r}, and save it with `save_pretrained`"
            if variants
            else f"{place}: {folder} has no weights (model.safetensors, "
            "diffusion_pytorch_model.safetensors or the like): download them"
        )
    for form in _forms(whole):
        for name in form:
            if damage := damage_of(folder / name):
                raise UserError(f"{place}: {folder / name} {damage}")
        try:
            check_shards(folder, form)
        except ValueError as error:
            raise UserError(f"{place}: {error}") from error


def _forms(names: Sequence[str]) -> Iterator[list[str]]:
    """The files of each form in which a folder has a model's weights."""
    names_by_form = dict[tuple[str, str], list[str]]()
    for name in names:
        if match := _WEIGHTS.fullmatch(name):
            names_by_form.setdefault((match[1], match[3]), []).append(name)
    yield from names_by_form.values()


def check_saved(saved: Path, setting: str) -> None:
    """UserError, which begins with `setting`, for a file of weights, or a folder with one, that is
    missing or damaged as far as headers and configurations show. Other names than files are left to
    their reader."""
    with reachable(setting, saved, UserError):
        _check_saved(saved, setting)


def _check_saved(saved: Path, setting: str) -> None:
    if saved.is_file():
        _check_files([saved], setting)
        return
    if not saved.is_dir():
        return
    inside = [path for path in saved.iterdir() if path.is_dir() and not path.is_symlink()]
    for folder in (saved, *(inside if (saved / PIPELINE_INDEX).exists() else ())):
        paths = sorted(folder.iterdir())
        by_suffix = ([path for path in paths if path.suffix == suffix] for suffix in _SUFFIXES)
        files = next(filter(None, by_suffix), [])  # those beside them are not read
        _check_files(files, setting)
        try:
            check_texts_beside(folder)
            check_shards(folder, [path.name for path in files])
        except ValueError as error:
            raise UserError(f"{setting}: {error}") from error


def _check_files(files: list[Path], setting: str) -> None:
    for file in files:
        try:
            wrong = damage_of(file)
            if not wrong and file.suffix == ".safetensors":
                wrong = adapter_damage(file)
        except OSError as error:
            raise UserError(
                f"{setting}: {file} cannot be read ({error.strerror}): {way_to_read(file, error)}"
            ) from error
        if wrong:
            raise UserError(f"{setting}: {file} {wrong}, or {ANOTHER}")
