"""`flowrl rewards`: the rewards by what they score, and one reward with its settings."""

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from flowrl.cli.recipe_text import WIDTH, RecipeRow, in_yaml, readable
from flowrl.errors import UserError
from flowrl.settings.command_line.arguments import Word
from rewards.kinds import scored_kinds
from rewards.load import Want, nested_kind, own_name, reward_module, reward_parameters
from rewards.load import names as reward_names
from rewards.meanings import reward_meanings, reward_wants, reward_words
from rewards.perception.hub import is_hub_name
from rewards.perception.packages import REWARD_PACKAGES
from rewards.rights import Right, marks
from rewards.types import Kind

COLUMN = "column"  # the setting that names a column of the prompt file
_MANY: dict[Kind, str] = {
    "image": "images", "video": "videos", "sound": "sound", "text": "texts",
    "tensor": "numbers of an own model",
}  # fmt: skip
_MEMBERS = "what their members or features score"


@dataclass
class Rewards:
    """List the rewards by what they score, or print one with what it needs, and the types, defaults
    and meanings of its settings."""

    names: Word[tuple[str, ...]] = ()
    """A reward, or FILE.py:FUNCTION; without a name, all rewards are listed."""


def all_rewards() -> str:
    """The rewards by what they score, each with the first sentence of its file."""
    by_media = dict[str, list[str]]()
    for name in reward_names():
        by_media.setdefault(_declared(name) or _MEMBERS, []).append(name)
    width, lines = max(map(len, reward_names())), list[str]()
    for media in sorted(by_media, key=lambda media: (media == _MEMBERS, media)):
        lines.append(f"{media}:")
        lines += [f"  {name:<{width}}  {_in_a_line(name)}" for name in by_media[media]]
        lines.append("")
    return "\n".join([*lines, "`flowrl rewards NAME` lists a reward's settings."])


def reward_text(name: str) -> str:
    """A reward's words, what it scores and needs, and its settings. UserError for a name that is no
    reward, and for a file that cannot be imported."""
    try:
        wants = reward_wants(name)
        words = reward_words(name) or "your own reward, without a docstring"
        lines = [f"{name}: {words}", "", f"Scores: {scored_media(name)}."]
        lines += textwrap.wrap(
            f"Needs: {'; '.join(reward_needs(name, wants[0])) or 'nothing else'}.",
            WIDTH,
            subsequent_indent="       ",
            break_on_hyphens=False,
        )
        for want in wants:
            if want == "judge":
                lines += ["", "As a judge of pairs, which {name: win_rate, judge: ...} takes:"]
            rows = reward_rows(name, want)
            lines += ["", *_rows_shown(rows)] if rows else ["", "  no settings"]
    except ValueError as error:
        raise UserError(f"rewards: {error}") from error
    return "\n".join(lines)


def _rows_shown(rows: list[RecipeRow]) -> Iterator[str]:
    for row in rows:
        yield f"  {row.name}  {row.default}  ({row.kind})"
        yield from textwrap.wrap(
            row.meaning,
            WIDTH,
            initial_indent="      ",
            subsequent_indent="      ",
            break_on_hyphens=False,
        )


def reward_rows(name: str, want: Want = "load") -> list[RecipeRow]:
    """The settings of a reward, or of its judge. ValueError for a name that is no reward."""
    meanings = reward_meanings(name, want)
    return [
        RecipeRow(setting, _kind(p.annotation), _default(p), meanings.get(setting, ""))
        for setting, p in reward_parameters(name, want).items()
    ]


def reward_needs(name: str, want: Want = "load") -> list[str]:
    """Needs of a reward beside samples: required settings, packages, weights, columns, a server.
    ValueError for a name that is no reward."""
    parameters, lines = reward_parameters(name, want), list[str]()
    required = [s for s, p in parameters.items() if p.default is p.empty]
    if required:
        named = ", ".join(f"`{setting}`" for setting in required)
        lines.append(f"the setting{'s' * (len(required) > 1)} {named}")
    if name in REWARD_PACKAGES:
        lines.append(REWARD_PACKAGES[name].words)
    for setting, parameter in parameters.items():
        if is_hub_name(parameter.annotation) and isinstance(parameter.default, str):
            lines.append(f"`{parameter.default}` from the hub, if `{setting}` names no other")
        if any(mark.right == Right.NETWORK for mark in marks(parameter.annotation)):
            lines.append(f"a server at `{setting}`")
        if setting == COLUMN and parameter.default and parameter.default is not parameter.empty:
            lines.append(
                f"the column `{parameter.default}` of the prompt file, or the one that "
                f"`{COLUMN}` names"
            )
    columns = vars(reward_module(name)[0]).get("NEEDED_COLUMNS", ())
    if columns and own_name(name) is None:
        many = "s" * (len(columns) > 1)
        named = " and ".join(f"`{column}`" for column in columns)
        lines.append(f"the column{many} {named} of the prompt file")
    return lines


def _declared(name: str) -> str:
    """The media that a reward declares; empty for one that declares none."""
    kinds = scored_kinds(name)
    if kinds is not None and "sound" in kinds:
        return "sound, alone or of videos"
    return "" if kinds is None else ", ".join(_MANY[kind] for kind in kinds)


def scored_media(name: str) -> str:
    """The media that a reward scores, or where that comes from. ValueError for a name that is no
    reward."""
    if declared := _declared(name):
        return declared
    (want, *_) = reward_wants(name)
    annotations = [p.annotation for p in reward_parameters(name, want).values()]
    if any(nested_kind(annotation) is not None for annotation in annotations):
        return "what all of its members score"
    if own_name(name) is not None:
        return "what its code takes; a run tries it before it starts"
    return "what its features score"


def first_sentence(name: str) -> str:
    """The first sentence of what a reward's file says of it, without its full stop."""
    paragraph = " ".join(reward_words(name).split("\n\n")[0].split())
    return paragraph.split(". ")[0].removesuffix(".")


def _in_a_line(name: str) -> str:
    return textwrap.shorten(
        first_sentence(name), WIDTH - 24, placeholder=" ...", break_on_hyphens=False
    )


def _kind(annotation: Any) -> str:
    """The type of a setting in words; of a user's function it may have none."""
    if annotation is inspect.Parameter.empty:
        return "any value"
    return annotation if isinstance(annotation, str) else readable(annotation)


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return "required"
    try:
        return in_yaml(parameter.default)
    except yaml.YAMLError:  # an object of a user's file
        return repr(parameter.default)[:100]
