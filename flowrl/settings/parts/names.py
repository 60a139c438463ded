"""The parts of algorithms by name: dataclasses of credit, likelihoods, losses and samplers.

A part's name in a run's file is its class name in snake case: `PassAtK` is pass_at_k, `FlowSDE` is
flow_sde. The table is made from the classes themselves: a class belongs to a protocol if it has the
protocol's members, and its call the same parameters. Nothing is registered. Parts of contributed
recipes are looked at only for a name that no other part has.
"""

import dataclasses
import functools
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

from typing_extensions import get_protocol_members, is_protocol

import flowrl.credit
import flowrl.likelihoods
import flowrl.losses
import samplers
from flowrl.contributed import contributed_modules
from rewards.checks.settings import function_parameters

_PACKAGES = (samplers, flowrl.credit, flowrl.likelihoods, flowrl.losses)
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def part_name(kind: type) -> str:
    """Name of a part's class: `LeaveOneOut` is leave_one_out."""
    return _WORD.sub("_", kind.__name__).lower()


@functools.cache
def part_classes() -> tuple[type, ...]:
    """All dataclasses of the four packages that settings can make, in the order of their files: not
    abstract ones, and not those that say `by_settings = False`, which a model's plans need."""
    modules = (
        import_module(info.name)
        for package in _PACKAGES
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    )
    return tuple(_defined(modules))


@functools.cache
def contributed_classes() -> tuple[type, ...]:
    """The same of contributed recipes, whose files are imported."""
    return tuple(_defined(contributed_modules()))


def _defined(modules: Iterable[ModuleType]) -> Iterator[type]:
    for module in modules:
        for value in vars(module).values():
            if (
                dataclasses.is_dataclass(value)
                and isinstance(value, type)
                and value.__module__ == module.__name__
                and not inspect.isabstract(value)
                and vars(value).get("by_settings", True)
            ):
                yield value


def has_members(kind: type, protocol: Any) -> bool:
    """Whether a class has a protocol's members, and its call the same parameters."""
    members = get_protocol_members(protocol)
    if not members <= {*dir(kind), *(field.name for field in dataclasses.fields(kind))}:
        return False
    return "__call__" not in members or _call(kind) == _call(protocol)


def _call(kind: Any) -> list[str]:
    return list(inspect.signature(kind.__call__).parameters)


class NamedParts(Mapping[str, type]):
    """Parts by name: those of some protocols, and some dataclasses themselves.

    Contributed parts come last, and their files are imported where a name is not found before
    them, or where all names are asked for.
    """

    def __init__(self, protocols: tuple[Any, ...], classes: tuple[type, ...]) -> None:
        self._protocols = protocols
        self._classes = classes
        self._own = {part_name(kind): kind for kind in classes}
        for protocol in protocols:
            self._own |= _by_protocol(protocol, part_classes)

    @property
    def only(self) -> type | None:
        """The part, if there is a single one."""
        if len(self._own) > 1:
            return None
        parts = list(self.values())
        return parts[0] if len(parts) == 1 else None

    @property
    def plain(self) -> Mapping[str, type]:
        """The parts that are not contributed."""
        return self._own

    def _contributed(self) -> Mapping[str, type]:
        kinds = [_by_protocol(protocol, contributed_classes) for protocol in self._protocols]
        return {name: kind for parts in kinds for name, kind in parts.items()}

    def __getitem__(self, name: str) -> type:
        return self._own[name] if name in self._own else self._contributed()[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from self._contributed()

    def __len__(self) -> int:
        return len(self._own) + len(self._contributed())

    def __bool__(self) -> bool:
        return bool(self._protocols or self._classes)


def parts_named(annotation: Any) -> NamedParts:
    """Parts that a setting with this annotation accepts, by name: the parts of a protocol, or the
    dataclasses that it names. Empty for numbers, texts and lists."""
    kinds = tuple(_part_kinds(annotation))
    protocols = tuple(kind for kind in kinds if is_protocol(kind))
    return NamedParts(protocols, tuple(kind for kind in kinds if not is_protocol(kind)))


def _part_kinds(annotation: Any) -> Iterator[type]:
    """The protocols and dataclasses in an annotation."""
    if isinstance(annotation, type):
        if is_protocol(annotation) or dataclasses.is_dataclass(annotation):
            yield annotation
    elif get_origin(annotation) not in (Literal, tuple):
        for argument in get_args(annotation):
            yield from _part_kinds(argument)


@functools.cache
def _by_protocol(protocol: Any, classes: Callable[[], tuple[type, ...]]) -> Mapping[str, type]:
    return {part_name(kind): kind for kind in classes() if has_members(kind, protocol)}


def item_of(annotation: Any) -> Any:
    """Annotation of the entries of `tuple[X, ...]`, None for others."""
    inner = get_args(annotation)
    return inner[0] if get_origin(annotation) is tuple and inner[1:] == (...,) else None


def written_part(part: Any, annotation: Any = Any) -> Any:
    """A part in the form of a run file: its name, or a mapping with the settings that differ from
    its defaults. The name is left out if the annotation allows only one part."""
    if isinstance(part, tuple | list):
        return [written_part(item, item_of(annotation) or Any) for item in part]
    if isinstance(part, functools.partial):  # of a tracker
        bound = inspect.signature(part.func).bind_partial(*part.args, **part.keywords)
        return _mapping(part_name(part.func), bound.arguments)  # type: ignore[arg-type]
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part_name(part) if isinstance(part, type) else part
    kinds = function_parameters(type(part))
    settings = {
        field.name: written_part(value, kinds[field.name].annotation)
        for field in dataclasses.fields(part)
        if field.init and (value := getattr(part, field.name)) != _default(field)
    }
    return (
        settings
        if parts_named(annotation).only is type(part)
        else _mapping(part_name(type(part)), settings)
    )


def _mapping(name: str, settings: Mapping[str, Any]) -> Any:
    return {"name": name, **settings} if settings else name


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
