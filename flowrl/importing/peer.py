"""A library whose runs are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.importing.draft import RunDraft


def _all_present(name: str, version: str) -> str | None:
    return None


@dataclass(frozen=True)
class Peer:
    """A library whose runs are read.

    name      as the table of words spells it
    versions  releases whose defaults are known, oldest first
    places    names of leaves that show that an input is its
    defaults  its own values, by the leaves of an input and the release
    read      fills a draft from the leaves
    absent    a sentence if a release has no setting of a name
    """

    name: str
    versions: Sequence[str]
    places: Sequence[str]
    defaults: Callable[[Mapping[str, Any], str], Mapping[str, Any]]
    read: Callable[[RunDraft], None]
    absent: Callable[[str, str], str | None] = _all_present
