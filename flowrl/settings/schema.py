"""The JSON schema of a run's file, for editors."""

from typing import Any

from flowrl.settings.inherit import BASE_KEY
from flowrl.settings.run import Run

_ABOUT = (
    "Another run's file whose settings these lie over: a path relative to this file, or "
    "configs/... of flowrl. Mappings merge, lists and other values replace."
)


def run_schema() -> dict[str, Any]:
    """The schema of all settings. What a file must have is asked of files without a base only."""
    schema = Run.model_json_schema(by_alias=True)
    prompts = schema["$defs"]["PromptFiles"]
    drawn = {"properties": {"prompts": {"required": prompts.pop("required")}}}
    whole = {
        "required": schema.pop("required"),
        "anyOf": [{"required": ["given"]}, drawn],  # given samples have prompts
        "properties": {},
    }
    recipes = schema["properties"]["recipe"]
    for part in recipes["anyOf"]:  # without its name, a recipe's settings fit several recipes
        if "oneOf" in part:
            part["anyOf"] = part.pop("oneOf")
            part.pop("discriminator")
    recipes["anyOf"].append({"type": "string"})
    schema["properties"] = {
        BASE_KEY: {"type": "string", "minLength": 1, "description": _ABOUT, "title": "Base"},
        **schema["properties"],
    }
    named = {"anyOf": [{"type": "string"}, {"required": ["name"]}]}
    whole["properties"]["recipe"] = named
    return schema | {"if": {"not": {"required": [BASE_KEY]}}, "then": whole}
