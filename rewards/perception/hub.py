"""Find model weights in folders, in the hub's cache or on the hub, without a long wait."""

import functools
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

from rewards.perception.reachable import chain_of, reachable
from rewards.perception.weight_files import check_texts_beside
from rewards.rights import Right, need

HUB_NAME = "a hub name or a folder"
HubName = Annotated[str, HUB_NAME]  # marks settings that `check_hub_settings` looks up

_CLIENTS = {"huggingface_hub", "httpx", "httpx2", "httpcore", "requests"}
_TIMEOUT = 5.0  # seconds; the hub's own client retries for half a minute per file


@functools.cache
def hub_reachable() -> bool:
    """Whether the hub can be reached. Checked once per process."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        urllib.request.urlopen(request, timeout=_TIMEOUT).close()
    except urllib.error.HTTPError:
        return True  # an answer, whatever it says
    except (OSError, ValueError):
        return False
    return True


def model_path(model: str) -> str:
    """Find a model: a folder, as given or below the project's folder, or a name on the hub.

    If the hub cannot be reached, return the folder of its cache. ValueError if the model is in none
    of these places, or if a folder's configuration or tokenizer is not what its name says.
    """
    with reachable(model, Path(model)):
        if (folder := folder_of_model(model)) is not None:
            check_texts_beside(folder)
            return str(folder)
    return _hub_path(model, "config.json", "preprocessor_config.json", "tokenizer_config.json")


def folder_of_model(model: str) -> Path | None:
    """The folder of a model that is not on the hub: as given, or below the project's folder."""
    places = Path(model), Path(__file__).resolve().parents[2] / model
    return next((place for place in places if place.is_dir()), None)


def check_model_name(place: str, model: str) -> None:
    """ValueError, which begins with `place`, for what is neither a folder nor a possible name on
    the hub, such as ./mine, and for a folder whose configuration or tokenizer is not what its name
    says. Asks no network."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    with reachable(place, Path(model)):
        if (folder := folder_of_model(model)) is not None:
            try:
                check_texts_beside(folder)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            return
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise ValueError(
            f"{place}: there is no folder {model}, and it is not a hub name"
        ) from error


def _hub_path(model: str, *files: str) -> str:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = [try_to_load_from_cache(model, file) for file in files]
    except HFValidationError as error:
        raise ValueError(f"there is no folder {model}, and it is not a hub name") from error
    if hub_reachable():
        return model
    folders = [
        str(Path(cached_file).parent) for cached_file in cached if isinstance(cached_file, str)
    ]
    if not folders:
        raise ValueError(
            f"there is no folder {model}, and the hub cannot be reached: download the model on "
            "a machine with a network, and name its folder"
        )
    return folders[0]


def weights_file(reward: str, setting: str, file: str | None, published: tuple[str, str]) -> str:
    """Path of the weights: the `file` given for a reward's `setting`, or the `published` file
    (repository, file).

    ValueError if it does not exist or cannot be fetched.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if file is not None:
        need(Right.FILES, file, path=Path(file))
        with reachable(f"{reward}: {setting}", Path(file)):
            if not Path(file).is_file():
                raise ValueError(f"{reward}: no such file: {file}")
            return file
    repository, name = published
    cached = try_to_load_from_cache(repository, name)
    if isinstance(cached, str):
        return cached
    way_out = f"name a file with `{setting}`"
    if not hub_reachable():
        raise ValueError(
            f"{reward}: {name} of {repository} is not in the cache, and the hub cannot be reached; "
            f"{way_out}"
        )
    subject = f"{name} of {repository}"
    return fetched(reward, subject, way_out, lambda: hf_hub_download(repository, name))


def answer_of_hub(error: BaseException, repository: str) -> str | None:
    """A clause on what the hub has answered, with what a user can do; None if it did not answer, or
    lacks one file. The answer may be anywhere among the errors that led to this one."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
    )

    for raised in chain_of(error):
        if isinstance(raised, GatedRepoError):
            return (
                f"{repository} is gated: accept its licence on the hub, and log in (hf auth login)"
            )
        answered = raised.response.status_code if isinstance(raised, HfHubHTTPError) else 0
        lacks_file = isinstance(raised, EntryNotFoundError)
        if isinstance(raised, RepositoryNotFoundError) or (answered == 404 and not lacks_file):
            return (
                f"the hub has no {repository}: check the name, or log in if it is private (hf auth "
                "login)"
            )
        if answered in (401, 403):
            return (
                f"the hub refuses {repository} ({answered}): accept its licence on the hub, and "
                "log in (hf auth login)"
            )
        if answered == 429:
            return (
                f"the hub has had too many requests (429) to give {repository}: try again in some "
                "minutes, or log in (hf auth login), which it limits less"
            )
        if answered >= 500:
            return f"the hub is in trouble ({answered}) and gives no {repository}: try again later"
    return None


def of_network(error: Exception) -> bool:
    """Whether the hub's client or its HTTP library (which depends on the version) raised this
    error."""
    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(modules & _CLIENTS)


def fetched(reward: str, subject: str, way_out: str, fetch: Callable[[], str]) -> str:
    """Download `subject` with `fetch` and return its path. ValueError if the hub or the network
    fails."""
    try:
        return fetch()
    except Exception as error:
        if not of_network(error):
            raise
        reason = " ".join(str(error).split())[:200]
        said = answer_of_hub(error, subject.rpartition(" of ")[2])
        raise ValueError(
            f"{reward}: {subject} could not be fetched; {way_out} "
            f"({said or f'{type(error).__name__}: {reason}'})"
        ) from error


def is_hub_name(annotation: Any) -> bool:
    """Whether a setting with this annotation names a model on the hub or in a folder."""
    if HUB_NAME in getattr(annotation, "__metadata__", ()):
        return True
    return any(is_hub_name(part) for part in get_args(annotation))
