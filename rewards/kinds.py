"""The kinds of media that a reward scores, as its file declares them: known before it is loaded.

A file of the catalogue says `SCORED_KINDS`. One that only combines others says nothing, and scores
what all of its members score. A function of the user's says it by its form: `function(images,
prompts, metadata)` scores images and videos, `function(prompts, completions)` texts. Any other may
score anything: the self-test at the start finds out.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rewards.load import names, reward_module, rewards_within
from rewards.perception.media import wrong_kind
from rewards.types import Kind
from rewards.user_function import form_kinds

ALIKE: tuple[Kind, ...] = ("image", "video")  # a model's class does not always say which


def check_kinds(name: str, settings: Mapping[str, Any], media_kind: Kind) -> None:
    """ValueError for a reward, or a member of it, that does not score what the model makes."""
    taken = ALIKE if media_kind in ALIKE else (media_kind,)
    for member, kinds in declared_kinds(name, settings):
        if not set(kinds) & set(taken):
            raise ValueError(f"{wrong_kind(member, kinds, media_kind)}{_others(media_kind)}")


def _others(media_kind: Kind) -> str:
    """The rewards that score sound, which are few."""
    if media_kind != "sound":
        return ""
    listed = [n for n in names() if any(media_kind in kinds for _, kinds in declared_kinds(n, {}))]
    return f": take {', '.join(listed)}, or a function of your own"


def declared_kinds(
    name: str, settings: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Kind, ...]]]:
    """A reward and its members, each with the kinds that it declares; those that declare none are
    left out. ValueError for a member that is no reward, as `check_reward` raises."""
    for member, _ in rewards_within(name, settings):
        kinds = scored_kinds(member)
        if kinds is not None:
            yield member, kinds


def scored_kinds(name: str) -> tuple[Kind, ...] | None:
    """The kinds that a reward itself declares; None for one that declares none. ValueError for a
    name that is no reward."""
    module, function = reward_module(name)
    if function is None:
        return vars(module).get("SCORED_KINDS")
    return form_kinds(vars(module)[function])
