"""Meanings of the settings of recipes: `flowrl recipes NAME`, the pages of methods and editors
print them.

A setting is described in the docstring of its recipe (`rewards.checks.described`):

    beta   inverse temperature of the preference, above 0; larger keeps the policy nearer

What a setting means in all of flowrl's recipes that have it stands here once, and a line of a
recipe's docstring replaces it.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from flowrl.likelihoods.matching import WeightingName
from flowrl.likelihoods.transition import KlForm
from flowrl.recipes.credit_choices import CreditName
from flowrl.recipes.grpo import Scale
from flowrl.recipes.reward_gradient import Form
from rewards.checks.described import described_settings, without_settings

_PART = "NAME, {name: NAME, ...settings} or FILE.py:NAME"
# (setting, its type where the name alone is ambiguous, meaning)
_SHARED: Sequence[tuple[str, Any, str]] = (
    (
        "steps",
        int,
        "denoising steps of a training sample (num inference steps), at least 1; more make finer "
        "samples and slower sampling",
    ),
    (
        "group",
        int,
        "samples per prompt that are compared with each other, at least 2; more make advantages "
        "less noisy, and cost that many more samples",
    ),
    (
        "eta",
        float,
        "noise of a sampling step, above 0 (`cps`: largest at 1, at most 2); more explores more, "
        "and makes samples rougher; no effect with a kernel of your own",
    ),
    (
        "clip",
        float,
        "clip range of the ratio p_new / p_old, [1 - clip, 1 + clip], in (0, 1]: beyond it, a "
        "change that the advantage favours has no gradient, so that smaller limits each update "
        "more",
    ),
    (
        "low",
        float,
        "clip range of the ratio p_new / p_old below 1: under 1 - low, bad samples have no "
        "gradient; in (0, 1], smaller limits each update more",
    ),
    (
        "high",
        float,
        "clip range of the ratio p_new / p_old over 1: beyond 1 + high, good samples have no "
        "gradient; above 0, larger than `low` lets unlikely tokens gain more",
    ),
    (
        "kl",
        float,
        "weight of the divergence from the initial policy (KL coefficient), at least 0; larger "
        "keeps the policy nearer to it, 0 leaves it out",
    ),
    (
        "fraction",
        float,
        "share of the noisy steps that is trained, drawn in each iteration, in (0, 1]; smaller "
        "makes updates cheaper",
    ),
    (
        "window",
        int,
        "noisy and trained steps in a row, at least 1; more train more of each sample, and cost "
        "more; the other steps are deterministic",
    ),
    (
        "shared_noise",
        bool,
        "whether a prompt's samples start from the same noise, so that only the noise of their "
        "steps differs",
    ),
    (
        "kernel",
        None,
        "noise of the sampling steps: Flow-GRPO's (`flow_sde`), Flow-CPS's (`cps`), Wan 2.1's "
        "(`wan`, without eta) or DanceGRPO's (`constant`), where they are listed, or a part of "
        f"your choice, {_PART}; null is the recipe's own",
    ),
    (
        "solver",
        None,
        f"sampler of the steps without noise: a part of your choice, {_PART}; null is the "
        "recipe's own",
    ),
    (
        "scale",
        Scale,
        "whose standard deviation divides advantages: the prompt's `group`, which makes the least "
        "difference within it large, or the whole `batch`",
    ),
    (
        "kl_form",
        KlForm,
        "form of the divergence that `kl` weighs: `exact`, of the two steps; `published`, smaller "
        "by the step's length, for which the published weight is meant; `velocity`, "
        "|v - v_ref|^2; `mean`, the means' squared distance",
    ),
    (
        "credit",
        CreditName,
        "rule from rewards to advantages: the recipe's own (`group`); each reward standardised by "
        "itself (`gdpo`); the recipe's own plus the difference from the prompt's running mean "
        "(`aapo`); the margin of the best sample over the second best (`best_gap`)",
    ),
    (
        "blend",
        float,
        "share of the advantage over the whole batch that groups without spread have, in [0, 1]; "
        "0 trains nothing on them; not with the credits `gdpo` and `best_gap`",
    ),
    (
        "completion",
        None,
        "steps of the ODE that completes a state before it is scored, at least 1; 1 is the "
        "projection x - sigma v, cheap and least exact; null takes all of the remaining levels",
    ),
    (
        "levels_per_sample",
        int,
        "noise levels of each sample at which the loss is computed, at least 1; more make the "
        "gradient less noisy, and training slower",
    ),
    (
        "weight",
        WeightingName,
        "weight of a matching error by its noise level sigma and size: the same at all "
        "(`uniform`); times sigma (`t`) or sigma^2 (`t2`); times sigma, of a power of the error "
        "(`ghuber`, 1/4, and `huber`, 1/2), so that small errors weigh more; the error of a "
        "noise prediction, times (1 - sigma)^2 (`epsilon`)",
    ),
    (
        "decay",
        None,
        "[flat, slope, most] of the average that samples: its decay at optimizer step s is 0 "
        "before flat, then min(most, slope (s - flat)); larger lets the policy that samples follow "
        "more slowly",
    ),
    (
        "form",
        Form,
        "loss of a sample's reward r: -r (`linear`); max(bound - r, 0), without a gradient above "
        "the bound (`hinge`); |r - bound| (`target`)",
    ),
    (
        "bound",
        float,
        "reward at which `hinge` ends and which `target` aims at, any number, in units of the "
        "weighted sum of the rewards; no effect with `linear`",
    ),
    (
        "scale",
        float,
        "factor on the loss, above 0; rewards are not standardised, so that it acts like a "
        "learning rate",
    ),
    (
        "tau",
        None,
        "least distance between a leap's end and the trajectory in a sample's weight "
        "1 / (max(d_j, tau) + max(d_0, tau)), above 0; larger weighs samples more equally, null "
        "equally",
    ),
    (
        "rescale",
        float,
        "degree to which gradients are enlarged for the velocities that have none, at least 0: 0 "
        "leaves them, 1 makes up for all",
    ),
    (
        "length",
        int,
        "most tokens of a completion, at least 1; a longer one is cut off there",
    ),
    (
        "temperature",
        float,
        "divisor of the logits, in sampling and in the loss, above 0; larger makes completions "
        "more varied",
    ),
    (
        "top_p",
        float,
        "probability of the likeliest tokens that are sampled from, in (0, 1]; 1 is all tokens",
    ),
    (
        "top_k",
        int,
        "number of the likeliest tokens that are sampled from, at least 2, or 0 for all tokens",
    ),
    (
        "min_p",
        float,
        "least probability of a sampled token, relative to the likeliest, in [0, 1); 0 is all "
        "tokens",
    ),
    (
        "cut",
        None,
        "completions that were cut off at `length`: `train` on them, or `mask` them in the loss",
    ),
)


def setting_meanings(recipe: Callable[..., Any]) -> dict[str, str]:
    """The meaning of each setting of a recipe, without a full stop, by name. Settings that nothing
    describes are left out: only a recipe from a user's file may have such, since its own docstring
    alone says what its settings mean."""
    meanings = dict[str, str]()
    if recipe.__module__.startswith("flowrl."):
        for name, parameter in inspect.signature(recipe).parameters.items():
            meanings[name] = _shared(name, parameter.annotation)
    meanings |= described_settings(recipe.__doc__, inspect.signature(recipe).parameters)
    return {name: text for name, text in meanings.items() if text}


def recipe_words(recipe: Callable[..., Any]) -> str:
    """A recipe's docstring without the lines that describe its settings; empty without one."""
    return without_settings(recipe.__doc__, inspect.signature(recipe).parameters)


def _shared(name: str, kind: Any) -> str:
    fits = (text for setting, of, text in _SHARED if setting == name and of in (None, kind))
    return next(fits, "")
