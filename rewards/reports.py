"""Numbers that rewards report with their scores: requests, failures, tokens, spread of votes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from rewards.types import Judge, Reward

T = TypeVar("T")


@runtime_checkable
class Reports(Protocol):
    """A reward with numbers for the log. `report` returns and resets those since its last call."""

    def report(self) -> dict[str, float]: ...


def reports(rewards: Mapping[str, Reward | Judge]) -> dict[str, float]:
    """`calls/<label>/<number>` of all rewards, including those that a reward is made of."""
    found: dict[str, float] = {}
    for label, reward in rewards.items():
        for part in parts_of(reward, Reports):
            for name, value in part.report().items():
                key = f"calls/{label}/{name}"
                found[key] = found.get(key, 0.0) + value
    return found


def parts_of(thing: Any, kind: type[T]) -> Iterator[T]:
    """A reward's own parts of a kind, and those of the rewards that it is made of."""
    if isinstance(thing, kind):
        yield thing
    elif is_dataclass(thing):
        for field in fields(thing):
            yield from parts_of(getattr(thing, field.name), kind)
    elif isinstance(thing, Mapping):
        yield from parts_of(list(thing.values()), kind)
    elif isinstance(thing, Sequence) and not isinstance(thing, str):
        for part in thing:
            yield from parts_of(part, kind)
