"""The settings that name something, from the code: for the table in SECURITY.md and for tests."""

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from flowrl.settings.sections.run import RunSettings
from rewards.checks.settings import settings_of
from rewards.load import MAKERS, names
from rewards.rights import MEANINGS, Mark, Right, marks

ELSEWHERE = {  # what is no single setting
    Right.CODE: ("recipe (with its parts)", "names of rewards"),
    Right.FILES: ("base of a run.yaml", "images that rows of prompt files name"),
    Right.ACCOUNTS: ("the hub's token, for whatever is read from the hub",),
}


class Marked(NamedTuple):
    """A setting with its mark; `reward` is empty for settings of a run, and `annotation` is the
    setting's own."""

    reward: str
    setting: str
    annotation: Any
    mark: Mark | None


def run_settings(kind: type[BaseModel] = RunSettings, at: str = "") -> Iterator[Marked]:
    """All settings of a run, those without a mark too; the recipe's are its own."""
    for name, field in kind.model_fields.items():
        place = f"{at}{field.alias or name}"
        if place == "recipe":
            continue
        own = [m for m in field.metadata if isinstance(m, Mark)]
        found = [*own, *marks(field.annotation)]
        inner = list(dict.fromkeys(_sections(field.annotation)))
        for mark in dict.fromkeys(found) or (None,):
            yield Marked("", place, field.annotation, mark)
        for section in inner:
            yield from run_settings(section, f"{place}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def reward_settings() -> Iterator[Marked]:
    """All settings of the rewards and judges of the catalogue."""
    from importlib import import_module

    for name in names():
        module = vars(import_module(f"rewards.catalogue.{name}"))
        known: dict[str, Any] = {}
        for maker in MAKERS:
            if maker in module:
                known |= settings_of(module[maker])
        for setting, parameter in known.items():
            found = list(marks(parameter.annotation))
            for mark in dict.fromkeys(found) or (None,):
                yield Marked(name, setting, parameter.annotation, mark)


def table() -> str:
    """The five rights with the settings that need them."""
    found: dict[Right, dict[str, None]] = {right: {} for right in Right}
    for each in (*run_settings(), *reward_settings()):
        if each.mark is not None:
            label = each.setting if not each.reward else f"{each.reward}: {each.setting}"
            found[each.mark.right].setdefault(f"`{label}`")
    lines = ["| right | lets a folder | asked for by |", "|---|---|---|"]
    for right, meaning in MEANINGS.items():
        asking = ", ".join((*found[right], *ELSEWHERE.get(right, ())))
        lines.append(f"| `{right}` | {meaning} | {asking} |")
    return "\n".join(lines)
