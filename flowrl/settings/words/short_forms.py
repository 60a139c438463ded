"""Short forms of sections: `model: NAME`, `prompts: FILE`, `rewards: {pickscore: 1.0}`, `lora: 16`,
`guidance: 4.5`."""

from collections.abc import Mapping
from typing import Any

from flowrl.errors import UserError
from flowrl.paths import find
from flowrl.recipes import RECIPES, TEXT_RECIPES
from rewards.load import own_name

_PIPELINES, _LANGUAGE = ("model_index.json", "modular_model_index.json"), "config.json"
# What may stand for a whole section, as a JSON schema. `spelled_out` expands it: what it stands for
# depends on other sections or on the disk.
FOR_A_SECTION: Mapping[str, Mapping[str, Any]] = {
    "recipe": {"type": "string"},
    "model": {"type": "string"},
    "prompts": {
        "anyOf": [
            {"type": "string"},
            {"$ref": "#/$defs/DataSet"},
            {
                "type": "array",
                "items": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/DataSet"}]},
            },
        ]
    },
}
REWARDS = ("rewards", "held_out_rewards", "intermediate_rewards")


def spelled_out(tree: Mapping[str, Any], recipe: Any = None) -> dict[str, Any]:
    """Expand the short forms in a run's settings. `recipe`: a base's recipe, for a tree without
    one."""
    new = dict(tree)
    if isinstance(new.get("model"), str):
        new["model"] = model_named(new["model"], new.get("recipe", recipe))
    prompts = new.get("prompts")
    if isinstance(prompts, str | list) or (isinstance(prompts, Mapping) and "source" in prompts):
        new["prompts"] = {"train": prompts}
    for place in REWARDS:
        if place in new:
            new[place] = reward_list(new[place])
    return new


def model_named(source: str, recipe: Any) -> dict[str, str]:
    """`{own: FILE.py:NAME}`, or `{pipeline: NAME}` or `{language: NAME}`, depending on the folder's
    content; for a hub name, depending on the recipe."""
    if (code := own_name(source)) is not None and code.function is not None:
        return {"own": source}
    folder = find(source)
    if folder.is_dir():
        image = any((folder / name).is_file() for name in _PIPELINES)
        image = image or not (folder / _LANGUAGE).is_file()
        return {"pipeline" if image else "language": source}
    name = recipe.get("name") if isinstance(recipe, Mapping) else recipe
    if isinstance(name, str) and name in RECIPES:
        return {"language" if name in TEXT_RECIPES else "pipeline": source}
    raise UserError(
        f"model: {source} is not a folder, and the recipe does not say which kind it is: write "
        f"{{pipeline: {source}}} or {{language: {source}}}"
    )


def reward_list(value: Any) -> Any:
    """Rewards as a list, from one name or from a mapping of names to weights or settings."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping) and "name" not in value:
        return [_weighed(str(name), one) for name, one in value.items()]
    if isinstance(value, Mapping):
        return [value]
    if isinstance(value, list | tuple):
        split = [reward_list(one) if isinstance(one, Mapping) else [one] for one in value]
        return [one for specs in split for one in specs]
    return value


def _weighed(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {"name": name, **value}
    return {"name": name} if value is None else {"name": name, "weight": value}


def lora_settings(value: Any) -> Any:
    """Adapter settings: true is the default rank, false no adapters, and a number the rank."""
    value = {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
    if isinstance(value, bool):
        return {} if value else None
    return {"rank": value} if isinstance(value, int | str) else value


def model_of_own(value: Any) -> Any:
    """An own model from only its class."""
    return {"name": value} if isinstance(value, str) else value


def adapter_settings(value: Any) -> Any:
    """Adapter settings from only a file name."""
    return {"path": value} if isinstance(value, str) else value


def guidance_settings(value: Any) -> Any:
    """Guidance scales from one value for both sampling and training; null is the pipeline's
    default."""
    scalar = value is None or isinstance(value, int | float | str)
    return {"sample": value, "train": value} if scalar else value
