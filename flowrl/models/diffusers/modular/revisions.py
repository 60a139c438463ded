"""The repositories that a modular pipeline's components are in, each at one commit.

A folder's components are in the folder; those of a hub name, and those that an index names in other
repositories, are in repositories that change. Each repository's commit is asked for once, before
anything is loaded, so that all components of it are of one commit, which the run's folder records.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import list_repo_files, resolve_revision, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionResolutionError,
)

from flowrl.errors import UserError
from rewards.perception.hub import check_cached, from_hub, hub_silence, present_place
from rewards.perception.hub_cache import CachedRepository

UNREACHED = (HfHubHTTPError, RevisionResolutionError, OfflineModeIsEnabled, OSError)


@cache
def commit(repository: str, revision: str | None = None) -> str:
    """The commit of a repository's revision (None: of its main branch), asked for once a process;
    that of the hub's cache where the hub is silent, for which its own client waits without an end.
    Raises what the hub's client raises."""
    silent = hub_silence(repository) is not None
    if silent and revision is None:
        present_place(repository)  # which says so
    return resolve_revision(repository, revision=revision, local_files_only=silent).resolved


def pin(parts: Iterable[tuple[str, Any]], source: str) -> dict[str, str]:
    """Set the commits of components that are in repositories; return "repository@commit" by name.

    `parts` are names and specifications of components. UserError for a repository that is neither
    on the hub nor in its cache, or whose files there are damaged, locked or gone.
    """
    pinned = {}
    for name, spec in parts:
        repository = str(spec.pretrained_model_name_or_path)
        if Path(repository).is_dir():
            continue
        stored = CachedRepository(repository, whole=True, revision=spec.revision)
        place = f"model.pipeline: the {name} of {source}"
        with from_hub(place, stored, UserError):
            try:
                if spec.revision is None:  # what is looked at is the main branch
                    check_cached(place, stored, UserError)
                spec.revision = commit(repository, spec.revision)
            except UNREACHED as error:
                if (raised := stored.raised(error)) is not None:
                    raise UserError(f"{place}: {raised}") from error
                reason = " ".join(str(error).split())[:200]
                raise UserError(
                    f"{place} is in {repository}, which is neither on the hub nor in its cache "
                    f"({reason}): download it with {stored.command()}"
                ) from error
        pinned[name] = f"{repository}@{spec.revision}"
    return pinned


def check_listed(name: str, spec: Any, source: str) -> None:
    """UserError for a component whose repository has no such folder; without a network, the load
    finds it."""
    repository, folder = str(spec.pretrained_model_name_or_path), spec.subfolder
    if not folder or Path(repository).is_dir():
        return
    if hub_silence(repository) is not None:
        return
    try:
        files = _files(repository, spec.revision)
    except UNREACHED:
        return
    if not any(file.startswith(f"{folder}/") for file in files):
        raise UserError(
            f"model.pipeline: {source} names the folder {folder} of {repository} for its {name}, "
            f"and {repository} has none at {spec.revision}: correct the index, or give a whole "
            "folder"
        )


def load_component(name: str, spec: Any, source: str, **arguments: Any) -> Any:
    """Load a component by its specification, which `pin` has set: while the hub is silent, from
    the folder of its cache, since its client would ask for file after file. UserError if the cache
    has no such folder or has lost it; otherwise as its class raises it."""
    repository, revision = str(spec.pretrained_model_name_or_path), spec.revision
    if Path(repository).is_dir():
        return spec.load(**arguments)
    place = f"model.pipeline: the {name} of {source}"
    stored = CachedRepository(repository, whole=True, revision=revision)
    with from_hub(place, stored, UserError):
        if (silence := hub_silence(repository)) is None:
            return spec.load(**arguments)
        if (folder := snapshot(f"{repository}@{revision}")) is None:
            raise UserError(
                f"{place} is in {repository}, whose commit {revision} is not in the hub's cache, "
                f"and the hub {silence}: download it with {stored.command()}"
            )
        component = spec.load(pretrained_model_name_or_path=str(folder), revision=None, **arguments)
        # the index of a pipeline that is saved names the repository
        spec.pretrained_model_name_or_path, spec.revision = repository, revision
        component._diffusers_load_id = spec.load_id
        return component


def snapshot(place: str) -> Path | None:
    """The folder in the hub's cache of "repository@commit"; None before it is downloaded."""
    repository, _, revision = place.rpartition("@")
    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


@cache
def _files(repository: str, revision: str) -> tuple[str, ...]:
    return tuple(list_repo_files(repository, revision=revision))
