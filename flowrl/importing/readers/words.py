"""Words of a command as leaves: `--name value`, `--name=value`, Hydra's `name=value`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.errors import UserError
from flowrl.importing.leaves import Leaves, Secret, Unresolved, flattened, guarded
from flowrl.importing.readers.shell import OPEN, shown_word
from flowrl.settings.file.strict_yaml import parse_yaml

_NUMBER = re.compile(r"[-+]?(\d[\d_]*)(\.\d*)?([eE][-+]?\d+)?|[-+]?\.\d+([eE][-+]?\d+)?")
_OPTION = re.compile(r"--|-[A-Za-z]$")  # of a library, or a short one, such as -m of Python
_WORDS: Mapping[str, Any] = {
    "true": True, "false": False, "none": None, "null": None, "~": None,
}  # fmt: skip


def scalar(text: str) -> Any:
    """A word as a value: a number, true, false, null, a list in brackets, or the text."""
    if OPEN in text:
        return Unresolved(shown_word(text))
    plain = text.strip()
    if plain.lower() in _WORDS:
        return _WORDS[plain.lower()]
    if _NUMBER.fullmatch(plain):
        return float(plain) if any(c in plain.lower() for c in ".e") else int(plain)
    if plain[:1] in ("[", "{") and plain[-1:] in ("]", "}"):
        try:
            return parse_yaml(plain, "value")
        except UserError:
            return text
    if len(plain) > 1 and plain[0] == plain[-1] and plain[0] in "'\"":
        return plain[1:-1]
    return text


def options(words: Sequence[str], lists: Sequence[str] = ()) -> tuple[Leaves, list[str]]:
    """Arguments in argparse's form by name, with underscores, and the words before them. A name
    without a value is true; `lists` are names that take several words."""
    leaves: Leaves = {}
    rest: list[str] = []
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not word.startswith("--") or len(word) < 3:  # a short option and its word are no leaves
            rest += _plain_word(word, leaves)
            continue
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        values = [text] if equals else []
        while not equals and i < len(words) and not _OPTION.match(words[i]):
            values.append(words[i])
            i += 1
        if name in lists and values:
            value: Any = scalar(values[0]) if len(values) == 1 else [scalar(v) for v in values]
        elif len(values) > 1:
            value = [scalar(v) for v in values]
        else:
            value = scalar(values[0]) if values else True
        if name.startswith("no_") and value is True and not equals and not values:
            name, value = name[3:], False
        if isinstance(value, dict):
            leaves |= flattened(value, name)
        else:
            leaves[name] = _guarded_word(name, value, values)
    return leaves, rest


def overrides(words: Sequence[str]) -> tuple[Leaves, list[str]]:
    """Hydra's overrides by name: `a.b=1`, `+a.b=1`, `++a.b=1`, `~a.b`; and the other words."""
    leaves: Leaves = {}
    rest: list[str] = []
    for word in words:
        name, equals, text = word.partition("=")
        if name.startswith("--") or not (equals or name.startswith("~")):
            rest += _plain_word(word, leaves)
            continue
        name = name.lstrip("+~")
        value = scalar(text) if equals else None
        if isinstance(value, str) and "${" in value:
            value = Unresolved(value)
        if isinstance(value, dict):
            leaves |= flattened(value, name)
        else:
            leaves[name] = _guarded_word(name, value, [text])
    return leaves, rest


def _plain_word(word: str, leaves: Leaves) -> list[str]:
    """A word without a name; one that the text does not decide may hold any arguments."""
    if OPEN not in word:
        return [word]
    text = shown_word(word)
    leaves[f"(words) {text[:60]}"] = Unresolved(text)
    return []


def _guarded_word(name: str, value: Any, texts: Sequence[str]) -> Any:
    text = shown_word(" ".join(texts))
    whole = guarded(name, text)
    return whole if isinstance(whole, Secret) else value
