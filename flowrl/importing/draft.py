"""A run file in the making, with one line for each leaf of the input."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from flowrl.errors import UserError
from flowrl.importing.leaves import MOST_NUMBER, Leaves, Secret, Unresolved, is_secret_name
from flowrl.settings.words.names import setting_called


class LeafKind(StrEnum):
    """The outcome of a leaf."""

    SAME = "same"
    CONVERTED = "converted"
    DEFAULT = "peer's default"
    NO_EFFECT = "dropped without effect"
    EFFECT = "dropped with effect"
    UNKNOWN = "not understood"


MOST_COUNT = 10**6
TO_READ = (LeafKind.EFFECT, LeafKind.UNKNOWN)  # these stand at the top
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}


@dataclass(frozen=True)
class LeafLine:
    """One leaf: its name and value, its kind, the settings that it became, and why."""

    name: str
    value: Any
    kind: LeafKind
    settings: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


def same_weight(weight: float, scale: float) -> float:
    """The weight with which a reward counts as in the library, whose score is `scale` times
    smaller than flowrl's."""
    return float(f"{weight / scale:.6g}")


class RunDraft:
    """Settings of a run, filled leaf by leaf.

    peer      the library
    given     the input's leaves
    defaults  the library's own values of the version that is read
    devices   processes that the input is meant for
    code      code that the result needs and that is not copied
    files     texts to write beside the run file, by name
    """

    def __init__(
        self, peer: str, leaves: Leaves, defaults: Mapping[str, Any], devices: int
    ) -> None:
        self.peer, self.given, self.devices = peer, leaves, devices
        self.defaults = defaults
        self.tree: dict[str, Any] = {}
        self._asked: set[str] = set()  # names that the library is known to have
        self.lines: dict[str, LeafLine] = {}
        self.by_default: dict[str, tuple[str, Any, str]] = {}
        self.batches: list[str] = []
        self.notes: list[str] = []
        self.code: list[str] = []
        self.files: dict[str, str] = {}

    def has(self, name: str) -> bool:
        return name in self.given

    def value(self, name: str) -> Any:
        """The input's value, or the library's default; None for neither, and for a secret."""
        self._asked.add(name)
        value = self.given.get(name, self.defaults.get(name))
        return None if isinstance(value, Unresolved | Secret) else value

    def check_counts(self, *names: str) -> None:
        """UserError for a leaf that batches or steps are computed with and that is no whole number
        from 1 to a million: a variable without a value, a text, 0, null where the library has a
        number. A leaf that is neither given nor has a default is not looked at."""
        for name in names:
            value = self._computed(name)
            if value is None and self.defaults.get(name) is None:
                continue
            if type(value) is not int or not 1 <= value <= MOST_COUNT:
                raise UserError(
                    f"{name}: {str(value)[:100]!r} is no whole number from 1 to {MOST_COUNT:,}"
                )

    def _computed(self, name: str) -> Any:
        """The value of a leaf that others are computed with, which a reader cannot leave open."""
        value = self.given.get(name, self.defaults.get(name))
        self._asked.add(name)
        if isinstance(value, Unresolved | Secret):
            raise UserError(
                f"{name}: {value!r} is a value that the input does not hold, and the run is "
                "computed with it: write the number itself"
            )
        return value

    def number(self, name: str, least: float = -MOST_NUMBER, most: float = MOST_NUMBER) -> Any:
        """A number that settings are computed with: the library's default for a value that the
        input does not hold, None for null, and for a leaf that is neither given nor has a default.
        UserError for anything else, such as a text, and for a number outside of `least` to `most`.
        """
        value = self.given.get(name, self.defaults.get(name))
        value = self.defaults.get(name) if isinstance(value, Unresolved | Secret) else value
        self._asked.add(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or (is_number and least <= value <= most):
            return value
        held = "" if most == MOST_NUMBER else f" from {least:g} to {most:g}"
        raise UserError(f"{name}: {str(value)[:100]!r} is no number{held}")

    def numbers(self, name: str) -> list[Any]:
        """One number or a list of them, as a list; none for null. UserError for anything else."""
        value = self._computed(name)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        plain = [n for n in listed if isinstance(n, int | float) and not isinstance(n, bool)]
        if len(plain) < len(listed) or (isinstance(value, list) and not value):
            raise UserError(f"{name}: {str(value)[:100]!r} is no number, and no list of numbers")
        return plain

    def words(self, name: str) -> list[str]:
        """One word or a list of them, as a list; none for null. UserError for anything else."""
        value = self.value(name)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(word, str) for word in listed):
            raise UserError(f"{name}: {str(value)[:100]!r} is no word, and no list of words")
        return listed

    def chosen(self, name: str, words: Mapping[str, Any]) -> Any:
        """The meaning of one of the library's words; that of its default for a value that the
        input does not hold. UserError for another word."""
        self.check_choice(name, tuple(words))
        word = self.given.get(name, self.defaults.get(name))
        if isinstance(word, Unresolved | Secret):
            return words[str(self.defaults[name])]
        if str(word) not in words:  # null, where the library has no default
            raise self._not_one_of(name, word, tuple(words))
        return words[str(word)]

    def check_choice(self, name: str, words: Sequence[str]) -> None:
        """UserError for a leaf whose word is none of the library's own: a default in its place
        would be another run. A leaf that the input does not hold is not looked at."""
        value = self.given.get(name)
        self._asked.add(name)
        if value is None or isinstance(value, Unresolved | Secret) or str(value) in words:
            return
        raise self._not_one_of(name, value, words)

    def _not_one_of(self, name: str, value: Any, words: Sequence[str]) -> UserError:
        return UserError(
            f"{name}: {str(value)[:100]!r} is not one of {', '.join(words)}, the words of "
            f"{self.peer}: write one of them"
        )

    def under(self, prefix: str) -> list[str]:
        """The names of all leaves below a path."""
        return [name for name in self.given if name.startswith(f"{prefix}.")]

    def matching(self, *patterns: str) -> list[str]:
        """Leaves whose names match a pattern such as `*.batch_size`, and that have no line yet."""
        return [
            name
            for name in self.given
            if name not in self.lines and any(fnmatchcase(name, p) for p in patterns)
        ]

    def write(
        self, names: str | Sequence[str], settings: Mapping[str, Any], reason: str = ""
    ) -> None:
        """Settings that follow from leaves. Without a `reason` they are the same value under
        another name. If no leaf is given, they are the library's default."""
        names = [names] if isinstance(names, str) else list(names)
        in_input = [name for name in names if name in self.given]
        for setting, value in settings.items():
            self._set(setting, value)
        kind = LeafKind.CONVERTED if reason else LeafKind.SAME
        for name in in_input:
            self._say(name, kind, settings, reason)
        if not in_input:
            for setting, value in settings.items():
                self.by_default[setting] = (names[0], value, reason)

    def write_schedule(self, name: str) -> None:
        """The schedule of the learning rate, which libraries call as transformers does."""
        kind = str(self.value(name))
        if kind in _SCHEDULES:
            schedule = _SCHEDULES[kind]
            reason = "" if schedule == kind else "by warmup"
            self.write(name, {"train.schedule.name": schedule}, reason)
        else:
            self.lose(name, "schedules are constant, linear and cosine")

    def tell(
        self, names: str | Sequence[str], settings: Mapping[str, Any], reason: str = ""
    ) -> None:
        """As `write`, for settings that the caller sets in the tree itself, such as lists."""
        for name in [names] if isinstance(names, str) else names:
            if name in self.given:
                self._say(name, LeafKind.CONVERTED if reason else LeafKind.SAME, settings, reason)

    def same(self, *names: str) -> None:
        """Leaves whose value is a setting's, by the table of words. A leaf that is not given is
        written with the library's default, if that is a value."""
        for name in names:
            if self.value(name) is not None:
                self.write(name, {setting_called(self.peer, name): self.value(name)})
            elif name in self.given:
                self.unread(name)

    def unread(self, name: str) -> None:
        """A leaf without a value: null, or a variable that the input does not set."""
        if isinstance(self.given[name], Unresolved | Secret):
            self._say(name, LeafKind.UNKNOWN, {}, "the input does not hold its value")
        else:
            self._say(name, LeafKind.NO_EFFECT, {}, "null is no value")

    def lose(self, names: str | Iterable[str], reason: str, effect: bool = True) -> None:
        """Leaves that have no setting. A default of the library that has an effect is said too."""
        for name in [names] if isinstance(names, str) else names:
            if name in self.given or (effect and name in self.defaults):
                kind = LeafKind.EFFECT if effect else LeafKind.NO_EFFECT
                self._say(name, kind, {}, reason)

    def lose_if_set(self, name: str, reason: str) -> None:
        """A leaf that has an effect if it has a value; null has none."""
        if self.value(name):
            self.lose(name, reason)
        elif name in self.given:
            self.unread(name)

    def lose_folders(self, *names: str) -> None:
        """Leaves that name where the run is written."""
        self.lose(names, "flowrl train --folder names it", effect=False)

    def lose_unless(
        self, name: str, same_as: Collection[Any], reason: str, else_: str = ""
    ) -> None:
        """A leaf that has an effect only if it differs from what flowrl does."""
        if name not in self.given and name not in self.defaults:
            return
        alike = self.value(name) in same_as and not isinstance(
            self.given.get(name), Unresolved | Secret
        )
        if alike and name in self.given:
            self._say(name, LeafKind.NO_EFFECT, {}, else_ or "as here")
        elif not alike:
            self._say(name, LeafKind.EFFECT, {}, reason)

    def misunderstood(self, name: str, reason: str) -> None:
        self._say(name, LeafKind.UNKNOWN, {}, reason)

    def finish(self) -> None:
        """A line for each leaf that nothing has read."""
        for name, value in self.given.items():
            if name in self.lines:
                continue
            reason = "no setting of this name is known"
            if value in (None, {}, []) and name in self._asked:
                self._say(name, LeafKind.NO_EFFECT, {}, "it is empty")
                continue
            if isinstance(value, Secret) and is_secret_name(name):
                self._say(name, LeafKind.NO_EFFECT, {}, "secrets are not copied; set the variable")
            elif isinstance(value, Unresolved):
                self._say(name, LeafKind.UNKNOWN, {}, "the input does not hold its value")
            else:
                self._say(name, LeafKind.UNKNOWN, {}, reason)

    def _say(self, name: str, kind: LeafKind, settings: Mapping[str, Any], reason: str) -> None:
        value = self.given.get(name, self.defaults.get(name))
        if isinstance(self.given.get(name), Unresolved) and kind is not LeafKind.UNKNOWN:
            kind, settings, reason = LeafKind.UNKNOWN, {}, "the input does not hold its value"
        if isinstance(value, Secret) and kind is not LeafKind.NO_EFFECT:
            if value.variable is None or value.variable not in settings.values():
                kind, settings = LeafKind.EFFECT, {}
                reason = "it holds a secret, which is not copied: set it in run.yaml"
        if name not in self.given:
            reason = f"{self.peer}'s default: {reason}"
        self.lines[name] = LeafLine(name, value, kind, dict(settings), reason)

    def _set(self, setting: str, value: Any) -> None:
        *sections, last = setting.split(".")
        inner = self.tree
        for section in sections:
            held = inner.get(section)
            if not isinstance(held, dict):
                held = inner[section] = {}
            inner = held
        inner[last] = value

    def drop_setting(self, setting: str) -> None:
        """Take a setting out of the tree, with sections that this leaves empty."""
        *sections, last = setting.split(".")
        path = [self.tree]
        for section in sections:
            path.append(path[-1][section])
        path[-1].pop(last)
        for section, above in zip(reversed(sections), reversed(path[:-1]), strict=True):
            if not above[section]:
                above.pop(section)
