"""Find model weights in folders, in the hub's cache or on the hub, without a long wait."""

import functools
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Annotated, Any, get_args
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rewards.hub_names import possible_repository
from rewards.perception.hub_cache import CachedRepository
from rewards.perception.reachable import chain_of, fault_of, reachable
from rewards.perception.weight_files import check_texts_beside
from rewards.rights import Right, need

HUB_NAME = "a hub name or a folder"
HubName = Annotated[str, HUB_NAME]  # marks settings that `check_hub_settings` looks up

_CLIENTS = {"huggingface_hub", "httpx", "httpx2", "httpcore", "requests"}
_TIMEOUT = 5.0  # seconds; the hub's own client retries for half a minute per file
OFF = "is switched off (HF_HUB_OFFLINE)"
NOT_ASKED = "cannot be asked"
NOTICE_SECONDS = 5.0  # after which a line says what is waited for


class HubFault(ValueError):
    """A repository cannot be read; the text is one sentence with what helps."""


@functools.cache
def unreached() -> str | None:
    """Why the hub cannot be reached, as the end of a sentence about it; None if it can be. Checked
    once per process."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return OFF
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        urllib.request.urlopen(request, timeout=_TIMEOUT).close()
    except urllib.error.HTTPError:
        return None  # an answer, whatever it says
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        address = urlsplit(constants.ENDPOINT)
        by_proxy = address.scheme in getproxies() and not proxy_bypass(address.hostname or "")
        proxy = f" through the proxy of {address.scheme.upper()}_PROXY" if by_proxy else ""
        return f"cannot be reached{proxy} ({constants.ENDPOINT}: {_short(reason)})"
    return None


@functools.cache
def hub_silence(name: str) -> str | None:
    """Why the hub gives no model of this name now, as the end of a sentence about it; None if it
    answers, whatever it says of the model. Checked once per process, within seconds: its own client
    waits without an end for a hub that takes a request and is silent, and repeats each question
    for half a minute while the hub is in trouble."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if (obstacle := unreached() or token_fault()) is not None:
        return obstacle
    try:
        HfApi(endpoint=constants.ENDPOINT).model_info(name, timeout=_TIMEOUT)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 429:
            return "has had too many requests (429), and answers again in some minutes"
        return f"is in trouble ({status})" if status >= 500 else None
    except (ValueError, KeyError, TypeError):  # of an answer that is none of a hub
        return f"answers as no hub does ({constants.ENDPOINT}: a proxy's or a login page?)"
    except Exception as error:  # whatever the installed HTTP library raises
        if not of_network(error):
            raise
        return f"does not answer within {_TIMEOUT:.0f} s ({constants.ENDPOINT})"
    return None


def token_fault() -> str | None:
    """Why no request to the hub can be made with this user's token, as the end of a sentence about
    the hub; None without a fault. The hub's client raises a bare error, or calls it a connection
    that failed."""
    from huggingface_hub import constants, get_token

    way = "; log in again (hf auth login)"
    try:
        token = get_token()
    except UnicodeDecodeError:
        return f"{NOT_ASKED}: {constants.HF_TOKEN_PATH} holds no token{way}"
    except OSError as error:
        if error.filename is None or of_client(error):
            raise
        reason = (error.strerror or str(error)).lower()
        return f"{NOT_ASKED}: {error.filename} cannot be read ({reason}): change its rights{way}"
    if token is not None and not all("!" <= letter <= "~" for letter in token):
        return f"{NOT_ASKED}: HF_TOKEN or {constants.HF_TOKEN_PATH} holds no token{way}"
    return None


def _short(error: object) -> str:
    return " ".join(str(error).split())[:100]


@functools.cache
def say_cached(name: str, folder: Path, silence: str) -> None:
    """Say on stderr that a model is read as it is in the hub's cache; once per process."""
    if silence != OFF:
        print(
            f"{name} is read from the hub's cache ({folder}), since the hub {silence}",
            file=sys.stderr,
            flush=True,
        )


def present_place(name: str) -> str:
    """A repository's hub name, while the hub answers for it; otherwise the folder of its files in
    the hub's cache, if it has one, and a line on stderr that says so."""
    if (silence := hub_silence(name)) is None:
        return name
    folder = CachedRepository(name).snapshot()
    if not isinstance(folder, Path):
        return name
    say_cached(name, folder, silence)
    return str(folder)


def named_repository(model: str) -> CachedRepository | None:
    """The repository of a model that is named by its hub name; None for a folder, and for what no
    repository can be called."""
    if folder_of_model(model) is not None or not possible_repository(model):
        return None
    return CachedRepository(model)


def check_cached(
    place: str,
    repository: CachedRepository,
    kind: type[ValueError] = HubFault,
    *,
    asks: bool = True,
) -> None:
    """A `kind` of one sentence, which begins with `place`, for a repository in the hub's cache that
    is damaged or locked; and for one whose files are gone, unless the hub answers, whose client
    fetches them. `asks`: whether the hub may be asked; without it, it counts as answering
    unless it is switched off."""
    fault = repository.fault()
    if fault is None:
        return
    from huggingface_hub import constants

    silence: str | None
    if asks and repository.kind == "model":
        silence = hub_silence(repository.name)
    else:
        silence = OFF if constants.HF_HUB_OFFLINE else None
    if fault.fetched and silence is None:
        return
    away = f", since the hub {silence}" if fault.fetched else ""
    raise kind(f"{place}: {fault.words}{away}")


@contextmanager
def from_hub(
    place: str, repository: CachedRepository, kind: type[ValueError] = HubFault
) -> Iterator[None]:
    """Read a repository by its hub name in the body. What its readers raise is a `kind` of one
    sentence, which begins with `place`, if the cache lost its files meanwhile, cannot be read or
    written, or lacks some while the hub does not answer. Other errors pass."""
    existed = fault_of(repository.folder) is None
    try:
        yield
    except Exception as error:
        cause = _cause(repository, error, existed, in_words=type(error) in (kind, HubFault))
        if cause is None:
            raise
        raise kind(f"{place}: {cause}") from error


def _cause(
    repository: CachedRepository, error: Exception, existed: bool, in_words: bool = False
) -> str | None:
    """A clause on the reason why a repository could not be read; None if it lies elsewhere.
    `in_words`: the error is a sentence already, which only a fault on this machine replaces."""
    from huggingface_hub.errors import HfHubHTTPError

    if existed and fault_of(repository.folder) is not None:
        return repository.raised(error) or repository.lost(repository.folder)
    if in_words and error.__cause__ is None:
        return None
    if (raised := repository.raised(error)) is not None:
        return raised
    chain = list(chain_of(error))
    of_hub = [e for e in chain if of_client(e)]
    answer = None if in_words else answer_of_hub(error, repository.name)
    if (fault := repository.fault()) is not None:
        return f"{fault.words} ({answer})" if fault.fetched and answer else fault.words
    if in_words or not of_hub or not any(repository.name in str(e) for e in chain):
        return None
    if answer is not None or any(isinstance(e, HfHubHTTPError) for e in of_hub):
        return answer
    reason = f"{type(of_hub[0]).__name__}: {' '.join(str(of_hub[0]).split())[:100]}"
    return (
        f"{repository.name} {'is not whole' if existed else 'is not'} in the hub's cache "
        f"{repository.root}, and the hub does not answer ({reason}): run {repository.command()} "
        "where there is a network"
    )


def of_client(error: BaseException) -> bool:
    """Whether the hub's client or its HTTP library raised this error."""
    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return bool(modules & _CLIENTS)


@contextmanager
def waiting(subject: str) -> Iterator[None]:
    """Ask the hub for `subject` in the body; say so on stderr if that takes long. Its client waits
    for minutes, without a word, for a hub that does not answer."""
    from huggingface_hub import constants

    def say() -> None:
        print(
            f"waiting for the hub ({constants.ENDPOINT}): {subject}; Ctrl-C ends it, and "
            "HF_HUB_OFFLINE=1 reads the hub's cache alone",
            file=sys.stderr,
            flush=True,
        )

    timer = Timer(NOTICE_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def model_path(model: str) -> str:
    """Find a model: a folder, as given or below the project's folder, or a name on the hub.

    If the hub cannot be reached, return the folder of its cache. ValueError if the model is in none
    of these places, or if a folder's configuration or tokenizer is not what its name says.
    """
    with reachable(model, Path(model)):
        if (folder := folder_of_model(model)) is not None:
            check_texts_beside(folder)
            return str(folder)
    files = ("config.json", "preprocessor_config.json", "tokenizer_config.json")
    if (repository := named_repository(model)) is None:
        return _hub_path(model, *files)  # which says that it is no name
    with from_hub(model, repository):
        check_cached(model, repository)
        return _hub_path(model, *files)


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
    repository = CachedRepository(model)
    with from_hub(place, repository):
        check_cached(place, repository, asks=False)


def _hub_path(model: str, *files: str) -> str:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = [try_to_load_from_cache(model, file) for file in files]
    except HFValidationError as error:
        raise ValueError(f"there is no folder {model}, and it is not a hub name") from error
    if (silence := hub_silence(model)) is None:
        return model
    folders = [Path(cached_file).parent for cached_file in cached if isinstance(cached_file, str)]
    if not folders:
        way = ": download the model on a machine with a network, and name its folder"
        raise ValueError(
            f"there is no folder {model}, and the hub {silence}"
            + ("" if silence.startswith(NOT_ASKED) else way)
        )
    say_cached(model, folders[0], silence)
    return str(folders[0])


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
    stored, way_out = CachedRepository(repository, file=name), f"name a file with `{setting}`"
    with from_hub(reward, stored):
        check_cached(reward, stored)
        cached = try_to_load_from_cache(repository, name)
        if isinstance(cached, str):
            return cached
        if (silence := hub_silence(repository)) is not None:
            raise ValueError(
                f"{reward}: {name} of {repository} is not in the cache, and the hub {silence}; "
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
    return isinstance(error, OSError) or of_client(error)


def fetched(reward: str, subject: str, way_out: str, fetch: Callable[[], str]) -> str:
    """Download `subject` with `fetch` and return its path. ValueError if the hub or the network
    fails."""
    try:
        with waiting(subject):
            return fetch()
    except Exception as error:
        if not of_network(error):
            raise
        reason = " ".join(str(error).split())[:200]
        file, _, repository = subject.rpartition(" of ")
        said = _cause(CachedRepository(repository, file=file or None), error, existed=False)
        raise HubFault(
            f"{reward}: {subject} could not be fetched; {way_out} "
            f"({said or f'{type(error).__name__}: {reason}'})"
        ) from error


def fetched_folder(reward: str, name: str, way_out: str) -> Path:
    """The folder with all files of a repository, downloaded if the hub answers. ValueError if they
    are neither there nor on this machine, or are damaged."""
    from huggingface_hub import snapshot_download

    stored = CachedRepository(name, whole=True)
    with from_hub(reward, stored):
        check_cached(reward, stored)
        local = Path(present_place(name)).is_dir()
        if not local and (silence := hub_silence(name)) is not None:
            raise HubFault(f"{reward}: {name} could not be fetched; {way_out} (the hub {silence})")
        return Path(
            fetched(reward, name, way_out, lambda: snapshot_download(name, local_files_only=local))
        )


def is_hub_name(annotation: Any) -> bool:
    """Whether a setting with this annotation names a model on the hub or in a folder."""
    if HUB_NAME in getattr(annotation, "__metadata__", ()):
        return True
    return any(is_hub_name(part) for part in get_args(annotation))
