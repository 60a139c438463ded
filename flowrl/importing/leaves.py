"""The input of an import: leaves with names and values, and what no reader may copy."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.settings.words.values import short_repr

_SECRET_NAME = re.compile(
    r"(^|[._-])(api|access|auth|bearer|github|hf|hub|openai|private|secret|wandb)[_-]?(key|token)"
    r"([_-]?id)?$|(^|[._-])(password|passwd|pwd|secret|credentials?)$|(^|\.)(token|apikey)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9-]{8,}|gh[opsu]_[A-Za-z0-9]{8,}|AKIA[A-Z0-9]{12,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}|[a-z][a-z0-9+.-]*://[^/\s:@]+:[^/\s@]+@)"
)
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
MADE_ROWS = "(rows made by code)"  # the leaf of a script whose data set is none that a run can name
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Secret:
    """A value that is not copied. `variable`: the environment variable that it comes from, if the
    input names one."""

    variable: str | None = None

    def __repr__(self) -> str:
        return "not copied" if self.variable is None else f"${self.variable}, not copied"


@dataclass(frozen=True)
class Unresolved:
    """A value that the input does not hold: a variable without a value, or a computation."""

    text: str

    def __repr__(self) -> str:
        return self.text


Leaves = dict[str, Any]


def flattened(tree: Any, prefix: str = "") -> Leaves:
    """The leaves of nested mappings, and of lists of mappings, by their paths, such as
    `rewards.0.name`. Secrets are replaced."""
    if isinstance(tree, Mapping) and tree:
        inner = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and tree and all(isinstance(item, Mapping) for item in tree):
        inner = [(str(i), value) for i, value in enumerate(tree)]
    else:
        return {prefix: guarded(prefix, _with_numbers(tree))}
    leaves: Leaves = {}
    for key, value in inner:
        leaves |= flattened(value, f"{prefix}.{key}" if prefix else key)
    return leaves


def _with_numbers(value: Any) -> Any:
    """YAML reads 1e-5 as a text, which every one of the libraries means as a number."""
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def guarded(name: str, value: Any) -> Any:
    """The value, or a Secret if its name or its form is one's."""
    if value in (None, "", "EMPTY") or isinstance(value, bool | Secret):
        return value
    text = str(value)
    if _SECRET_NAME.search(name):
        named = _VARIABLE.search(text)
        return Secret(None if named is None else named.group(1))
    if _SECRET_VALUE.search(text):
        return Secret()
    return value


def shown_leaf(value: Any) -> str:
    """A value in a table: one line, shortened."""
    return repr(value) if isinstance(value, Secret | Unresolved) else short_repr(value)
