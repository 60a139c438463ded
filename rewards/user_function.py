"""A function in a user's file as a reward: with our own signature, Flow-GRPO's or TRL's.

function(samples, ...)                    n scores, as a tensor or a list
function(images, prompts, metadata, ...)  Flow-GRPO's: images [n 3 h w] or videos [n f 3 h w] as one
                                          float tensor in 0..1, a list of prompts, one dict of
                                          columns per sample; returns scores or (scores, info)
function(prompts, completions, ...)       TRL's, by keyword: two lists of strings (of chat messages
                                          where annotated so), and one list per column that the
                                          function names or collects in **kwargs

None in a list says that the reward does not apply to the sample, NaN that it could not score it.
The functions may be asynchronous.

A judge of pairs is judge(samples, a, b, ...): for each pair of rows a[i] and b[i] the probability
that a[i] is preferred.

The remaining parameters are settings; with TRL's signature they may also be columns of the prompt
file. A class whose `__call__` takes one of these, after self, is a reward too; its constructor's
arguments are its settings.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Float, Int
from torch import Tensor

from rewards.checks.self_test import OneCall
from rewards.checks.settings import function_parameters
from rewards.combine import reward_scores
from rewards.guard import completed
from rewards.perception.media import by_size, expect
from rewards.types import (
    Concurrent,
    Kind,
    Reward,
    RewardScores,
    Samples,
    Waits,
    no_such_name,
    per_of,
)

_FLOW_GRPO = ("images", "prompts")  # how its signature begins
_TRAINER = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
_SINGLE = ("image", "img", "picture", "photo", "video", "text", "prompt", "caption", "completion")
_MANY = tuple(f"{name}s" for name in _SINGLE)
_COLLECTED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


def said_words(reward: object) -> dict[str, Any]:
    """The attributes by which a function or an object says something of itself: its `per`, and
    those of `one_call`, `waits` and `concurrent` that are True."""
    words = {
        "per": per_of(reward),
        "one_call": isinstance(reward, OneCall) and reward.one_call,
        "waits": isinstance(reward, Waits) and reward.waits,
        "concurrent": isinstance(reward, Concurrent) and reward.concurrent,
    }
    return {name: word for name, word in words.items() if word}


@dataclass(frozen=True)
class Own:
    """Wraps `function(samples, **settings)`.

    shows   the file's function `examples`, if any: it returns two samples, the better one first
    """

    function: Callable[..., Tensor | Sequence[float | None] | RewardScores | None]
    settings: Mapping[str, Any]
    shows: Callable[[], Samples] | None = None

    @property
    def per(self) -> Literal["sample", "group"] | None:
        """The function's own word: `FUNCTION.per = "sample"`."""
        return per_of(self.function)

    @property
    def one_call(self) -> bool:
        """The function's own word, as `waits` and `concurrent` are: `FUNCTION.one_call = True`."""
        return "one_call" in said_words(self.function)

    @property
    def waits(self) -> bool:
        return "waits" in said_words(self.function)

    @property
    def concurrent(self) -> bool:
        return "concurrent" in said_words(self.function)

    def __call__(self, samples: Samples) -> Any:
        return completed(self.function(samples, **self.settings))

    def examples(self) -> Samples | None:
        return self.shows() if self.shows is not None else None


@dataclass(frozen=True)
class OwnJudge(Own):
    """Wraps `function(samples, a, b, **settings)`, a judge."""

    def __call__(  # type: ignore[override]
        self, samples: Samples, a: Int[Tensor, " p"], b: Int[Tensor, " p"]
    ) -> Any:
        return completed(self.function(samples, a, b, **self.settings))


@dataclass(frozen=True)
class FlowGrpoFunction(Own):
    """Wraps `function(images, prompts, metadata, **settings)`, called once per media size."""

    def __call__(self, samples: Samples) -> Float[Tensor, " n"] | RewardScores:
        name = self.function.__name__
        expect(samples, name, "image", "video")
        scores = RewardScores.nowhere(len(samples.prompts))
        for rows, part in by_size(samples):
            scores.put(rows, reward_scores(name, self._scores, part))
        return scores.plain

    def _scores(self, samples: Samples) -> Any:
        metadata = [dict(row) for row in samples.meta] or [{} for _ in samples.prompts]
        prompts = list(samples.prompts)
        result: Any = completed(self.function(samples.media, prompts, metadata, **self.settings))
        pair = isinstance(result, tuple) and not isinstance(result, RewardScores)
        scores = result[0] if pair else result
        return scores["avg"] if isinstance(scores, Mapping) and "avg" in scores else scores


@dataclass(frozen=True)
class TrlFunction(Own):
    """Wraps `function(prompts=, completions=, **columns, **settings)`.

    A parameter annotated as `list[list[dict]]`, as in TRL's own rewards, gets chat messages: the
    prompt's, or the assistant's. Other parameters get texts.
    """

    def __call__(self, samples: Samples) -> Any:
        expect(samples, self.function.__name__, "text")
        self.check_prompts(samples.prompts, samples.meta)
        rows, parameters = samples.meta, function_parameters(self.function)
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {
            name: [row.get(name) for row in rows]
            for name in names
            if (takes_all or name in parameters) and name not in self.settings
        }
        offered: dict[str, list[Any]] = {
            "prompts": list(samples.prompts),
            "completions": list(samples.media),
        }
        if _takes_messages(parameters.get("prompts")):
            offered["prompts"] = [prompt_messages(prompt) for prompt in samples.prompts]
        if _takes_messages(parameters.get("completions")):
            offered["completions"] = [
                [{"role": "assistant", "content": text}] for text in samples.media
            ]
        taken = {name: value for name, value in offered.items() if takes_all or name in parameters}
        return completed(self.function(**{**columns, **taken}, **self.settings))

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError for a parameter that is neither a setting nor a column of the prompts."""
        columns = {name for row in meta for name in row}
        for name, parameter in _free(self.function).items():
            required = parameter.default is parameter.empty and name not in self.settings
            if required and name not in columns:
                raise ValueError(
                    f"{self.function.__name__} takes {name!r}, but none of {len(prompts)} "
                    f"prompts has it: add a column {name!r} to the prompt file, or pass it as a "
                    "setting of the reward"
                )


def _takes_messages(parameter: inspect.Parameter | None) -> bool:
    """Whether a parameter is annotated as a list of lists of mappings."""
    if parameter is None or parameter.annotation is parameter.empty:
        return False
    text = parameter.annotation
    text = text if isinstance(text, str) else str(text)
    return re.search(r"list\[\s*(typing\.)?list\[\s*(typing\.)?dict", text.lower()) is not None


def prompt_messages(prompt: str) -> list[dict[str, Any]]:
    """Chat messages of a prompt; a text is the user's message."""
    messages = getattr(prompt, "messages", None) or ({"role": "user", "content": prompt},)
    return [dict(message) for message in messages]


def _free(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters whose values the user sets."""
    parameters = [p for p in function_parameters(function).values() if p.kind not in _COLLECTED]
    if _is_trl(function):
        return {
            p.name: p for p in parameters if p.name not in ("prompts", "completions", *_TRAINER)
        }
    return {p.name: p for p in parameters[3 if _is_flow_grpo(function) else 1 :]}


def form_kinds(function: Callable[..., Any]) -> tuple[Kind, ...] | None:
    """The kinds of media that a user's function takes by its form; None for one of samples, which
    may be of any kind."""
    if _is_trl(function):
        return ("text",)
    return ("image", "video") if _is_flow_grpo(function) else None


def _is_flow_grpo(function: Callable[..., Any]) -> bool:
    return tuple(function_parameters(function))[:2] == _FLOW_GRPO


def _is_trl(function: Callable[..., Any]) -> bool:
    return not function_parameters(function).keys().isdisjoint({"completions", "completion_ids"})


def is_judge(function: Callable[..., Any]) -> bool:
    """Whether a function, or an object with `__call__`, takes (samples, a, b)."""
    called = vars(function).get("__call__") if inspect.isclass(function) else function
    if called is None:
        return False
    names = tuple(function_parameters(called))
    return names[inspect.isclass(function) :][1:3] == ("a", "b")


def judge_settings(name: str, judge: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Settings of a judge. ValueError for a function that returns nothing."""
    if inspect.isclass(judge):
        _check_body(name, vars(judge)["__call__"], 1)
        return dict(function_parameters(judge))
    _check_body(name, judge, 0)
    return dict(list(function_parameters(judge).items())[3:])


def function_settings(name: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Settings of a function. ValueError if it cannot be called as a reward."""
    parameters = function_parameters(function)
    if inspect.isclass(function):
        if "__call__" not in vars(function):
            raise ValueError(f"{name} is a class without __call__(self, samples)")
        called = vars(function)["__call__"]
        _check_body(name, called, None if _has_other_form(function) else 1)
        if _is_trl(called):
            _check_trainer(name, called)
        return dict(parameters)
    if not parameters:
        raise ValueError(
            f"{name} takes no arguments, but a reward takes (samples), (images, prompts, "
            "metadata) or (prompts, completions); if it is a factory, call it in the file and "
            "name its result"
        )
    places = [p for p in parameters.values() if p.kind not in _BY_NAME]
    if _is_flow_grpo(function) and len(places) < 3 and places[-1].kind is not _COLLECTED[0]:
        raise ValueError(
            f"{name} takes (images, prompts), but gets a third argument, the columns of the "
            f"prompt file: write {function.__name__}(images, prompts, metadata)"
        )
    _check_plain(name, function)
    if not (_is_trl(function) or _is_flow_grpo(function)):
        _check_first(name, function, parameters)
    _check_body(name, function, None if _is_trl(function) or _is_flow_grpo(function) else 0)
    if not _is_trl(function):
        return _free(function)
    _check_trainer(name, function)
    return {key: p.replace(default=None) for key, p in _free(function).items()}


def _check_trainer(name: str, function: Callable[..., Any]) -> None:
    """ValueError for a function of TRL's form that needs what only TRL's trainer has."""
    for trainer, parameter in function_parameters(function).items():
        if trainer not in _TRAINER:
            continue
        if parameter.default is parameter.empty:
            raise ValueError(
                f"{name} takes {trainer!r}, which only TRL's trainer provides: take it out, or "
                "give it the default None and test for that"
            )
        if parameter.default is None and (line := _line_of_use(function, trainer)):
            raise ValueError(
                f"{name}, line {line}: {trainer} is None here, since only TRL's trainer provides "
                "it: take it out, or test for None before its use"
            )


def _check_plain(name: str, function: Callable[..., Any]) -> None:
    """ValueError for a function whose call cannot return scores: an asynchronous generator."""
    if inspect.isasyncgenfunction(function):
        raise ValueError(
            f"{name} yields asynchronously, and a reward's call must return its scores: return a "
            "list of them"
        )


def _check_first(
    name: str, function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]
) -> None:
    """ValueError for a function of one image or text, since a reward gets all samples at once."""
    first = next(iter(parameters.values()))
    if first.name in (*_SINGLE, *_MANY) and first.annotation not in (Samples, "Samples"):
        raise ValueError(
            f"{name} takes ({', '.join(parameters)}), but a reward is called with all samples at "
            f"once: write {function.__name__}(samples) and return one score for each of "
            "samples.media and samples.prompts, or take (images, prompts, metadata)"
        )


def has_mapping(function: Callable[..., Any], keys: Collection[str]) -> bool:
    """Whether a function's source has a mapping with these keys."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):  # made without a file, or in the middle of a line
        return False
    return any(
        {*keys} <= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
    )


def _check_body(name: str, function: Any, samples: int | None) -> None:
    """ValueError for a function that returns nothing, or that reads attributes that samples do not
    have.

    samples: index of the parameter that gets the samples, if any.
    """
    if not inspect.isfunction(function) or "__wrapped__" in vars(function):
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # made without a file, or in the middle of a line
        return
    body = tree.body[0]
    if not isinstance(body, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    nodes = list(_own_nodes(body))
    gives = (ast.Return, ast.Yield, ast.YieldFrom, ast.Raise)
    if not any(isinstance(n, gives) and not _empty(n) for n in nodes):
        raise ValueError(f"{name} has no `return`: it must return one score per sample")
    if samples is None or len(body.args.args) <= samples:
        return
    shown = body.args.args[samples].arg
    if any(
        isinstance(n, ast.Name) and n.id == shown and not isinstance(n.ctx, ast.Load) for n in nodes
    ):
        return
    fields = (*Samples.__dataclass_fields__, "kind", "take")
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            read = node.attr
            if node.value.id == shown and read not in fields and not read.startswith("__"):
                line = function.__code__.co_firstlineno + node.lineno - 1
                raise ValueError(f"{name}, line {line}: {no_such_name(read)}")


def _line_of_use(function: Callable[..., Any], name: str) -> int | None:
    """The line on which a function certainly uses a parameter as an object: reads its attribute,
    calls it, takes its entry or goes through it, and neither assigns it nor asks for its value
    anywhere. None without one; uses in branches, which may never run, do not count."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError, TypeError):  # made without a file, or in the middle of a line
        return None
    nodes = list(_own_nodes(body))
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    used = {
        id(part): part
        for node in _certain_nodes(body)
        for part in _used_as_object(node)
        if isinstance(part, ast.Name) and part.id == name
    }
    if not used or any(isinstance(node.ctx, ast.Store) for node in names):
        return None
    asked = [test for node in nodes for test in _tests_of(node)]
    if any(isinstance(n, ast.Name) and n.id == name for test in asked for n in ast.walk(test)):
        return None
    first = min(part.lineno for part in used.values())
    return function.__code__.co_firstlineno + first - 1


def _used_as_object(node: ast.AST) -> list[ast.AST]:
    """The parts of a node that it takes for objects with attributes, entries or a call."""
    if isinstance(node, ast.Attribute | ast.Subscript):
        return [node.value]
    if isinstance(node, ast.Call):
        return [node.func]
    return [node.iter] if isinstance(node, ast.For | ast.comprehension) else []


def _tests_of(node: ast.AST) -> list[ast.AST]:
    """The conditions of a node."""
    if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        return [node.test]
    if isinstance(node, ast.Compare | ast.BoolOp | ast.Match):
        return [node]
    return list(node.ifs) if isinstance(node, ast.comprehension) else []


_BRANCHES = (ast.If, ast.IfExp, ast.BoolOp, ast.Try, ast.While, ast.Match)


def _certain_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's body outside of branches, nested functions and classes."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(
            child, (*_BRANCHES, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
        ):
            yield child
            yield from _certain_nodes(child)


def _empty(node: ast.AST) -> bool:
    """Whether a return statement has no value."""
    return isinstance(node, ast.Return) and (
        node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
    )


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's body, excluding nested functions and classes."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
        ):
            yield child
            yield from _own_nodes(child)


class _ObjectCall:
    """The call of an object as a function with a name, which messages need. Two of the same object
    are equal."""

    def __init__(self, reward: Callable[..., Any], name: str) -> None:
        self.reward = reward
        self.__name__ = name
        self.__signature__ = inspect.signature(reward)
        vars(self).update(said_words(reward))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reward(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ObjectCall) and self.reward is other.reward

    def __hash__(self) -> int:
        return id(self.reward)


def object_reward(reward: Callable[..., Any], name: str) -> Reward:
    """An object with `__call__` as a reward: unchanged if it takes samples, else wrapped by the
    signature of its `__call__`, as a function is. ValueError as of `function_settings`."""
    if not _has_other_form(type(reward)):
        return reward
    call = _ObjectCall(reward, name)
    function_settings(name, call)
    return user_reward(call, {}, getattr(reward, "examples", None))


def _has_other_form(kind: type) -> bool:
    """Whether instances of a class are called as functions of Flow-GRPO or of TRL are."""
    own_call = getattr(kind, "__call__", None)  # noqa: B004 its signature is read
    if not inspect.isfunction(own_call):
        return False
    names = list(function_parameters(own_call))[1:]  # without self
    return tuple(names[:2]) == _FLOW_GRPO or "completions" in names


def user_reward(
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    shows: Callable[[], Samples] | None = None,
) -> Reward:
    """Wrap a function as a reward, according to its signature."""
    if _is_trl(function):
        return TrlFunction(function, settings, shows)
    if _is_flow_grpo(function):
        return FlowGrpoFunction(function, settings, shows)
    return Own(function, settings, shows)
