"""YAML with limits on size, depth and expanded aliases, and with one value per key."""

import errno
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from flowrl.bounded_files import bounded_bytes
from flowrl.errors import UserError
from flowrl.settings.words.values import short_repr
from rewards.perception.contents import FIRST_BYTES, unlike_its_name

_MOST_CHARACTERS = 2**18
MOST_FILE = 4 * _MOST_CHARACTERS  # bytes
_TOO_MANY = f"more than {_MOST_CHARACTERS} characters, too many for a run's settings"
_MOST_LEVELS = 40  # of lists and mappings inside each other
_MOST_VALUES = 20_000  # with every alias written out
LARGEST_INTEGER = 2**63
_CHECKED_TYPES = ("int", "float", "bool", "timestamp", "binary")
_ODD_NUMBER = re.compile(r"[-+]?(0[\d_]+|[\d_]+(:[0-5]?\d)+(\.\d*)?)")  # base 8 and base 60


class _Refusal(Exception):
    """An error in a document, without its source."""


class _PlainLoader(yaml.SafeLoader):
    """The loader in Python: its errors say what stands at the place."""


_FASTER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class _FastLoader(_FASTER):
    """The loader in C, where PyYAML has it: some four times as fast."""


def _checked(kind: str, construct: Callable[..., Any]) -> Callable[..., Any]:
    """The constructor of a type, with an error that names the line."""

    def constructed(loader: Any, node: Any) -> Any:
        try:
            value = construct(loader, node)
        except (ValueError, IndexError, KeyError, AttributeError, OverflowError) as error:
            place = f"line {node.start_mark.line + 1}"
            raise _Refusal(f"{place}: {short_repr(node.value)} is not of type {kind}") from error
        if _ODD_NUMBER.fullmatch(str(node.value)):
            raise _Refusal(
                f"line {node.start_mark.line + 1}: {node.value} would be read as {value}: write "
                f"{value}, or put quotes around a text"
            )
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise _Refusal(f"line {node.start_mark.line + 1}: the integer is too large")
        return value

    return constructed


for _kind in _CHECKED_TYPES:
    _tag = f"tag:yaml.org,2002:{_kind}"
    _construct = yaml.SafeLoader.yaml_constructors[_tag]
    for _loader in (_PlainLoader, _FastLoader):
        _loader.add_constructor(_tag, _checked(_kind, _construct))


def read_yaml(path: Path) -> Any:
    """Value of a YAML file. UserError for a file that is missing, too large or invalid."""
    try:
        data = bounded_bytes(path, MOST_FILE)
        damage = unlike_its_name(path.name, data[:FIRST_BYTES])
        text = data.decode("utf-8-sig") if damage is None else ""
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(
            f"{path}: not valid YAML: line {line} is not UTF-8; save the file as UTF-8"
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise UserError(f"{path}: {_TOO_MANY}") from error
        raise UserError(f"{path}: cannot read the file: {error}") from error
    if damage is not None:
        raise UserError(f"{path}: not valid YAML: it {damage}")
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Any:
    """Value of one YAML document. UserError, in one sentence that begins with `source`."""
    if len(text) > _MOST_CHARACTERS:
        raise UserError(f"{source}: {_TOO_MANY}")
    try:
        try:
            return _value(text, _FastLoader)
        except (yaml.YAMLError, ValueError):
            return _value(text, _PlainLoader)
    except _Refusal as error:
        raise UserError(f"{source}: not valid YAML: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}: "
        problem = " ".join(f"{error.context or ''} {error.problem or ''}".split())
        if "'\\t'" in problem:
            problem = f"{problem}: indent with spaces, not with tabs"
        raise UserError(f"{source}: not valid YAML: {place}{problem[:200]}") from error
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())[:200]
        raise UserError(f"{source}: not valid YAML: {problem}") from error


def list_entries(words: Sequence[str], source: str) -> list[Any]:
    """Entries of a command-line list: `a b`, `a,b` and `[a, b]` are equal."""
    entries: list[Any] = []
    for word in words:
        for entry in parse_yaml(f"[{word}]", source):
            entries += entry if isinstance(entry, list) else [entry]
    return entries


def _value(text: str, kind: Any) -> Any:
    _check_depth(text, kind)  # nodes are composed by recursion
    loader = kind(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(node, "", {}, ())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_depth(text: str, kind: Any) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=kind):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth >= _MOST_LEVELS:
            raise _Refusal(
                f"line {event.start_mark.line + 1}: lists and mappings are nested more than "
                f"{_MOST_LEVELS} deep"
            )


def _check_node(node: Any, place: str, sizes: dict[int, int], above: tuple[int, ...]) -> int:
    """The number of values with aliases written out. Refuses cycles, duplicate keys, and more than
    _MOST_VALUES values."""
    if id(node) in above:
        raise _Refusal(f"line {node.start_mark.line + 1}: {place or 'the file'} contains itself")
    if id(node) in sizes:
        return sizes[id(node)]
    inside = (*above, id(node))
    total = 1
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, place)
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            total += _check_node(key, place, sizes, inside)
            total += _check_node(value, f"{place}.{name}" if place else name, sizes, inside)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            total += _check_node(value, f"{place}.{i}", sizes, inside)
    if total > _MOST_VALUES:
        raise _Refusal(f"more than {_MOST_VALUES} values with its aliases expanded")
    sizes[id(node)] = total
    return total


def _check_keys(node: yaml.MappingNode, place: str) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line, name = key.start_mark.line + 1, (key.tag, key.value)
        if name in lines:
            where = f"{place}.{key.value}" if place else key.value
            raise _Refusal(
                f"{where[:200]} is given twice, in line {lines[name]} and in line {line}: keep "
                "one of them"
            )
        lines[name] = line
