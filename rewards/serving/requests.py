"""Requests to a server, the retry policy, and the kinds of failures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Again(Exception):
    """This try failed, but another may succeed. `after`: seconds to wait, as the server asked."""

    def __init__(self, reason: str, after: float = 0.0, words: str | None = None) -> None:
        super().__init__(words or reason)
        self.reason, self.after = reason, after


class Malformed(Again):
    """An answer in the wrong format, for example from a proxy or a crashing server."""

    def __init__(self) -> None:
        super().__init__("malformed")


class Unparsable(Exception):
    """An answer in the right format but without a verdict. Trying again would not help."""


class Refused(Exception):
    """The server will never accept this request: too large, too long, or of the wrong kind."""


@dataclass(frozen=True)
class Patience:
    """Retry policy. The defaults survive an outage of one minute."""

    timeout: float = 60.0
    """Seconds per try, from sending the request to the last byte of the answer."""
    tries: int = 7
    at_once: int = 64
    """Maximum number of requests in flight."""
    backoff: float = 0.5
    """Mean seconds before the second try; doubled for each further try, up to 30."""

    def __post_init__(self) -> None:
        for name in ("timeout", "tries", "at_once", "backoff"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")


@dataclass(frozen=True)
class Ask:
    """One request. `note` identifies it in the log and for the function that reads its answer."""

    path: str
    body: Mapping[str, Any]
    note: Mapping[str, Any] = field(default_factory=dict)
    values: int = 0
    """Number of values that are asked for, which bounds the answer."""


@dataclass(frozen=True)
class Failure:
    """A request that ended without a value.

    reason: timeout, unreachable, status or malformed after all tries; refused or unparsable at once
    """

    reason: str
    words: str = ""  # the server's or our own
