"""The settings of any recipe by its name: of a published one, a user's own, or a joint one."""

from typing import Annotated, Any, Union

from pydantic import Field, GetJsonSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema

from flowrl.settings.sections.joint import JOINT, JointSettings
from flowrl.settings.sections.recipe import (
    RECIPE_SETTINGS,
    OwnRecipe,
    RecipeSettings,
    single_kind,
)


def recipe_kind(name: Any) -> type[RecipeSettings]:
    """Settings model of a recipe. UserError for an unknown recipe or an invalid function."""
    return JointSettings if name == JOINT else single_kind(name)


class EveryRecipe:
    """Annotation of settings whose JSON schema covers all recipes and a user's own. Only the schema
    builds all of them: a run checks just its own recipe."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, _: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        kinds: Any = Union[(*RECIPE_SETTINGS.values(), JointSettings)]
        published: Any = Annotated[kinds, Field(discriminator="name")]
        recipe: Any = Union[published, OwnRecipe]  # noqa: UP007
        adapter = TypeAdapter[Any](recipe)
        return handler(adapter.core_schema) | {"title": "Recipe"}
