"""Parts of an algorithm from a user's file: `mine.py:Name`, or `{name: mine.py:Name, eta: 0.5}`.

A recipe's parameter that is annotated with one of the protocols below, such as `Kernel | None`,
takes such a part in a run's file. It is a frozen dataclass, whose fields are its settings, or an
object that the file has made. A transform may be a plain function too.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import torch
from pydantic import BeforeValidator
from typing_extensions import get_protocol_members

from flowrl.credit.values import Transform
from flowrl.likelihoods.transition import Likelihood
from flowrl.losses.base import Objective
from flowrl.settings.strict_yaml import short_repr
from flowrl.settings.words import unknown_name
from rewards.load import own_settings, user_function_of
from samplers import Gaussian, Kernel, Planner, Solver
from samplers.completions import TextPlanner
from samplers.solvers import Point

OWN_NAME = re.compile(r".+\.py:\w+")
FILE_AND_NAME = "FILE.py:NAME"
OwnPart = Annotated[str | dict[str, Any], FILE_AND_NAME]
_LEVELS = (1.0, 0.8, 0.6, 0.0)  # of the trial of a kernel


def own_error(name: str, error: Exception) -> str:
    """The sentence on an exception of the user's function `FILE.py:NAME`, with the file's line."""
    file = Path(name.rpartition(":")[0])
    frames = [f for f in extract_tb(error.__traceback__) if Path(f.filename).name == file.name]
    where = f" ({file}, line {frames[-1].lineno})" if frames else ""
    return f"{name} raised {type(error).__name__}: {error}{where}"


def _try_kernel(kernel: Any) -> str | None:
    x, v = torch.zeros(2, 3), torch.ones(2, 3)
    at, to = (torch.full((2,), sigma) for sigma in _LEVELS[1:3])
    step = kernel.bound(_LEVELS)(x, v, at, to)
    if not isinstance(step, Gaussian) or step.mean.shape != x.shape or step.std.shape != (2,):
        return "must return samplers.Gaussian(mean [n *d], std [n])"
    return None


def _try_solver(solver: Any) -> str | None:
    x, v = torch.zeros(2, 3), torch.ones(2, 3)
    at = Point(x, v, 0.8, 0.6, lambda x, _: x, lambda: torch.zeros(2, 3))
    match solver(at, ()):
        case (torch.Tensor() as end, _) if end.shape == x.shape:
            return None
    return "must return (the next state [n *d], what it remembers or None)"


@dataclass(frozen=True)
class PartKind:
    """A protocol of parts, its word and form for messages, and a trial call: a sentence on what is
    wrong with a part, or None."""

    word: str
    protocol: Any
    form: str
    trial: Callable[[Any], str | None] = lambda _: None

    def build(self, value: str | Mapping[str, Any]) -> Any:
        """Make the part that a run's file names. ValueError, in one sentence, where it cannot."""
        name, settings = (value, {}) if isinstance(value, str) else _split(value, self.word)
        found: Any = user_function_of(name)
        if isinstance(found, type):
            self._check_class(name, found)
            found = found(**own_settings(name, found, settings))
        elif settings:
            raise ValueError(f"{name} is no class, so it takes no settings: {', '.join(settings)}")
        elif inspect.isfunction(found) and self.protocol is not Transform:
            raise ValueError(f"{name} is a function, and a {self.word} is {self.form}")
        if missing := sorted(get_protocol_members(self.protocol) - {*dir(found)}):
            raise ValueError(f"{name} has no {', '.join(missing)}; a {self.word} is {self.form}")
        try:
            wrong = self.trial(found)
        except Exception as error:  # a user's code runs here, and may raise anything
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ValueError(f"{name} fails in a trial call as a {self.word} ({why})") from error
        if wrong is not None:
            raise ValueError(f"{name} {wrong}")
        return found

    def _check_class(self, name: str, found: Any) -> None:
        if not dataclasses.is_dataclass(found) or not found.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise ValueError(f"{name} needs @dataclass(frozen=True): a {self.word} is {self.form}")


_PLANNER = "a frozen dataclass with __call__(sigmas, iteration, seed) -> tuple of plans"
KINDS = (
    PartKind(
        "kernel", Kernel,
        "a frozen dataclass with __call__(x, v, sigma, sigma_next) -> Gaussian and bound(sigmas)",
        _try_kernel,
    ),
    PartKind(
        "solver", Solver,
        "a frozen dataclass with memory, random, evaluations(sigma_next) and __call__(at, past)",
        _try_solver,
    ),
    PartKind("planner", Planner, _PLANNER),
    PartKind("planner of texts", TextPlanner, _PLANNER),
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
)  # fmt: skip


def part_kind(annotation: Any) -> PartKind | None:
    """The kind of part that a parameter takes, if it takes one."""
    members = get_args(annotation) or (annotation,)
    return next((kind for kind in KINDS for m in members if m is kind.protocol), None)


def part_setting(annotation: Any, kind: PartKind) -> Any:
    """The annotation of a setting for such a parameter: its names, null, or a part's name."""
    members = get_args(annotation) if get_origin(annotation) is not Literal else ()
    rest = [m for m in members if m is not kind.protocol]
    check = partial(_checked, kind, _names(rest), type(None) in rest)
    union: Any = Union[(*rest, OwnPart)]
    return Annotated[union, BeforeValidator(check)]


def takes(annotation: Any, value: Any) -> bool:
    """Whether a setting takes the value of another recipe's setting of its name, as far as names of
    parts go: those that come with flowrl belong to their recipe."""
    members = get_args(annotation)
    if OwnPart not in members or is_own(value):
        return True
    return type(None) in members if value is None else value in _names(members)


def is_own(value: Any) -> TypeGuard[str | Mapping[str, Any]]:
    """Whether a setting names a part of a user's file."""
    return isinstance(value, Mapping) or (
        isinstance(value, str) and bool(OWN_NAME.fullmatch(value))
    )


def _names(members: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value for m in members if get_origin(m) is Literal for value in get_args(m))


def _checked(kind: PartKind, names: tuple[str, ...], nullable: bool, value: Any) -> Any:
    if (value is None and nullable) or (isinstance(value, str) and value in names):
        return value
    if not isinstance(value, Mapping) and not is_own(value):
        own = f"a {kind.word} of your own is {FILE_AND_NAME}"
        if not names:
            raise ValueError(f"{short_repr(value)} is not known; {own}")
        raise ValueError(f"{unknown_name(value, names)} ({own})")
    kind.build(value)
    return value


def _split(value: Mapping[str, Any], word: str) -> tuple[str, dict[str, Any]]:
    """Name and settings of `{name: FILE.py:NAME, ...settings}`."""
    name = value.get("name")
    if not isinstance(name, str) or not OWN_NAME.fullmatch(name):
        raise ValueError(
            f"a {word} of your own is {{name: {FILE_AND_NAME}, ...settings}}, not {dict(value)!r}"
        )
    return name, {str(key): inner for key, inner in value.items() if key != "name"}
