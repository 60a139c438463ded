"""A pipeline's index and the configurations of its parts, without weights: from a folder, the hub's
cache, or a few small files of the hub."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, get_ident
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)

from flowrl.errors import UserError
from flowrl.models.description import denoisers_inside, describe
from flowrl.models.diffusers.call.drive.driver import DENOISERS
from flowrl.paths import find, no_such_model
from flowrl.settings import ModelSettings, PipelineSettings
from flowrl.settings.checks.machine import refuse_single_file
from flowrl.settings.checks.model_files import NO_MODEL, read_json, scheduler_config
from flowrl.settings.model.form import MODULAR_INDEX, PIPELINE_INDEX
from rewards.hub_names import possible_repository
from rewards.perception.hub import answer_of_hub, check_cached, from_hub, of_network
from rewards.perception.hub_cache import CachedRepository
from rewards.perception.reachable import chain_of

INDEX_SECONDS = 20.0  # for all files together
ETAG_SECONDS = 5.0
CONFIG, SCHEDULER_CONFIG = "config.json", "scheduler_config.json"


class HubSilent(Exception):
    """The hub gave no answer: there is no network, or it is too slow. The text says which."""


@dataclass(frozen=True)
class ModelIndex:
    """The small files of a pipeline.

    kind       name of the pipeline's class
    values     its index: components, and settings such as boundary_ratio
    configs    arguments of each component's class, by component
    scheduler  arguments of the scheduler's class; empty without one
    modular    whether the index is that of a modular pipeline alone
    """

    kind: str
    values: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]
    scheduler: Mapping[str, Any]
    modular: bool

    @property
    def denoiser(self) -> Mapping[str, Any]:
        """Arguments of the first denoiser; empty if they are not known."""
        return next((self.configs[name] for name in DENOISERS if name in self.configs), {})


def read_index(source: str) -> ModelIndex:
    """The index of a pipeline's folder or hub name, whose small files are downloaded if the cache
    lacks them.

    UserError for a name that the hub refuses, and for a source that is no pipeline; HubSilent
    without an answer within INDEX_SECONDS.
    """
    folder = find(source)
    if folder.is_dir():
        return _index_of(folder, source)
    refuse_single_file(source, "the model", ("diffusers",))
    repository = _repository(source)
    with from_hub(source, repository, UserError):
        index = _index_of(fetch_configurations(source), source)
        check_cached(source, repository, UserError, asks=False)  # it may lose files meanwhile
        return index


def _repository(source: str) -> CachedRepository:
    """The repository of this name. UserError for what no repository can be called."""
    if not possible_repository(source):
        raise UserError(no_such_model(source))
    return CachedRepository(source)


def _index_of(folder: Path, source: str) -> ModelIndex:
    names = [name for name in (PIPELINE_INDEX, MODULAR_INDEX) if (folder / name).is_file()]
    if not names:
        raise UserError(f"{source} has neither {PIPELINE_INDEX} nor {MODULAR_INDEX}")
    values = read_json(folder / names[0], source)
    configs = {
        name: read_json(folder / name / CONFIG, source)
        for name in values
        if (folder / name / CONFIG).is_file()
    }
    scheduler = scheduler_config(folder, values, source)
    kind = str(values.get("_class_name"))
    return ModelIndex(kind, values, configs, scheduler, names[0] == MODULAR_INDEX)


def fetch_configurations(source: str) -> Path:
    """The folder in the hub's cache with a hub name's index and its parts' configurations. Errors
    as of `read_index`."""
    repository = _repository(source)
    with from_hub(source, repository, UserError):
        check_cached(source, repository, UserError, asks=False)
        return _fetched(source)


def _fetched(source: str) -> Path:
    cached = _cached_index(source)
    if cached is not None and all(_is_cached(source, file) for file in _wanted(cached, source)):
        _refuse_missing(cached, source)
        return cached.parent
    outcome: list[Path | Exception] = []

    def download() -> None:
        try:
            with _without_retries_told():
                outcome.append(_download(source))
        except Exception as error:  # given its meaning below, by the thread that asked
            outcome.append(error)

    # a daemon: the client of the hub repeats its requests for minutes, and nobody waits for it
    thread = Thread(target=download, daemon=True)
    thread.start()
    thread.join(INDEX_SECONDS)
    if not outcome:
        raise HubSilent(f"the hub did not answer within {INDEX_SECONDS:.0f} s")
    if isinstance(outcome[0], Path):
        _refuse_missing(outcome[0], source)
        return outcome[0].parent
    meaning = _meaning(outcome[0], source)
    if meaning is outcome[0]:
        raise meaning
    raise meaning from outcome[0]


def fetch_unknown(m: ModelSettings) -> str:
    """Fetch the configurations of a hub name of which nothing is known on this machine. Why that
    failed; empty otherwise."""
    if not isinstance(m, PipelineSettings) or find(m.source).is_dir() or describe(m) is not None:
        return ""
    try:
        fetch_configurations(m.source)
    except (HubSilent, UserError) as error:
        return f"nothing is known of {m.source}: {error}"
    return ""


def _cached_index(source: str) -> Path | None:
    for name in (PIPELINE_INDEX, MODULAR_INDEX):
        with suppress(HFValidationError):
            if isinstance(at := try_to_load_from_cache(source, name), str):
                return Path(at)
    return None


def _is_cached(source: str, file: str) -> bool:
    """Whether the cache has a file, or knows that the repository has none."""
    return try_to_load_from_cache(source, file) is not None


def _download(source: str) -> Path:
    """The index in the hub's cache, beside which the configurations then lie."""
    index = _file(source, PIPELINE_INDEX) or _file(source, MODULAR_INDEX)
    if index is None:
        raise UserError(
            f"{source} on the hub has neither {PIPELINE_INDEX} nor {MODULAR_INDEX}: it is no "
            "diffusers pipeline; a language model is named by model.language, or with --text of "
            "`flowrl new`"
        )
    for file in _wanted(index, source):
        _file(source, file)
    return index


def _refuse_missing(index: Path, source: str) -> None:
    """UserError for a repository without the configuration of a denoiser that its index names."""
    for name in denoisers_inside(read_json(index, source), source):
        file = f"{name}/{CONFIG}"
        if not (index.parent / file).is_file():
            raise UserError(
                f"{source} on the hub has no {file}, although its {index.name} names that part: it "
                "cannot be loaded, so name another checkpoint"
            )


@contextmanager
def _without_retries_told() -> Iterator[None]:
    """Leave out what the hub's client logs in this thread, such as each of its tries: what they
    come to is one sentence."""
    asking = get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != asking

    handlers = logging.getLogger("huggingface_hub").handlers
    for handler in handlers:
        handler.addFilter(of_others)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(of_others)


def _wanted(index: Path, source: str) -> list[str]:
    """The configurations of the components that an index names."""
    files = list[str]()
    for name, value in read_json(index, source).items():
        if name.startswith("_") or not isinstance(value, list) or None in value[:2]:
            continue
        kind = str(value[1]) if len(value) > 1 else ""
        if "Scheduler" in kind:
            files.append(f"{name}/{SCHEDULER_CONFIG}")
        elif kind and not NO_MODEL.search(kind):
            files.append(f"{name}/{CONFIG}")
    return files


def _file(source: str, name: str) -> Path | None:
    """A file of a repository; None if it has no such file."""
    try:
        return Path(hf_hub_download(source, name, etag_timeout=ETAG_SECONDS))
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        return None


def _meaning(error: Exception, source: str) -> Exception:
    """The error that says what one of the hub's client means to the user."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, HFValidationError):
        return UserError(no_such_model(source))
    if (answer := answer_of_hub(error, source)) is not None:
        # the client calls some answers a missing file, whose cause is the answer
        causes = [cause for cause in chain_of(error) if isinstance(cause, HfHubHTTPError)]
        codes = [cause.response.status_code for cause in causes]
        waits = any(code == 429 or code >= 500 for code in codes)  # it may answer the next time
        return HubSilent(answer) if waits else UserError(answer)
    if not of_network(error) and not isinstance(error, json.JSONDecodeError):
        return error
    reason = " ".join(str(error).split())[:200]
    return HubSilent(f"the hub cannot be read ({type(error).__name__}: {reason})")
