"""Meanings of the settings of rewards: `flowrl rewards NAME`, a page and editors print them.

A setting is described in the docstring of the function `load` or `judge` of a reward's file, or of
the dataclass whose fields are settings of the reward (`rewards.checks.described`). What a setting
means in all of flowrl's rewards that have it stands here once, and a line of a docstring replaces
it. A function or class of a user's file is described in the same way, by its own docstring alone.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from rewards.checks.described import described_settings, without_settings
from rewards.checks.settings import inline_groups
from rewards.load import MAKERS, Want, own_name, reward_module, reward_parameters
from rewards.user_function import is_judge

COMMON_MEANINGS = {
    "batch": (
        "samples per call of the model, at least 1; fewer need less memory; no effect on scores"
    ),
    "device": (
        "where the model runs: cpu, cuda or cuda:N; auto is the process's GPU, or the CPU without "
        "one"
    ),
    "dtype": (
        "numbers that the model computes in; float16 and bfloat16 need half of the memory and "
        "round the scores"
    ),
    "frames": (
        "frames of a video that are scored, each as an image: all, first, 'every 4', or their "
        "number, at least 1, spread evenly; no effect on images"
    ),
    "aggregate": (
        "what a video's score is of the scores of its frames; frames without a score do not count"
    ),
    "key": "name of the environment variable with the server's token; null sends none",
    "timeout": "seconds that one try of a request may take, above 0",
    "tries": (
        "times that a request is sent until it is answered, at least 1; the pauses between them "
        "double, up to 30 seconds"
    ),
    "at_once": "requests that wait for an answer at the same time, at least 1",
    "pictures": "format in which images are sent, both without loss",
    "log": "file that gets a line of JSON per request; null writes none",
    "iou": (
        "least overlap (intersection over union) of an object's mask with a circle, square or "
        "triangle of its box, in (0, 1], to have that shape; larger is stricter"
    ),
    "aspect": (
        "least ratio of the sides of an object's box, in (0, 1], to have a shape; larger is "
        "stricter"
    ),
}


def reward_wants(name: str) -> list[Want]:
    """The functions of a reward's file: `load`, `judge`, or both. ValueError for a name
    that is no reward."""
    module, function = reward_module(name)
    if function is None:
        return [maker for maker in MAKERS if maker in vars(module)]
    return ["judge" if is_judge(vars(module)[function]) else "load"]


def reward_meanings(name: str, want: Want = "load") -> dict[str, str]:
    """The meaning of each setting of a reward, in the order of its settings. Settings that nothing
    describes are left out: a reward of a user's file may have such."""
    parameters = reward_parameters(name, want)
    meanings = {} if own_name(name) is not None else dict(COMMON_MEANINGS)
    for described in _describing(name, want):
        meanings |= described_settings(described.__doc__, parameters)
    return {setting: meanings[setting] for setting in parameters if setting in meanings}


def reward_words(name: str) -> str:
    """The docstring of a reward's file; of a user's function or class, its own without the lines
    of its settings. Empty without one."""
    module, function = reward_module(name)
    if function is None:
        return inspect.cleandoc(module.__doc__ or "")
    (want,) = reward_wants(name)
    return without_settings(vars(module)[function].__doc__, reward_parameters(name, want))


def _describing(name: str, want: Want) -> Iterator[Callable[..., Any]]:
    """Functions and classes that describe a reward's settings, the last with the last word: groups
    of settings before the function that takes them, and `load` before `judge`, which refers to
    it."""
    module, function = reward_module(name)
    if function is not None:
        named = vars(module)[function]
        yield named
        if inspect.isclass(named) and "__init__" in vars(named):
            yield vars(named)["__init__"]
        return
    makers = [maker for maker in MAKERS if maker in vars(module)]
    for maker in makers if want == "judge" else makers[:1]:
        yield from inline_groups(vars(module)[maker])
        yield vars(module)[maker]
