"""Run folders from elsewhere: what their run.yaml asks for, and which rights they have.

The user's are: run files named on the command line or passed from Python, with all that they name,
and folders that this user began. Everything else is not: another folder's run.yaml has the rights
of `--trust` alone. What a folder asked for when it was begun or trusted is recorded by its path. If
it asks for more, or others may write it now, it is asked about again. See SECURITY.md.
"""

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, TypeAdapter

from flowrl.bounded_files import bounded_bytes, parsed_json
from flowrl.errors import UserError
from flowrl.json_text import json_text
from flowrl.paths import PACKAGE, find
from flowrl.settings.file.older_names import renewed
from flowrl.settings.sections.data import RewardSpec
from flowrl.settings.sections.given import with_prompts
from flowrl.settings.sections.run import RunSettings
from flowrl.settings.words.short_forms import REWARDS, spelled_out
from rewards.load import own_name, things_named
from rewards.rights import (
    CODE_FILE,
    Limits,
    Mark,
    NotGranted,
    Right,
    limited,
    marks,
    rights_named,
    texts_in,
)

_MOST_MARK = 2**24  # bytes
STATE_VARIABLE = "FLOWRL_STATE"
Trust = bool | str | Collection[str]
ALL_PARTS: frozenset[str] = frozenset(RunSettings.model_fields)
SAMPLED_PARTS: frozenset[str] = frozenset(("recipe", "model"))
EVALUATED_PARTS: frozenset[str] = SAMPLED_PARTS | {"prompts", *REWARDS}
ONLY_TRAINED = (
    "model.server",
    "model.engine",
    "model.rewriter.server",
)  # no other command connects to these
BASE_PART = "base"  # of a run.yaml, which every command reads
_MOST_SHOWN = 5


class Need(NamedTuple):
    """Something that a folder's settings name and for which they need a right."""

    right: Right
    at: str  # the setting, such as rewards.0.url
    value: str
    what: str

    @property
    def thing(self) -> tuple[Right, str]:
        return self.right, self.value


@dataclass(frozen=True)
class Record:
    """Knowledge of a folder that was begun or trusted here.

    things   (right, text) that it may use; None: all that it asks for (recorded by a version that
             noted the path alone)
    whole    whether it is the user's: begun here, or trusted without naming rights
    owners   of the folder and of its run.yaml
    shared   whether others than the owners could write them
    """

    things: frozenset[tuple[Right, str]] | None
    whole: bool = True
    owners: tuple[int, ...] | None = None
    shared: bool = True

    def same_writers(self, folder: Path) -> bool:
        """Whether the folder has the same owners, and no further writers."""
        owners, shared = _writers(folder)
        return self.owners is None or (owners == self.owners and (self.shared or not shared))


_remembered: dict[Path, Record] = {}  # also where the user's folder cannot be written


def trusted_rights(trust: Trust) -> frozenset[Right]:
    """The rights of `--trust` or `trust=`: all for True, none for False, or those named. UserError
    for an unknown name."""
    if isinstance(trust, bool):
        return frozenset(Right) if trust else frozenset()
    words = trust.split(",") if isinstance(trust, str) else trust
    try:
        return rights_named(word.strip() for word in words)
    except ValueError as error:
        raise UserError(f"--trust: {error}") from error


def asked(tree: Any, folder: Path) -> list[Need]:
    """List what the settings of a folder ask for. Imports no file that they name.

    UserError or ValueError (pydantic's too) for settings that are invalid; those of the recipe are
    not checked, since that would import its parts.
    """
    if not isinstance(tree, Mapping):
        return []
    whole = with_prompts(spelled_out(renewed(tree)))
    needs = list(_of_recipe(whole.get("recipe"), "recipe", folder))
    for name, field in RunSettings.model_fields.items():
        key = field.alias or name
        if name != "recipe" and key in whole:
            kind: Any = field.rebuild_annotation()
            section = TypeAdapter[Any](kind).validate_python(whole[key])
            needs += _of_section(section, key, folder)
    return list(dict.fromkeys(needs))


def asked_by_recipe(tree: Any, folder: Path) -> list[Need]:
    """The part of `asked` that even invalid settings have: the recipe's code, which checking them
    would import."""
    recipe = tree.get("recipe") if isinstance(tree, Mapping) else None
    return list(_of_recipe(recipe, "recipe", folder))


def _of_recipe(value: Any, at: str, folder: Path) -> Iterator[Need]:
    """Code of the recipe and its parts, at any depth. It names nothing else."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _of_recipe(item, f"{at}.{key}", folder)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _of_recipe(item, f"{at}.{i}", folder)
    elif own_name(value) is not None:
        yield from _of_texts([CODE_FILE], value, at, folder)


def _of_section(value: Any, at: str, folder: Path) -> Iterator[Need]:
    """List what a checked section asks for, by the marks of its settings."""
    if isinstance(value, RewardSpec):
        for thing in things_named(value.name, value.settings, at):
            yield from _of_texts([thing.mark], thing.value, thing.at, folder)
    elif isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            inner, place = getattr(value, name), f"{at}.{field.alias or name}"
            marks_here = [
                *(m for m in field.metadata if isinstance(m, Mark)),
                *marks(field.annotation),
            ]
            yield from _of_texts(marks_here, inner, place, folder)
            yield from _of_section(inner, place, folder)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _of_section(item, f"{at}.{key}", folder)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _of_section(item, f"{at}.{i}" if len(value) > 1 else at, folder)


def _of_texts(text_marks: Iterable[Mark], value: Any, at: str, folder: Path) -> Iterator[Need]:
    for mark in text_marks:
        for text in texts_in(value):
            code = own_name(text) if mark is CODE_FILE else None
            example = code is not None and code.example
            if not example and mark.needs(text, folder, _found):
                yield Need(mark.right, at, text, mark.what)


def _found(text: str) -> Path:
    """The file of this name. The file of a package that is not installed cannot be read."""
    try:
        return find(text)
    except UserError:
        return Path(text.removeprefix(PACKAGE))


def granted(
    folder: Path,
    needs: Iterable[Need],
    trust: Trust = False,
    named: frozenset[tuple[Right, str]] = frozenset(),
) -> Limits | None:
    """The limits of a folder whose settings need this; None if it is the user's. `named`: things
    that the user names beside the folder, in the same command.

    What is asked for and not granted is the caller's to refuse: see `not_granted`.
    """
    rights, record = trusted_rights(trust), recorded(folder)
    if rights == frozenset(Right):
        return None
    things = named
    if record is not None and record.same_writers(folder):
        if record.things is None:
            return None
        things = record.things | named
        if record.whole and all(need.thing in things for need in needs):
            return None
    return Limits(folder.resolve(), rights | frozenset(_whole(things, needs)), things)


def _whole(things: Collection[tuple[Right, str]], needs: Iterable[Need]) -> Iterator[Right]:
    """Rights of which everything that is needed now is known."""
    for right in {right for right, _ in things}:
        if all(need.thing in things for need in needs if need.right == right):
            yield right


def not_granted(needs: Iterable[Need], limits: Limits | None) -> list[Need]:
    """List what the limits do not grant."""
    if limits is None:
        return []
    return [n for n in needs if n.right not in limits.granted and n.thing not in limits.own]


def used_by(needs: Iterable[Need], parts: Collection[str]) -> list[Need]:
    """List what a command needs that uses these sections alone."""
    training = set(parts) == ALL_PARTS
    return [
        need
        for need in needs
        if need.at.partition(".")[0] in (*parts, BASE_PART)
        and (training or not need.at.startswith(ONLY_TRAINED))
    ]


def refusal_of(folder: Path, lacking: Sequence[Need]) -> str:
    """One sentence that names what is asked for and how to grant it."""
    named = "; ".join(
        f"{need.right}: {need.value!r} ({need.at})"[:150] for need in lacking[:_MOST_SHOWN]
    )
    more = len(lacking) - _MOST_SHOWN
    rights = ",".join(right for right in Right if any(need.right == right for need in lacking))
    record = recorded(folder)
    reason = "was not started here"
    mark = _mark(folder.resolve())
    if record is None and mark.exists() and _written_by_others(mark):
        reason = (
            f"has a record ({mark}) that another user has written, or could have, and that is not "
            "believed"
        )
    if record is not None:
        same = record.same_writers(folder)
        reason = (
            "asks for more than when it was trusted" if same else "has other writers than before"
        )
    return (
        f"{folder} {reason}, and its run.yaml asks for rights that it does not have ({named}"
        f"{f'; and {more} more' if more > 0 else ''}): read it (`flowrl doctor {folder}` lists "
        f"them), then add --trust={rights} (from Python trust={rights!r}), or --trust for all"
    )


@contextmanager
def within(limits: Limits | None) -> Iterator[None]:
    """Limits while the body runs. UserError for what they do not grant."""
    try:
        with limited(limits):
            yield
    except NotGranted as error:
        raise UserError(str(error)) from error


def recorded(folder: Path) -> Record | None:
    """Read the record of a folder at this path, also of versions that noted the path alone. A
    record that another user has written, or could have, is none."""
    path = folder.resolve()
    if path in _remembered:
        return _remembered[path]
    mark = _mark(path)
    try:
        if _written_by_others(mark):
            return None
        text = bounded_bytes(mark, _MOST_MARK, links=False).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if text == f"{path}\n":
        return Record(None)
    try:
        read = parsed_json(text.encode())
        if read["path"] != str(path):  # a link to the record of another folder
            return None
        things = frozenset((Right(right), str(value)) for right, value in read["things"])
        return Record(things, bool(read["whole"]), tuple(read["owners"]), bool(read["shared"]))
    except (ValueError, KeyError, TypeError):  # damaged: it is asked again
        return None


def _written_by_others(mark: Path) -> bool:
    """Whether another user owns a record or the folder of records, or may write it. The user's own
    group may: some systems give each user one, and let it write by default. OSError if there is no
    record."""
    stats = [mark.lstat(), mark.parent.lstat()]
    return any(
        stat.st_uid not in (os.geteuid(), 0)
        or stat.st_mode & 0o002
        or (stat.st_mode & 0o020 and stat.st_gid != os.getegid())
        for stat in stats
    )


def remember(folder: Path, tree: Any, now: Path | None = None) -> None:
    """Record that a folder with these settings was started here or is trusted as a whole. `now`:
    where it is until it appears."""
    things = frozenset(need.thing for need in asked(tree, folder))
    _record(folder, things, whole=True, now=now)


def record_granted(folder: Path, needs: Sequence[Need], limits: Limits | None) -> None:
    """Record what a folder was granted of all that it asks for."""
    record = recorded(folder)
    things = {need.thing for need in needs if need not in not_granted(needs, limits)}
    whole = limits is None
    if record is not None and record.things is not None and record.same_writers(folder):
        things |= record.things
        whole = whole or (record.whole and not not_granted(needs, limits))
    if things or whole:
        _record(folder, frozenset(things), whole)


def record_again(folder: Path, tree: Any) -> None:
    """Record the changed settings of a run that goes on here, such as those of options."""
    record = recorded(folder)
    if record is not None:
        things = frozenset(need.thing for need in asked(tree, folder))
        _record(folder, things | (record.things or frozenset()), record.whole)


def _record(
    folder: Path, things: frozenset[tuple[Right, str]], whole: bool, now: Path | None = None
) -> None:
    path = folder.resolve()
    owners, shared = _writers(now or folder)
    _remembered[path] = Record(things, whole, owners, shared)
    mark = _mark(path)
    written = {
        "path": str(path), "things": sorted(things), "whole": whole, "owners": owners,
        "shared": shared,
    }  # fmt: skip
    with suppress(OSError):  # then `--trust` is asked for
        mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = mark.with_name(f"{mark.name}.{os.getpid()}")
        beside.unlink(missing_ok=True)
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(beside, how, 0o600), "w", encoding="utf-8") as file:
            file.write(json_text(written) + "\n")
        beside.replace(mark)


def _writers(folder: Path) -> tuple[tuple[int, ...], bool]:
    """Owners of the folder and its run.yaml, and whether others may write one of them."""
    stats = [path.stat() for path in (folder, folder / "run.yaml") if path.exists()]
    return tuple(stat.st_uid for stat in stats), any(stat.st_mode & 0o022 for stat in stats)


def _mark(path: Path) -> Path:
    place = os.environ.get(STATE_VARIABLE)
    home = os.environ.get("XDG_STATE_HOME") or str(Path("~/.local/state").expanduser())
    folder = Path(place) if place else Path(home) / "flowrl"
    return folder / "runs" / hashlib.sha256(str(path).encode()).hexdigest()[:32]
