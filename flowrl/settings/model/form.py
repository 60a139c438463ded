"""The form of a diffusers pipeline: classic, a `__call__`, or modular, a tree of blocks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from flowrl.paths import find
from rewards.hub_names import names_repository
from rewards.rights import Mark, Right

PIPELINE_INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"
BLOCKS_FILE = "modular_config.json"  # of blocks that a repository brings

PipelineForm = Literal["classic", "modular"]
OwnBlocks = Mark(Right.CODE, "blocks that a repository brings", plain=lambda text: text != "code")
OtherRepositories = Mark(Right.NETWORK, "other repositories", plain=lambda text: text != "network")
FolderRights = Annotated[tuple[Literal["code", "network"], ...], OwnBlocks, OtherRepositories]


def modular_alone(source: Any) -> bool:
    """Whether a folder, or a hub name's cached files, have a modular index and no classic one."""
    if not isinstance(source, str) or not source:
        return False
    folder = find(source)
    if folder.is_dir():
        return (folder / MODULAR_INDEX).is_file() and not (folder / PIPELINE_INDEX).is_file()
    if not names_repository(source):
        return False
    return _cached(source, MODULAR_INDEX) and not _cached(source, PIPELINE_INDEX)


def _cached(source: str, name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(source, name), str)
    except OSError:  # the check of the model's files says why
        return False


def with_form(data: Any) -> Any:
    """The settings of a model, with `form: modular` where its index is modular alone."""
    if (
        isinstance(data, Mapping)
        and data.get("form") is None
        and modular_alone(data.get("pipeline"))
    ):
        return {**data, "form": "modular"}
    return data


def is_pipeline_folder(folder: Path) -> bool:
    """Whether a folder has the index of a pipeline, in either form."""
    return any((folder / name).is_file() for name in (PIPELINE_INDEX, MODULAR_INDEX))
