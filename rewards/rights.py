"""Rights: what the settings of a run's folder may use, and the one check of them, `need`.

Settings of the user need no rights. A folder from elsewhere has those that the user grants it with
`--trust`; while its settings are used, `need` refuses everything else where it is used. A setting
that names something is annotated with one of the marks below, which the page of rights, the check
before anything loads and the tests read.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args

from rewards.hub_names import names_repository

_BARE = re.compile(r"[\w-][\w.-]*", re.ASCII)
LOCAL_TRACKERS = ("tensorboard",)  # write into the run's folder alone
_PROJECT = Path(__file__).resolve().parent.parent
_OWN = tuple(_PROJECT / name for name in ("flowrl", "rewards", "samplers", "configs"))


class Right(StrEnum):
    """A kind of use beyond a folder's own files."""

    CODE = "code"
    NETWORK = "network"
    VARIABLES = "variables"
    FILES = "files"
    ACCOUNTS = "accounts"


MEANINGS = {
    Right.CODE: "run code that it names, or lower a protection",
    Right.NETWORK: "connect to addresses that it names",
    Right.VARIABLES: "read environment variables that it names, and send them as tokens",
    Right.FILES: "read files outside it that are no base model, and write outside it",
    Right.ACCOUNTS: "use your logins: trackers, and your token for the hub",
}


class NotGranted(ValueError):
    """Something needs a right that its folder does not have."""


@dataclass(frozen=True)
class Mark:
    """The mark of a setting that names something.

    right  the right that it needs
    what   a clause for messages and pages
    plain  texts that need no right in any folder
    path   whether it is a file, which needs no right within the folder or within flowrl
    hub    whether it may be a name on the hub, if there is no such file
    """

    right: Right
    what: str
    plain: Callable[[str], bool] = lambda _: False
    path: bool = False
    hub: bool = False

    def needs(self, value: str, folder: Path, find: Callable[[str], Path]) -> bool:
        """Whether this value needs the right in a folder. `find` resolves the name of a file."""
        if self.plain(value):
            return False
        if not self.path:
            return True
        path = find(value)
        if self.hub and names_repository(value) and not _exists(path):
            return False
        return not inside(path, folder)


Address = Annotated[str, Mark(Right.NETWORK, "an address")]
Variable = Annotated[str, Mark(Right.VARIABLES, "an environment variable")]
CODE_FILE = Mark(Right.CODE, "a file of code")
Account = Annotated[
    str, Mark(Right.ACCOUNTS, "a tracker", plain=lambda text: text in LOCAL_TRACKERS)
]
KernelName = Annotated[
    str, Mark(Right.CODE, "kernels on the hub", plain=lambda t: "/" not in t and "hub" not in t)
]
ReadFile = Annotated[str, Mark(Right.FILES, "a file to read", path=True)]
ReadSource = Annotated[str, Mark(Right.FILES, "a file to read", path=True, hub=True)]
WrittenFile = Annotated[str, Mark(Right.FILES, "a file to write", path=True)]
TestColumn = Annotated[str, Mark(Right.CODE, "a column of Python tests, which run")]
NameInFolder = Annotated[str, Mark(Right.FILES, "a file to read", plain=lambda text: is_bare(text))]
WholeIsolation = Mark(Right.CODE, "less isolation", plain=lambda text: text == "full")


def is_bare(text: str) -> bool:
    """Whether a text is a plain name, without a folder or a scheme."""
    return bool(_BARE.fullmatch(text))


def marks(annotation: Any) -> Iterator[Mark]:
    """The marks within an annotation."""
    yield from (mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Mark))
    for part in get_args(annotation):
        yield from marks(part)


def texts_in(value: Any) -> Iterator[str]:
    """The texts in a setting's value, which is a text, or a list or mapping of them."""
    if isinstance(value, bytes):  # a setting's type makes a text of it
        yield value.decode(errors="replace")
    elif isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, dict):
        yield from texts_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


def inside(path: Path, folder: Path) -> bool:
    """Whether a file lies in the folder or in flowrl, with all links resolved."""
    try:
        real = path.expanduser().resolve()
    except (OSError, ValueError, RuntimeError):  # no file can have this name
        return False
    real_folder = Path(os.path.realpath(folder))  # unlike resolve, it takes a link to itself
    return any(real.is_relative_to(place) for place in (real_folder, *_OWN))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class Limits:
    """Rights of a folder from elsewhere.

    granted  for all that it names
    own      (right, text) of what the user named in addition, such as by an option
    """

    folder: Path
    granted: frozenset[Right] = frozenset()
    own: frozenset[tuple[Right, str]] = frozenset()


_limits: Limits | None = None  # of the settings in use; None: they are the user's
_token_before = False  # the hub's own setting


def limits() -> Limits | None:
    """The limits in force; None if the settings in use are the user's."""
    return _limits


def need(right: Right, thing: str, description: str = "", path: Path | None = None) -> None:
    """NotGranted if the settings in use do not have the right that this needs.

    thing        as it is written in the settings
    description  a clause for the message
    path         of a file: within the folder or within flowrl it needs no right
    """
    if _limits is None or right in _limits.granted or (right, thing) in _limits.own:
        return
    if path is not None and inside(path, _limits.folder):
        return
    raise NotGranted(
        f"{description or thing} needs the right to {right}, which {_limits.folder} does not "
        f"have, since it was not started here: read its run.yaml, then add --trust={right} (from "
        f"Python trust={str(right)!r})"
    )


def allows(right: Right, thing: str, path: Path | None = None) -> bool:
    """Whether `need` would pass."""
    try:
        need(right, thing, path=path)
    except NotGranted:
        return False
    return True


@contextmanager
def limited(limits: Limits | None) -> Iterator[None]:
    """Limits while the body runs. They hold for all threads of the process."""
    before = _limits
    _set(limits)
    try:
        yield
    finally:
        _set(before)


def _set(limits: Limits | None) -> None:
    """Set the limits; without the right to accounts, the hub's client sends no token."""
    global _limits, _token_before
    anonymous = limits is not None and Right.ACCOUNTS not in limits.granted
    if limits is not None or _limits is not None:
        from huggingface_hub import constants

        if _limits is None:
            _token_before = constants.HF_HUB_DISABLE_IMPLICIT_TOKEN
        constants.HF_HUB_DISABLE_IMPLICIT_TOKEN = anonymous or _token_before
    _limits = limits


def rights_named(words: Iterable[str]) -> frozenset[Right]:
    """The rights of these names. ValueError for an unknown one."""
    rights = set[Right]()
    for word in words:
        if word not in [*Right]:
            raise ValueError(f"{word[:100]!r} is not a right; choose from {', '.join(Right)}")
        rights.add(Right(word))
    return frozenset(rights)
