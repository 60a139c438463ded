"""Rewards by name. The folder is the registry: `rewards/catalogue/<name>.py` with a function
`load`.

`load(**settings)` of such a file returns a `Reward` and is the only place that imports heavy
libraries. A file may have `judge(**settings)` as well or instead, which returns a `Judge`. Settings
are checked against their annotations; a setting annotated `Reward`, `Judge` or `Sequence[Reward]`
takes other rewards, as `{name: ocr, kind: exact}` or as `ocr`; `Mapping[str, Reward]` takes named
rewards. The docstrings of both functions describe their settings (`rewards.meanings`).
`SCORED_KINDS` says which media are scored (`rewards.kinds`), `NEEDED_COLUMNS` which columns of the
prompt file are read beside those that settings name.

A user's reward needs no registration: `my_rewards.py:sharpness` is the function
`sharpness(samples, setting=...) -> scores` of that file (`rewards.user_function` has the other
signatures), and `my_rewards.py` is a file with `load`. A judge is a function
`taste(samples, a, b, setting=...)`. `own_name` alone decides what is such a name, for everything
that imports a file and for the check of rights before that.
"""

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from rewards.checks.settings import (
    best_guess,
    call_with,
    check_names,
    function_parameters,
    settings_of,
    value_of_type,
)
from rewards.checks.settings import own_settings as own_settings
from rewards.checks.winnable import KnowsWinnable
from rewards.combine import ByScore
from rewards.perception.contents import file_unlike_its_name
from rewards.perception.hub import (
    check_model_name,
    from_hub,
    is_hub_name,
    model_path,
    named_repository,
)
from rewards.perception.packages import REWARD_PACKAGES
from rewards.perception.reachable import reachable
from rewards.perception.weight_files import check_file, check_texts_beside
from rewards.rights import CODE_FILE, Mark, Right, limits, marks, need, texts_in
from rewards.types import NEEDED_COLUMN, Judge, Reward
from rewards.user_function import (
    OwnJudge,
    function_settings,
    is_judge,
    judge_settings,
    object_reward,
    user_reward,
)

REWARD_FOLDERS = [str(Path(__file__).parent / "catalogue")]
Want = Literal["load", "judge"]
MAKERS: tuple[Want, ...] = ("load", "judge")  # functions of a reward's file
_OWN_NAME = re.compile(r"([^\x00-\x1f\x7f]+\.py)(?::([^\W\d]\w*))?")


class OwnName(NamedTuple):
    """A name in a user's file; without a function, the file itself."""

    file: str
    function: str | None

    @property
    def path(self) -> Path:
        """The file, or one that comes with flowrl, such as `flowrl/demo/maze.py`."""
        path, project = Path(self.file).expanduser(), Path(__file__).parent.parent
        first = path.parts[0]
        if first == "configs" and not (project / first).is_dir():
            project = project / "flowrl"  # as a wheel has them
        beside = project / self.file
        return beside if first in ("flowrl", "configs") and not path.is_file() else path

    @property
    def text(self) -> str:
        """The name as it is written."""
        return self.file if self.function is None else f"{self.file}:{self.function}"

    @property
    def example(self) -> bool:
        """Whether the file is one of flowrl's own examples, which need no right in any folder."""
        return _is_example(self.path)


def _is_example(path: Path) -> bool:
    """Whether this is a file of EXAMPLES, with all links resolved. What else flowrl is made of does
    with the settings of a folder what it does with a user's: it writes, connects and starts."""
    try:
        return path.resolve() in EXAMPLES
    except (OSError, ValueError, RuntimeError):  # no file can have this name
        return False


# functions that shipped runs and pages name; they take samples and turns, no paths and no addresses
EXAMPLES = tuple(
    (Path(__file__).parents[1] / "flowrl" / "demo" / name).resolve()
    for name in ("maze.py", "taste.py")
)
CodeName = Annotated[str, CODE_FILE]  # FILE.py:NAME


def own_name(name: Any) -> OwnName | None:
    """FILE.py or FILE.py:NAME; None for everything else, which is never imported as a file."""
    match = _OWN_NAME.fullmatch(name) if isinstance(name, str) else None
    return None if match is None else OwnName(match[1], match[2])


def names() -> list[str]:
    """Mark of all rewards: every module of the catalogue is one."""
    return sorted(module.name for module in pkgutil.iter_modules(REWARD_FOLDERS))


def load(name: str, **settings: Any) -> Reward:
    """Load the reward `name`. ValueError for an unknown name or setting, before anything loads."""
    check_reward(name, settings)
    return _make(name, settings, "load")


def load_judge(name: str, **settings: Any) -> Judge:
    """Load the judge `name`; a pointwise reward without a judge becomes one."""
    check_reward(name, settings, "judge")
    return _make(name, settings, "judge")


def check_reward(name: str, settings: Mapping[str, Any], want: Want = "load") -> None:
    """ValueError for an unknown reward, or for an unknown or missing setting.

    Includes the members of composite rewards. Loads no weights; a user's file is imported.
    """
    parameters = reward_parameters(name, want)
    place = f"reward {name!r}"
    refused = vars(_found(name)[0]).get("REFUSED_SETTINGS", {})
    for setting in settings:
        if setting in refused and setting not in parameters:
            raise ValueError(f"{place}: {setting}: {refused[setting]}")
    check_names(place, parameters, settings)
    for setting, inner in settings.items():
        annotation = parameters[setting].annotation
        kind = nested_kind(annotation)
        if kind is None:
            value_of_type(f"{place}: {setting}", inner, annotation)
            continue
        at = f"{place}: {setting}"
        for spec in _specs(at, _unnamed(at, inner, annotation), kind):
            try:
                check_reward(*spec, "judge" if kind is Judge else "load")
            except ValueError as error:
                raise ValueError(f"{place}: {setting}: {error}") from error


def check_packages(name: str, settings: Mapping[str, Any], want: Want = "load") -> None:
    """ValueError if a reward needs a package that is not installed, in the words of its loading.
    Includes the members of composite rewards. Loads no weights."""
    needed = REWARD_PACKAGES.get(name)
    if needed is not None:
        needed.check(settings)
    for setting, parameter in reward_parameters(name, want).items():
        if (kind := nested_kind(parameter.annotation)) is not None and setting in settings:
            inner = _unnamed(setting, settings[setting], parameter.annotation)
            for spec in _specs(setting, inner, kind):
                check_packages(*spec, "judge" if kind is Judge else "load")


def check_files(name: str, settings: Mapping[str, Any], want: Want = "load") -> None:
    """ValueError if a file or folder that a reward's settings name is not there or, by its first
    bytes, not what its name says, and if a model's name is neither a folder nor one that the hub
    could have. Includes the members of composite rewards. Loads no weights, and asks no network."""
    for setting, parameter in reward_parameters(name, want).items():
        if setting not in settings:
            continue
        value, annotation = settings[setting], parameter.annotation
        if (kind := nested_kind(annotation)) is not None:
            for spec in _specs(setting, _unnamed(setting, value, annotation), kind):
                check_files(*spec, "judge" if kind is Judge else "load")
        elif any(mark.path and not mark.hub for mark in marks(annotation)):
            for text in texts_in(value):
                with reachable(f"reward {name!r}: {setting}", Path(text).expanduser()):
                    _check_named_file(f"reward {name!r}: {setting}", text)
        elif is_hub_name(annotation) and isinstance(value, str):
            if settings.get("library", "transformers") == "transformers":
                check_model_name(f"reward {name!r}: {setting}", value)


def _check_named_file(place: str, text: str) -> None:
    existing = next((path for path in _places(text) if path.exists()), None)
    if existing is None:
        raise ValueError(
            f"{place}: no such file or folder: {text}; paths are relative to {Path.cwd()}"
        )
    need(Right.FILES, text, path=existing)
    try:
        check_file(existing) if existing.is_file() else check_texts_beside(existing)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _places(text: str) -> tuple[Path, Path]:
    """Return where a file of a setting may be: as given, or among those of flowrl."""
    return Path(text).expanduser(), Path(__file__).parent.parent / text


def columns_needed(name: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings of a reward, and of the members that score the same rows, that name a column
    without which no row can be scored, with the column."""
    members = list(rewards_within(name, settings))
    if any(member == "by_row" for member, _ in members):
        return  # its members share the rows out
    for member, member_settings in members:
        for setting, parameter in (
            reward_parameters(member, "load").items() if member in names() else ()
        ):
            if NEEDED_COLUMN in getattr(parameter.annotation, "__metadata__", ()):
                yield setting, str(member_settings.get(setting, parameter.default))


def check_sources(name: str, settings: Mapping[str, Any], want: Want = "load") -> None:
    """ValueError if a model is neither local nor cached and the hub cannot be reached.

    Includes the members of composite rewards. Needs a network only for files that are not local.
    """
    for setting, parameter in reward_parameters(name, want).items():
        value = settings.get(setting, parameter.default)
        if (kind := nested_kind(parameter.annotation)) is not None:
            inner = _unnamed(setting, settings.get(setting), parameter.annotation)
            for spec in _specs(setting, inner, kind):
                check_sources(*spec, "judge" if kind is Judge else "load")
        elif is_hub_name(parameter.annotation) and isinstance(value, str):
            if settings.get("library", "transformers") == "transformers":
                model_path(value)


def user_function_of(name: str) -> Callable[..., Any]:
    """Load the function named by `my_file.py:function`. ValueError if it does not exist."""
    named = own_name(name)
    if named is None or named.function is None:
        raise ValueError(f"{name!r} names no function; write FILE.py:FUNCTION")
    return vars(_found(name)[0])[named.function]


def _make(name: str, settings: Mapping[str, Any], want: Want) -> Any:
    """Build nested rewards, then call the file's function. Settings must already be checked."""
    parameters = reward_parameters(name, want)
    built = {
        setting: _built(f"reward {name!r}: {setting}", value, parameters[setting].annotation)
        for setting, value in settings.items()
    }
    module, function = _found(name)
    with _reachable_files(name, parameters, settings):
        return _made_of(name, module, function, built, want)


@contextmanager
def _reachable_files(
    name: str, parameters: Mapping[str, inspect.Parameter], settings: Mapping[str, Any]
) -> Iterator[None]:
    """`reachable` for the files and models that a reward's settings name."""
    with ExitStack() as stack:
        for setting, parameter in parameters.items():
            value, place = settings.get(setting, parameter.default), f"reward {name!r}: {setting}"
            on_hub, named = is_hub_name(parameter.annotation), list(texts_in(value))
            if on_hub or any(mark.path for mark in marks(parameter.annotation)):
                for path in chain.from_iterable(map(_places, named)):
                    stack.enter_context(reachable(place, path))
            for text in named if on_hub else ():
                if (repository := named_repository(text)) is not None:
                    stack.enter_context(from_hub(place, repository))
        yield


def _made_of(
    name: str, module: ModuleType, function: str | None, built: Mapping[str, Any], want: Want
) -> Any:
    """Call what makes a reward or a judge with its settings, whose inner rewards are built."""
    if function is not None:
        named, shows = vars(module)[function], vars(module).get("examples")
        judges = is_judge(named)
        loaded: Any
        if inspect.isclass(named):
            instance: Any = named(**built)
            loaded = object_reward(instance, name)
        else:
            loaded = OwnJudge(named, built, shows) if judges else user_reward(named, built, shows)
        return ByScore(loaded) if want == "judge" and not judges else loaded
    if want == "judge" and "judge" not in vars(module):
        return ByScore(call_with(module.load, built))
    return call_with(vars(module)[want], built)


def reward_parameters(name: str, want: Want) -> Mapping[str, inspect.Parameter]:
    """The settings of a reward, or of its judge, as parameters. ValueError for a name that is no
    reward, and where its file has no such function."""
    module, function = _found(name)
    has = vars(module)
    if function is not None and is_judge(has[function]):
        if want == "load":
            raise ValueError(
                f"{name} takes (samples, a, b), so it judges pairs; as a reward it is "
                f"{{name: win_rate, judge: {name}}}"
            )
        return judge_settings(name, has[function])
    if function is not None:
        return function_settings(name, has[function])
    if not any(maker in has for maker in MAKERS):
        raise ValueError(f"rewards/catalogue/{name}.py has no function 'load'")
    if want == "load" and "load" not in has:
        raise ValueError(f"{name!r} has no function 'load', only 'judge': it compares pairs")
    if want == "judge" and want in has and is_judge(has[want]):
        raise ValueError(f"{name}: its function `judge` is already a judge: write {name}:judge")
    return settings_of(has[want if want in has else "load"])


def reward_module(name: str) -> tuple[ModuleType, str | None]:
    """The module of a reward, and the name of a user's function or None. ValueError for a name that
    is no reward."""
    return _found(name)


def _found(name: str) -> tuple[ModuleType, str | None]:
    """The module of a reward, and the name of a user's function or None."""
    if (own_file := own_name(name)) is not None:
        path, function = own_file
        module = _imported(own_file)
        wanted = list(MAKERS) if function is None else [function]
        if not any(callable(vars(module).get(w)) for w in wanted):
            members = {k: v for k, v in vars(module).items() if inspect.getmodule(v) is module}
            callables = [
                k for k, v in members.items() if inspect.isfunction(v) or inspect.isclass(v)
            ]
            problem = (
                f"'load'; name one: {path}:FUNCTION"
                if function is None
                else f"function or class {function!r}"
            )
            raise ValueError(f"{path} has no {problem}" + best_guess(function or "", callables))
        return module, function
    if name in names():
        return importlib.import_module(f"rewards.catalogue.{name}"), None
    last = name.rpartition(":")[2].strip() or "FUNCTION"
    guess = f"; your own is named FILE.py:{last}" if ":" in name else best_guess(name, names())
    raise ValueError(f"there is no reward {name!r}{guess}")


# size, time and number of the file that each module of a user's file was made from
_VERSIONS: dict[str, tuple[int, int, int]] = {}


def _imported(named: OwnName) -> ModuleType:
    """Import a user's file as a module, and again only after it was changed: a notebook's process
    goes on after its user has repaired a file. Errors name the file and the line. NotGranted for a
    file of a folder from elsewhere without the right to code."""
    path = named.path
    if limits() is not None:  # what is checked is what runs, whatever becomes of a link
        path = path.resolve()
        if not _is_example(path):
            need(Right.CODE, named.text)
    if not path.is_file():
        raise ValueError(f"no such file: {path}; paths are relative to {Path.cwd()}")
    name = "rewards_of_" + re.sub(r"\W", "_", str(path.resolve()))
    now = path.stat()
    version = now.st_size, now.st_mtime_ns, now.st_ino
    if name in sys.modules and _VERSIONS.get(name) == version:
        return sys.modules[name]
    if (damage := file_unlike_its_name(path)) is not None:
        raise ValueError(f"{path}: it {damage}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # before it runs: dataclasses look their module up, and a file may name itself
    sys.modules[name], _VERSIONS[name] = module, version
    whole = False
    try:
        spec.loader.exec_module(module)
        whole = True
    except SyntaxError as error:
        raise ValueError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except ImportError as error:
        near = path.with_name(f"{(error.name or '').partition('.')[0]}.py")
        way = f"; {near.name} lies beside it: export PYTHONPATH={near.parent.resolve()}"
        raise ValueError(f"{_at(path, error)}: {error}{way if near.is_file() else ''}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{_at(path, error)}: {type(error).__name__}: {error}") from error
    finally:
        if not whole:
            del sys.modules[name]
    return module


def _at(path: Path, error: BaseException) -> str:
    """A user's file, with the line of it at which an error came."""
    lines = [f.lineno for f in extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)


class Thing(NamedTuple):
    """One of the things that a reward's settings name: `at` is the setting, `mark` says which right
    it needs."""

    at: str
    value: str
    mark: Mark


def things_named(
    name: str, settings: Mapping[str, Any], at: str, want: Want = "load"
) -> Iterator[Thing]:
    """Everything that a reward names, its members included. Imports no user's file: in the
    settings of a user's function, each text that could be a file's name counts as one.

    ValueError for a member that is no reward, as `check_reward` raises.
    """
    if (file_name := own_name(name)) is not None:
        if not file_name.example:
            yield Thing(f"{at}.name", name, CODE_FILE)
        yield from _named_within(settings, at)
        return
    if name not in names():
        return
    for setting, parameter in reward_parameters(name, want).items():
        value, annotation = settings.get(setting, parameter.default), parameter.annotation
        kind, place = nested_kind(annotation), f"{at}.{setting}"
        if kind is None:
            for mark in marks(annotation):
                yield from (Thing(place, text, mark) for text in texts_in(value))
        elif setting in settings:
            for spec in _specs(place, _unnamed(place, value, annotation), kind):
                yield from things_named(*spec, place, "judge" if kind is Judge else "load")


def _named_within(value: Any, at: str) -> Iterator[Thing]:
    """List what settings of a user's function may name: files of code, and other rewards."""
    if isinstance(value, Mapping):
        if isinstance(value.get("name"), str) and own_name(value["name"]) is None:
            yield from things_named(*_spec(value), at)
        for key, item in value.items():
            yield from _named_within(item, f"{at}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named_within(item, at)
    elif (file_name := own_name(value)) is not None and not file_name.example:
        yield Thing(at, value, CODE_FILE)


def rewards_within(
    name: str, settings: Mapping[str, Any], want: Want = "load"
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A reward and its members, each by name with its settings. Imports no user's file: in the
    settings of a user's function, a mapping with the name of a reward counts as one.

    ValueError for a member that is no reward, as `check_reward` raises.
    """
    yield name, settings
    if own_name(name) is not None:
        yield from _rewards_in(settings)
        return
    if name not in names():
        return
    for setting, parameter in reward_parameters(name, want).items():
        kind, value = nested_kind(parameter.annotation), settings.get(setting)
        if kind is not None and value is not None:
            for spec in _specs(setting, _unnamed(setting, value, parameter.annotation), kind):
                yield from rewards_within(*spec, "judge" if kind is Judge else "load")


def may_know(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a reward, or a member of it, may know which rows can be won (`KnowsWinnable`), by the
    classes of its module. Its weights are not loaded."""
    for member, _ in rewards_within(name, settings):
        module, function = _found(member)
        kinds = [vars(module).get(function)] if function else list(vars(module).values())
        if any(isinstance(kind, type) and issubclass(kind, KnowsWinnable) for kind in kinds):
            return True
    return False


def _rewards_in(value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rewards that settings of a user's function name."""
    if isinstance(value, Mapping):
        if isinstance(value.get("name"), str) and value["name"] in names():
            yield from rewards_within(*_spec(value))
        for item in value.values():
            yield from _rewards_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _rewards_in(item)


def nested_kind(annotation: Any) -> Any:
    """Reward or Judge if the annotation is one of them, several, or one or None; otherwise None."""
    if annotation in (Reward, Judge):
        return annotation
    inner = get_args(annotation) if get_origin(annotation) is not Literal else ()
    return next((kind for part in inner if (kind := nested_kind(part))), None)


def _unnamed(place: str, value: Any, annotation: Any) -> Any:
    """Convert a mapping of names to rewards to a list of the rewards; other values stay as they
    are."""
    if get_origin(annotation) is not Mapping:
        return value
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{place}: expected a mapping of names to rewards, such as {{a: brightness}}, not "
            f"{value!r}"
        )
    return list(value.values())


def _specs(place: str, value: Any, kind: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, settings) of each reward that a setting names; reward objects are skipped."""
    many = isinstance(value, Sequence) and not isinstance(value, str)
    for one in value if many else [value]:
        if one is None or callable(one):
            continue
        if not isinstance(one, str) and not (
            isinstance(one, Mapping) and isinstance(one.get("name"), str)
        ):
            kind_name = "judge" if kind is Judge else "reward"
            raise ValueError(f"{place} is a {kind_name}, such as {{name: brightness}}, not {one!r}")
        yield _spec(one)


def _spec(one: str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(one, str):
        return one, {}
    rest = {key: value for key, value in one.items() if key not in ("name", "settings")}
    inner = one.get("settings", {})
    if not isinstance(inner, Mapping):
        raise ValueError(f"{one['name']}: settings must be a mapping, not {inner!r:.80}")
    return one["name"], {**inner, **rest}


def _built(place: str, value: Any, annotation: Any) -> Any:
    kind = nested_kind(annotation)
    if kind is None:
        return value_of_type(place, value, annotation)
    if value is None or callable(value):
        function: Any = value
        return ByScore(function) if kind is Judge and _is_reward(value) else function
    if get_origin(annotation) is Mapping and isinstance(value, Mapping):
        return {name: _built(place, one, kind) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_built(place, one, kind) for one in value]
    return _make(*_spec(value), "judge" if kind is Judge else "load")


def _is_reward(function: Callable[..., Any] | None) -> bool:
    """Whether an object scores samples and does not judge pairs."""
    if function is None or is_judge(function):
        return False
    required = [p for p in function_parameters(function).values() if p.default is p.empty]
    return len(required) == 1
