"""Meanings of the settings of parts: `flowrl recipes PART` and editors print them.

A setting is described in the docstring of the part's class, or of a class that it extends
(`rewards.checks.described`). What a setting means in all parts that have it stands here once, and a
line of a docstring replaces it.
"""

from rewards.checks.described import described_settings, without_settings
from rewards.checks.settings import function_parameters

SHARED_MEANINGS = {
    "kernel": "noise of the noisy steps: a part, NAME, {name: NAME, ...settings} or FILE.py:NAME",
    "solver": (
        "sampler of the steps without noise: a part, NAME, {name: NAME, ...settings} or "
        "FILE.py:NAME"
    ),
    "otherwise": "planner of the plans that are changed: a part, {name: NAME, ...settings}",
    "group": "samples per prompt that are compared with each other, at least 1",
    "shared_noise": (
        "whether a prompt's samples start from the same noise, so that only the noise of their "
        "steps differs"
    ),
    "roots": "trees of a draw, each from noise of its own, at least 1",
    "eps": "added to the divisor, at least 0",
    "slow": "name of the average that the policy is compared with",
    "advantage_max": "size at which advantages are clipped, above 0",
    "known": "values of prompts so far, which a run keeps; leave it out",
    "anchors": (
        "divergences from other policies that the loss adds: a list of {weight: 0.01, role: ref}, "
        "[] for none"
    ),
    "temperature": (
        "divisor of the logits, in sampling and in the loss, above 0; larger makes completions "
        "more varied"
    ),
    "top_p": (
        "probability of the likeliest tokens that are sampled from, in (0, 1]; 1 is all tokens"
    ),
    "top_k": (
        "number of the likeliest tokens that are sampled from, at least 2, or 0 for all tokens"
    ),
    "min_p": (
        "least probability of a sampled token, relative to the likeliest, in [0, 1); 0 is all "
        "tokens"
    ),
}


def part_meanings(kind: type) -> dict[str, str]:
    """The meaning of each setting of a part, by name, in the order of its settings. Settings that
    nothing describes are left out: a part from a user's file may have such."""
    described = dict[str, str]()
    for base in reversed(kind.__mro__):
        described |= described_settings(vars(base).get("__doc__"), function_parameters(kind))
    if kind.__module__.split(".")[0] in ("flowrl", "samplers"):
        described = SHARED_MEANINGS | described
    return {name: described[name] for name in function_parameters(kind) if name in described}


def part_words(kind: type) -> str:
    """A part's docstring without the lines that describe its settings."""
    return without_settings(kind.__doc__, function_parameters(kind))
