"""Parts of an algorithm in a run's file: `NAME`, `{name: NAME, ...settings}` or `FILE.py:NAME`.

NAME is a part of flowrl (`flowrl.settings.parts.names`), FILE.py:NAME a part from a user's file: a
frozen dataclass, whose fields are its settings, or an object created there; a transform may also be
a plain function. A recipe's parameter that is annotated with one of the protocols below, such as
`Kernel | None`, takes such a part; every recipe takes the parts of `RECIPE_PARTS` in place of its
own.

A part that replaces one of the recipe's keeps the settings that both have in common: all settings
if the class is the same, otherwise settings of the same name, type and default (the anchors of
losses), and required settings of the same name (the kernel and the group of a plan).
`{...settings}` without a name changes the recipe's own part.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BeforeValidator
from typing_extensions import get_protocol_members, is_protocol

from flowrl.credit.choices import AnyPlanner
from flowrl.credit.trackers import NoTracker, Tracker
from flowrl.credit.values import Transform
from flowrl.likelihoods.transition import Likelihood
from flowrl.losses.base import Objective
from flowrl.settings.parts.names import item_of, part_name, parts_named, written_part
from flowrl.settings.parts.trials import try_kernel, try_solver
from flowrl.settings.words.names import unknown_name
from flowrl.settings.words.values import short_repr
from rewards.checks.settings import function_parameters
from rewards.load import own_name, own_settings, user_function_of
from samplers import Kernel, Planner, Solver
from samplers.completions import TextPlanner

FILE_AND_NAME = "FILE.py:NAME"
OwnPart = Annotated[str | dict[str, Any], FILE_AND_NAME]


@dataclass(frozen=True)
class PartKind:
    """Parts of one protocol: their word and form for messages, and a trial call of a user's part
    that returns an error message, or None."""

    word: str
    protocol: Any
    form: str = "a frozen dataclass"
    trial: Callable[[Any], str | None] = lambda _: None

    def build(self, value: Any, old: Any = None) -> Any:
        """Build the part that a run file names, replacing the recipe's `old` one. ValueError, in
        one sentence, if that fails."""
        kind, settings = self.resolved(value, old)
        part = kind(**settings) if isinstance(kind, type) else kind
        name = value if isinstance(value, str) else value.get("name")
        if is_own(name):
            self.try_part(str(name), part)
        return part

    def resolved(self, value: Any, old: Any = None) -> tuple[Any, dict[str, Any]]:
        """The class that a value names, or a user's object, and the settings of the class."""
        name, settings = self._split(value)
        kind: Any = parts_named(self.protocol).only if name is None else self._named(name)
        if kind is None:
            if not dataclasses.is_dataclass(old):
                raise ValueError(f"{self._forms()}, not {short_repr(value)}")
            kind = type(old)
        if not isinstance(kind, type):
            if settings:
                raise ValueError(
                    f"{name} is not a class, so it takes no settings: {', '.join(settings)}"
                )
            return kind, {}
        place = name or part_name(kind)
        return kind, own_settings(place, kind, _kept(kind, old) | _nested(kind, settings, old))

    def check(self, value: Any) -> None:
        """ValueError for an unknown name or setting. Whether required settings are complete
        depends on the recipe."""
        name, settings = self._split(value)
        kind = None if name is None else self._named(name)
        if isinstance(kind, type):
            parameters = function_parameters(kind)
            for key in settings:
                if key not in parameters:
                    raise ValueError(f"{name}: {unknown_name(key, list(parameters))}")

    def _split(self, value: Any) -> tuple[str | None, dict[str, Any]]:
        """Name and settings of `{name: NAME, ...settings}`; no name for settings of the old
        part."""
        if isinstance(value, str):
            return value, {}
        name = value.get("name") if isinstance(value, Mapping) else value
        if not isinstance(value, Mapping) or not isinstance(name, str | None):
            raise ValueError(f"{self._forms()}, not {short_repr(value)}")
        return name, {str(k): inner for k, inner in value.items() if k != "name"}

    def _forms(self) -> str:
        return f"a {self.word} is NAME, {{name: NAME, ...settings}} or {FILE_AND_NAME}"

    def _named(self, name: str) -> Any:
        if not is_own(name):
            parts = parts_named(self.protocol)
            if name not in parts:
                way_out = f"a {self.word} of your own must be given as {FILE_AND_NAME}"
                raise ValueError(f"{unknown_name(name, list(parts))} ({way_out})")
            return parts[name]
        kind: Any = user_function_of(str(name))
        if isinstance(kind, type):
            frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
            if not frozen and self.protocol is not Tracker:
                raise ValueError(
                    f"{name} needs @dataclass(frozen=True): a {self.word} is {self.form}"
                )
        elif inspect.isfunction(kind) and self.protocol is not Transform:
            raise ValueError(f"{name} is a function, but a {self.word} is {self.form}")
        return kind

    def try_part(self, name: str, part: Any) -> None:
        """ValueError, in one sentence that begins with `name`, for a user's object that is no such
        part."""
        protocols = [p for p in (self.protocol, *get_args(self.protocol)) if is_protocol(p)]
        members = get_protocol_members(protocols[0]) if protocols else set[str]()
        if missing := sorted(members - {*dir(part)}):
            raise ValueError(f"{name} has no {', '.join(missing)}; a {self.word} is {self.form}")
        try:
            wrong = self.trial(part)
        except Exception as error:  # a user's code runs here, and may raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ValueError(f"{name} fails in a trial call as a {self.word} ({reason})") from error
        if wrong is not None:
            raise ValueError(f"{name} {wrong}")


def _kept(kind: type, old: Any) -> dict[str, Any]:
    """The settings of the recipe's part that a new part keeps."""
    if isinstance(old, tuple):  # transforms: that of the same class
        old = next((part for part in old if type(part) is kind), None)
    if not (dataclasses.is_dataclass(old) and dataclasses.is_dataclass(kind)):
        return {}
    before, now = function_parameters(type(old)), function_parameters(kind)  # type: ignore[arg-type]

    def same(name: str) -> bool:
        a, b = before[name], now[name]
        alike = (a.annotation, a.default) == (b.annotation, b.default)
        return alike or b.default is b.empty

    return {name: getattr(old, name) for name in now if name in before and same(name)}


def _nested(kind: type, values: Mapping[str, Any], old: Any) -> dict[str, Any]:
    """The settings of a part, with nested parts built."""
    parameters, before = function_parameters(kind), dict[str, Any]()
    if dataclasses.is_dataclass(old):
        before = {field.name: getattr(old, field.name) for field in dataclasses.fields(old)}
    return {
        name: _setting(parameters[name].annotation, value, before.get(name))
        if name in parameters
        else value
        for name, value in values.items()
    }


def _setting(annotation: Any, value: Any, old: Any) -> Any:
    item = item_of(annotation)
    if item is not None and parts_named(item) and isinstance(value, list | tuple):
        return tuple(_setting(item, entry, old) for entry in value)
    if value is None or not parts_named(annotation) or not isinstance(value, str | Mapping):
        return value
    if value in _names(get_args(annotation)) if isinstance(value, str) else False:
        return value
    kind = part_kind(annotation) or PartKind("part", annotation)
    name = value if isinstance(value, str) else value.get("name")
    same = name in (None, part_name(type(old))) or isinstance(old, Planner)
    return kind.build(value, old if same else None)


_PLANNER = "a frozen dataclass with __call__(sigmas, iteration, seed) -> tuple of plans"
KINDS = (
    PartKind(
        "kernel", Kernel,
        "a frozen dataclass with __call__(x, v, sigma, sigma_next) -> Gaussian and bound(sigmas)",
        try_kernel,
    ),
    PartKind(
        "solver", Solver,
        "a frozen dataclass with memory, random, evaluations(sigma_next) and __call__(at, past)",
        try_solver,
    ),
    PartKind("plan", AnyPlanner, _PLANNER),
    PartKind("planner", Planner, _PLANNER),
    PartKind("text planner", TextPlanner, _PLANNER),
    PartKind(
        "transform", Transform,
        "a function, or a frozen dataclass with __call__, of (credit, context) -> Credit",
    ),
    PartKind(
        "likelihood", Likelihood,
        "a frozen dataclass with unit, keep_mean, text, rows, evaluate, log_ratio and kl",
    ),
    PartKind(
        "loss", Objective,
        "a frozen dataclass with unit, roles and __call__(likelihood, evaluations, rows) -> "
        "Entries, such as one that extends RatioLoss",
    ),
    PartKind(
        "tracker", Tracker, "a dataclass with weights, before, after, state and restore",
    ),
)  # fmt: skip
_BY_PROTOCOL = {kind.protocol: kind for kind in KINDS}
RECIPE_PARTS = {
    "plan": _BY_PROTOCOL[AnyPlanner],
    "advantage": _BY_PROTOCOL[Transform],
    "likelihood": _BY_PROTOCOL[Likelihood],
    "loss": _BY_PROTOCOL[Objective],
    "tracker": _BY_PROTOCOL[Tracker],
}  # what every recipe takes in place of its own


@cache
def parts_of_recipes() -> tuple[type, ...]:
    """The classes of all parts that a recipe takes in place of its own, and of the parts inside
    them, in the order in which their settings name them. Contributed parts are left out."""
    kinds = dict[type, None]()
    waiting = [part.protocol for part in KINDS]
    while waiting:
        annotation = waiting.pop(0)
        for kind in parts_named(item_of(annotation) or annotation).plain.values():
            if kind not in kinds:
                kinds[kind] = None
                waiting += [p.annotation for p in function_parameters(kind).values()]
    return tuple(kinds)


def is_code(value: Any) -> bool:
    """Whether a value is FILE.py:NAME."""
    code = own_name(value)
    return code is not None and code.function is not None


def part_kind(annotation: Any) -> PartKind | None:
    """Kind of part that a parameter takes, if any."""
    members = get_args(annotation) or (annotation,)
    return next((kind for kind in KINDS for m in members if m is kind.protocol), None)


def part_setting(annotation: Any, kind: PartKind) -> Any:
    """Annotation of a setting for such a parameter: its own names, null, or a part's name."""
    members = get_args(annotation) if get_origin(annotation) is not Literal else ()
    rest = [m for m in members if m is not kind.protocol]
    check = partial(_checked, kind, _names(rest), type(None) in rest)
    union: Any = Union[(*rest, OwnPart)]
    return Annotated[union, BeforeValidator(check)]


def takes(annotation: Any, value: Any) -> bool:
    """Whether a setting accepts the value of another recipe's setting of the same name. Names of
    flowrl's own parts belong to their recipe."""
    members = get_args(annotation)
    if OwnPart not in members or is_own(value):
        return True
    return type(None) in members if value is None else value in _names(members)


def is_own(value: Any) -> TypeGuard[str | Mapping[str, Any]]:
    """Whether a setting names a part in a user's file."""
    return isinstance(value, Mapping) or (isinstance(value, str) and is_code(value))


def named_part(value: Any, parameter: inspect.Parameter) -> bool:
    """Whether a value names a part and is not one of the recipe's own names for one."""
    names = _names([parameter.annotation, *get_args(parameter.annotation)])
    return isinstance(value, str | Mapping) and not (isinstance(value, str) and value in names)


def _names(members: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value for m in members if get_origin(m) is Literal for value in get_args(m))


def _checked(kind: PartKind, names: tuple[str, ...], nullable: bool, value: Any) -> Any:
    if (value is None and nullable) or (isinstance(value, str) and value in names):
        return value
    value = written_part(value)
    parts = parts_named(kind.protocol)
    if isinstance(value, str) and value not in parts and not is_own(value):
        way_out = f"a {kind.word} of your own must be given as {FILE_AND_NAME}"
        raise ValueError(f"{unknown_name(value, [*names, *parts])} ({way_out})")
    kind.build(value)
    return value


def checked_part(name: str, value: Any) -> Any:
    """Check a value of `plan`, `advantage`, `likelihood`, `loss` or `tracker` as far as possible
    without the recipe's own part. ValueError, in one sentence, if it is invalid."""
    value = written_part(value)
    listed = isinstance(value, list) and name == "advantage"
    for part in value if listed else (() if value is None else (value,)):
        RECIPE_PARTS[name].check(part)
    return value


def parts_written(algorithm: Any) -> dict[str, Any]:
    """Parts of an algorithm in the form of a run file; without the tracker if nothing is
    tracked."""
    parts = {name: getattr(algorithm, name) for name in RECIPE_PARTS}
    parts["advantage"] = parts["advantage"].transforms
    return {name: written_part(part) for name, part in parts.items() if part is not NoTracker}


def with_part(name: str, value: Any, old: Any) -> Any:
    """The part of an algorithm that a run file names, replacing the recipe's own."""
    if name == "advantage":
        entries = value if isinstance(value, list) else [value]
        return dataclasses.replace(
            old, transforms=tuple(RECIPE_PARTS[name].build(one, old.transforms) for one in entries)
        )
    if name == "tracker":
        kind, settings = RECIPE_PARTS[name].resolved(value)
        kind(**settings)
        return partial(kind, **settings)
    return RECIPE_PARTS[name].build(value, old)
