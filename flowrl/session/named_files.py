"""Files of images, videos and sounds that the tables of a run name.

A resume compares them as it compares the tables: a table that stays the same may name a file that
was overwritten.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.evaluation.sources import MEDIA_SUFFIXES, Source
from flowrl.paths import find
from flowrl.prompts.chat import Chat
from flowrl.session.given_file import GIVEN_FILE, GivenFile
from flowrl.settings import LanguageSettings, RunSettings
from rewards.rights import Right, allows

NAMED_SUFFIXES = (*MEDIA_SUFFIXES, ".wav", ".flac", ".mp3", ".ogg")
READ_WHOLE = 2**16  # bytes: of larger files, NAMED_BLOCKS blocks are read
NAMED_BLOCKS, NAMED_BLOCK = 4, 2**12


def named_file_digests(run: RunSettings) -> Iterator[tuple[str, str]]:
    """For each setting that names tables, a digest of the files that its rows name. Settings whose
    rows name none, or whose tables are not on this machine, are left out."""
    seen = set[Path]()  # the file of given samples may be that of the prompts too
    for place, files in _named(run):
        new_files = [path for path in dict.fromkeys(files) if path not in seen and _may_read(path)]
        seen.update(new_files)
        if new_files:
            digest = hashlib.sha256()
            for path in new_files:
                digest.update(_digest(path))
            yield place, digest.hexdigest()


def _named(run: RunSettings) -> Iterator[tuple[str, list[Path]]]:
    try:
        if run.given is not None and not isinstance(run.model, LanguageSettings):
            sources = [item.sample for item in GivenFile.read(run).items]
            paths = [source.path for source in sources if isinstance(source, Source)]
            yield GIVEN_FILE, [path.absolute() for path in paths if path is not None]
        for place in run.prompts.given:
            if run.prompts.on_disk(place):
                folders = [find(source.source).parent for source in getattr(run.prompts, place)]
                prompts = run.prompts.read(place)
                chats = [text.messages for text in prompts.texts if isinstance(text, Chat)]
                yield f"prompts.{place}", [*_files([prompts.meta, chats], folders)]
    except UserError:  # the start that follows names it
        return


def _files(value: Any, folders: list[Path]) -> Iterator[Path]:
    """The existing files that a value names, at any depth: whole paths, or paths relative to the
    table's folder."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _files(item, folders)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _files(item, folders)
    elif isinstance(value, str):
        name = value.partition("#")[0]
        if name.lower().endswith(NAMED_SUFFIXES) and "\0" not in name:
            yield from ((folder / name).absolute() for folder in folders)


def _may_read(path: Path) -> bool:
    try:
        return path.is_file() and allows(Right.FILES, str(path), path)
    except OSError:  # a text that is no name: too long
        return False


def _digest(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= READ_WHOLE:
            digest.update(file.read())
        else:
            for block in range(NAMED_BLOCKS):
                file.seek(block * (size - NAMED_BLOCK) // (NAMED_BLOCKS - 1))
                digest.update(file.read(NAMED_BLOCK))
    return digest.digest()
