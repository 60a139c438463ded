"""Older names of settings, still read for one minor version; each is reported once. Run files that
an older version has written out are read too, with defaults that say nothing any more.

If settings have both an older and the new name, the older one's value is used, since it comes from
a file or an option that overrides the rest.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from flowrl.errors import UserError
from flowrl.recipes import RECIPES
from flowrl.settings.parts.own_parts import is_own

RENAMED = {"way_rewards": "intermediate_rewards"}
RENAMED_IN_RECIPES = {"draws": "levels_per_sample"}
FLAT_TEXT = {  # the flat settings of the recipe `text`, with their defaults
    "plan": {"roots": 4, "branch": 2, "at": [256], "top": 2, "rounds": 1, "by": "surprise"},
    "advantage": {
        "drop_flat": False, "blend": 0.0, "k": 4, "form": "analytic", "most": 10.0, "bundle": 5,
        "quantile_low": 0.2, "quantile_high": 0.8, "mix": 1.5, "keep": 0.9, "uncertain": True,
        "weight": 1.0, "gamma": 0.95, "scale": False, "kl_in": "loss",
    },
    "likelihood": {"ratio": "token", "kl_form": "k3", "cut": "train"},
    "loss": {
        "low": 0.2, "high": 0.2, "keep_low": 1.0, "keep_high": 1.0, "bound": 5.0, "positive": 1.0,
        "negative": 1.05, "beta": 0.1, "denominator": "tokens", "share": None, "entropy": 0.0,
        "off_policy": None,
    },
}  # fmt: skip
_CHOSEN = {
    "plan": "completions", "advantage": "group", "likelihood": "token", "loss": "surrogate",
}  # fmt: skip
_FLAT = {name: value for part in FLAT_TEXT.values() for name, value in part.items()}
_said = set[str]()


def renewed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with older names replaced by current ones."""
    new = _without_idle(_moved(tree, RENAMED))
    recipe = new.get("recipe")
    if isinstance(recipe, Mapping) and str(recipe.get("name")) in RECIPES:
        parameters = inspect.signature(RECIPES[recipe["name"]]).parameters
        rows = {old: name for old, name in RENAMED_IN_RECIPES.items() if name in parameters}
        new["recipe"] = _moved(recipe, rows, "recipe.")
        if recipe["name"] == "text":
            new["recipe"] = _nested(new["recipe"])
    return new


# what older versions wrote into the run files of language models and of users' models, without
# effect
IDLE_GUIDANCE = {"sample": 1.0, "train": 1.0}


def _without_idle(tree: dict[str, Any]) -> dict[str, Any]:
    model = tree.get("model")
    if isinstance(model, Mapping) and not model.get("pipeline") and "guidance" in model:
        if model["guidance"] == IDLE_GUIDANCE:
            rest = {name: value for name, value in model.items() if name != "guidance"}
            return tree | {"model": rest}
    return tree


def older_option(path: Sequence[str], recipe: str) -> bool:
    """Whether a command-line option is an older name."""
    if len(path) == 1:
        return path[0] in RENAMED
    if len(path) != 2 or path[0] != "recipe":
        return False
    parameters = inspect.signature(RECIPES[recipe]).parameters if recipe in RECIPES else {}
    moved = RENAMED_IN_RECIPES.get(path[1]) in parameters
    return moved or (recipe == "text" and path[1] in _FLAT)


def _moved(tree: Mapping[str, Any], names: Mapping[str, str], at: str = "") -> dict[str, Any]:
    new = dict(tree)
    for old, name in names.items():
        if old in new:
            new[name] = new.pop(old)
            _say(f"{at}{old} is now called {at}{name}")
    return new


def _say(line: str) -> None:
    if line not in _said:
        _said.add(line)
        print(line, file=sys.stderr)


def _nested(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe `text` with its flat settings moved into its parts. UserError for a flat setting
    next to a part that is already written out, and for one that no part reads."""
    new = _converted(recipe)
    for part, flat in FLAT_TEXT.items():
        for name in [n for n, value in flat.items() if _plain(recipe.get(n, value)) != value]:
            if not _bare(recipe.get(part)):
                raise UserError(
                    f"recipe.{name}: this setting of the {part} is now inside it: {part}: "
                    f"{{..., {name}: {recipe[name]}}}"
                )
            if _converted({n: value for n, value in recipe.items() if n != name}) == new:
                raise UserError(f"recipe.{name}: no chosen part uses it: leave it out")
    if new != {name: value for name, value in recipe.items() if value is not None}:
        shown = yaml.safe_dump(new, default_flow_style=True, sort_keys=False, width=10_000).strip()
        _say(f"settings of the recipe text are now inside its parts: recipe: {shown}")
    return new


def _converted(recipe: Mapping[str, Any]) -> dict[str, Any]:
    new = {name: value for name, value in recipe.items() if name not in _FLAT and value is not None}
    flat = {name: value for name, value in recipe.items() if name in _FLAT}
    options = _FLAT | _CHOSEN | {"group": 16, "kl": 0.0} | new | flat
    for part, value in _parts(options, recipe):
        new.pop(part, None)
        if value is not None:
            new[part] = value
    one = str(options["group"]) == "1"  # with a tracker, or a greedy baseline
    if one and isinstance(options["plan"], str):
        new["plan"] = {**new.get("plan", {}), "group": new.pop("group")}
    if options["kl_in"] == "reward":
        new.pop("kl", None)
    return new


def _bare(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not is_own(value))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _parts(options: Mapping[str, Any], recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The parts that older names and flat settings refer to; None for the recipe's own."""
    makers = {"plan": _plan, "advantage": _advantage, "likelihood": _likelihood, "loss": _loss}
    for part, make in makers.items():
        if _bare(recipe.get(part)):
            yield part, make(options)
    name, tracker = options["advantage"], None
    if name == "risk":
        tracker = {"name": "score_quantiles", **_taken(options, "bundle"), **_quantiles(options)}
    if name in ("tracked", "aapo"):
        uncertain = _taken(options, "uncertain") if name == "tracked" else {}
        tracker = {"name": "prompt_values", **_taken(options, "keep"), **uncertain}
    if tracker is not None:
        yield "tracker", tracker


def _taken(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: _plain(options[name]) for name in names}


def _quantiles(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"low": options["quantile_low"], "high": options["quantile_high"]}


def _plan(options: Mapping[str, Any]) -> Any:
    if options["plan"] == "segments":
        return {"name": "segments", **_taken(options, "roots", "branch", "at")}
    if options["plan"] == "forks":
        forking = _taken(options, "top", "branch", "rounds", "by")
        return {"name": "forks", "roots": options["roots"], "forking": forking}
    return {"greedy": True} if options["advantage"] == "greedy" else None


def _advantage(options: Mapping[str, Any]) -> Any:
    name, group = options["advantage"], str(options["group"])
    drawn = int(group) if group.isdigit() else 0
    standardize = {"scale": "group", "correction": 1} | (
        {"blend": options["blend"]} if options["blend"] else {}
    )
    mean = {"name": "standardize", "scale": None, "correction": 0}
    batch = {"name": "standardize", "scale": "batch", "correction": 1, "centre": "batch"}
    chains: dict[str, list[Any]] = {
        "group": [{"name": "standardize", **standardize}],
        "gdpo": [{"name": "standardize", "scale": "group", "correction": 1},
                 {"name": "sum", "partial": True}, batch],
        "aapo": [{"name": "augmented", "rule": standardize}],
        "two_level": [{"name": "two_level", "rule": standardize}],
        "mean": [mean],
        "greedy": [{"name": "greedy_baseline", "samples": drawn + 1}],
        "length": ["length_baseline"],
        "whitened": ["whiten_tokens"],
        "mean_whitened": [mean, "whiten_tokens"],
        "maxrl": ["max_rl"],
        "pass_at_k": [{"name": "pass_at_k", **_taken(options, "k", "form")}],
        "beta": [{"name": "beta_normalize", "most": options["most"]}],
        "risk": [
            {"name": "risk_po", **_taken(options, "bundle", "mix"), **_quantiles(options)},
            batch,
        ],
        "tracked": ["baseline", batch],
        "parent": ["parent_difference"],
        "local": ["global_local"],
        "treerl": [{"name": "global_local", "first": True}],
        "tempo": [{"name": "global_local", "power": 1.0, "scaled": True}],
        "states": [{"name": "states", **_taken(options, "weight", "gamma", "scale")}],
        "turns": ["turns", {"name": "standardize", "scale": "group", "correction": 1}],
        "returns": [{"name": "discount", "gamma": options["gamma"]}, "whiten_turns"],
    }  # fmt: skip
    chain = chains.get(name, [name])
    if options["kl_in"] == "reward":
        at = 1 if name in ("greedy", "mean_whitened") else 0
        per_token = {"each": True} if name in ("whitened", "mean_whitened") else {}
        chain.insert(at, {"name": "penalize", "weight": options["kl"], **per_token})
    chain = ["drop_flat", *chain] if options["drop_flat"] else chain
    if chain == [{"name": "standardize", "scale": "group", "correction": 1}]:
        return None
    return chain[0] if len(chain) == 1 else chain


def _likelihood(options: Mapping[str, Any]) -> Any:
    default = FLAT_TEXT["likelihood"]
    changed = {name: options[name] for name in default if options[name] != default[name]}
    if options["share"] is not None or options["entropy"]:
        changed["entropy"] = True
    return (changed | {"paired": True} if options["loss"] == "preference" else changed) or None


def _loss(options: Mapping[str, Any]) -> Any:
    name, default = options["loss"], FLAT_TEXT["loss"]
    settings = {
        "surrogate": ("low", "high"), "gmpo": ("low", "high"), "sapo": ("positive", "negative"),
        "gppo": ("low", "high", "keep_low", "keep_high"), "preference": ("beta",),
    }.get(name, ())  # fmt: skip
    changed = _taken(options, *settings)
    if name not in ("gmpo", "preference"):  # whose own defaults differ, or that have none
        changed = {n: value for n, value in changed.items() if value != default[n]}
    if name == "cispo" and options["bound"] != default["bound"]:
        changed["high"] = options["bound"]
    if options["entropy"]:
        changed["entropy"] = options["entropy"]
    if options["denominator"] != default["denominator"] or name in ("gmpo", "sapo"):
        length = options["denominator"] == "length"
        changed["denominator"] = options.get("length", 1024) if length else options["denominator"]
    weights = [
        {"name": kind, setting: options[old]}
        for old, kind, setting in (("share", "high_entropy", "share"),
                                   ("off_policy", "off_policy_mask", "threshold"))
        if options[old] is not None
    ]  # fmt: skip
    changed |= {"weights": weights} if weights else {}
    if name == "surrogate":
        return changed or None
    return {"name": name, **changed} if changed else name
