"""Commands, settings, recipes, rewards and words as data: schema.json, read without torch.

`flowrl.cli.make_schema` makes it from the types. A build of the package and `make setup` write it
next to this file; if it is missing, or older than the code of a source tree, its first reader
writes it, which takes seconds.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.json_text import json_text
from flowrl.paths import PROJECT, cache_folder

BUILT = Path(__file__).with_name("schema.json")
_ROOMS = ("cli", "contrib", "credit", "evaluation", "likelihoods", "losses", "recipes", "settings")
_FOLDERS = (*(f"flowrl/{room}" for room in _ROOMS), "rewards", "samplers")


@cache
def read_schema() -> dict[str, Any]:
    """Schema of the installed package; in a source tree, of its current code."""
    if not (PROJECT / "pyproject.toml").is_file() and BUILT.is_file():  # a wheel does not change
        return json.loads(BUILT.read_text(encoding="utf-8"))
    digest = _digest()
    places = [BUILT, cache_folder() / f"schema-{digest}.json"]
    for path in places:
        if (stored := _read(path)).get("of") == digest:
            return stored
    from flowrl.cli.installed import check_torchvision

    check_torchvision()
    from flowrl.cli.make_schema import make_schema

    text = json_text({"of": digest, **make_schema()})
    _write(text, places)
    return json.loads(text)


def _read(path: Path) -> dict[str, Any]:
    """The content of a file; empty if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _write(text: str, places: list[Path]) -> None:
    """Write the first of these files that is writable; other processes never see it
    half-written."""
    for path in places:
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text, encoding="utf-8")
            os.replace(new, path)
            return
        except OSError:  # of another user, or read-only: the next reader makes it again
            continue


def _digest() -> str:
    """A digest of the code from which the schema is made."""
    digest = hashlib.blake2b(digest_size=8)
    for path in _sources():
        digest.update(path.relative_to(PROJECT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    yield PROJECT / "flowrl" / "algorithm.py"
    yield PROJECT / "flowrl" / "cli" / "make_schema.py"
    for folder in _FOLDERS:
        yield from sorted((PROJECT / folder).rglob("*.py"))
