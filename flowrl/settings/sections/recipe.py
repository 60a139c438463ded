"""The recipe of a run: its name, or FILE.py:FUNCTION, and its settings."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import (
    ConfigDict,
    Field,
    PydanticSchemaGenerationError,
    create_model,
    field_validator,
    model_validator,
)

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError, feature_files
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.transition import Transition
from flowrl.recipes import RECIPES
from flowrl.recipes.meanings import recipe_words, setting_meanings
from flowrl.settings.base import OnResume, Settings
from flowrl.settings.parts.own_parts import (
    RECIPE_PARTS,
    checked_part,
    named_part,
    part_kind,
    part_setting,
    with_part,
)
from flowrl.settings.parts.trials import own_error
from flowrl.settings.words.names import unknown_name
from rewards.checks.settings import function_parameters
from rewards.load import own_name, user_function_of

_MOST = {"steps": 250, "group": 10_000, "roots": 1_000, "branch": 100, "length": 1_000_000}
_MOST_OTHER = 10_000  # of a recipe's other integers
_MOST_LEAVES = 10_000  # samples of one tree
Part = str | dict[str, Any] | None


def _replaces(part: str) -> str:
    return f"{part} in place of the recipe's own: NAME, {{name: NAME, ...settings}} or FILE.py:NAME"


class RecipeSettings(Settings):
    """Settings of a recipe; integers are bounded, since a plan stores each step and sample."""

    model_config = ConfigDict(use_attribute_docstrings=False)  # its settings are arguments
    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {"name": OnResume.NEVER}
    name: str
    plan: Part = Field(default=None, description=_replaces("plan of noisy and trained steps"))
    advantage: Part | list[str | dict[str, Any]] = Field(
        default=None,
        description=_replaces("rule from rewards to advantages, or a list of such rules in turn"),
    )
    likelihood: Part = Field(default=None, description=_replaces("log-probability of a sample"))
    loss: Part = Field(default=None, description=_replaces("loss"))
    tracker: Part = Field(default=None, description=_replaces("statistics of prompts"))
    modalities: dict[str, tuple[str, ...]] | None = Field(
        default=None,
        description="rewards of each part of a sample, such as {video: [A], audio: [B]}; null "
        "counts all rewards for the whole",
    )

    @field_validator(*RECIPE_PARTS, mode="before", check_fields=False)
    @classmethod
    def _part(cls, value: Any, info: Any) -> Any:
        return checked_part(info.field_name, value)

    @model_validator(mode="after")
    def _leaves(self) -> "RecipeSettings":
        values = dict(self)
        at, roots, branch = (values.get(name) for name in ("at", "roots", "branch"))
        cuts = max(1, len(at)) if isinstance(at, tuple) else 1
        if cuts > _MOST["steps"]:
            raise ValueError(f"at: more steps than {_MOST['steps']}")
        roots, branch = (n if isinstance(n, int) else 1 for n in (roots, branch))
        leaves = roots * branch ** min(cuts, 20)
        if leaves > _MOST_LEAVES:
            raise ValueError(
                f"roots and branch make {leaves} samples per prompt; at most {_MOST_LEAVES} are "
                "allowed"
            )
        return self

    def algorithm(self) -> Algorithm:
        """Call the recipe with its settings, and replace its parts by the run's.

        UserError for choices that cannot be combined, for a function that returns no Algorithm, and
        for a setting that is unused because of the run's parts.
        """
        algorithm = self._routed(self._made({}))
        if algorithm.group > _MOST["group"]:
            raise UserError(
                f"{algorithm.group} samples per prompt; at most {_MOST['group']} are allowed"
            )
        if self.unread:
            name = self.unread[0]
            replaced = ", ".join(self._readers(name))
            default = json.dumps(type(self).model_fields[name].default)
            raise UserError(
                f"{name} has no effect, since this run replaces the recipe's {replaced}: leave it "
                f"out (where a base sets it: {name}: {default}, the recipe's own), or set it "
                f"inside {replaced}, {{name: NAME, ...settings}}"
            )
        return algorithm

    def _routed(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm with advantages by part, if the run names them. UserError for a likelihood
        without parts."""
        if self.modalities is None:
            return algorithm
        if not isinstance(algorithm.likelihood, Transition | Matching):
            raise UserError(
                f"modalities: the likelihood of {self.name} has no parts: leave modalities out"
            )
        if not self.modalities or not all(self.modalities.values()):
            raise UserError("modalities: name the rewards of each part, {video: [A], audio: [B]}")
        likelihood = replace(algorithm.likelihood, parts=tuple(self.modalities))
        routes = tuple(self.modalities.items())
        return replace(
            algorithm, likelihood=likelihood, advantage=replace(algorithm.advantage, routes=routes)
        )

    @cached_property
    def unread(self) -> Sequence[str]:
        """Settings of the recipe without effect, because the run's parts replace the parts that
        read them."""
        if not self._replaced:
            return ()
        fields, whole = type(self).model_fields, repr(self._made({}))
        names = self.model_fields_set - {"name", "modalities", *self._replaced}
        written = [n for n in names if n in fields]
        changed = [n for n in sorted(written) if getattr(self, n) != fields[n].default]
        return tuple(n for n in changed if self._alike({n: fields[n].default}, whole))

    def _readers(self, name: str) -> Sequence[str]:
        """The replaced parts whose own form in the recipe reads an unread setting; all replaced
        ones if it takes several together."""
        fields, values = type(self).model_fields, self.model_dump(exclude_unset=True)

        def reads(part: str) -> bool:
            without = type(self)(**{**values, part: fields[part].default})
            try:
                return name not in without.unread
            except ValueError:  # the other parts need this one
                return False

        return [part for part in self._replaced if reads(part)] or self._replaced

    def _alike(self, changed: Mapping[str, Any], whole: str) -> bool:
        try:
            return repr(self._made(changed)) == whole
        except ValueError:  # it is read, and refused
            return False

    @property
    def _replaced(self) -> Sequence[str]:
        """The parts that the run names, except parts for which the recipe has its own names."""
        named = [name for name in RECIPE_PARTS if getattr(self, name) is not None]
        for name, parameter in function_parameters(recipe_function(self.name)).items():
            value = getattr(self, name)
            if part_kind(parameter.annotation) is not None and named_part(value, parameter):
                named.append(name)
        return list(dict.fromkeys(named))

    def _made(self, changed: Mapping[str, Any]) -> Algorithm:
        """The algorithm, with other values for these settings."""
        recipe, arguments = recipe_function(self.name), dict[str, Any]()
        parameters = function_parameters(recipe)
        for name, parameter in parameters.items():
            value, kind = changed.get(name, getattr(self, name)), part_kind(parameter.annotation)
            if kind is not None and named_part(value, parameter):
                value = kind.build(value)
            if value is not None or _plain(parameter.default):
                arguments[name] = value
        algorithm: Any = self._called(recipe, arguments)
        if not isinstance(algorithm, Algorithm):
            raise UserError(
                f"{self.name} must return a flowrl.algorithm.Algorithm, not "
                f"{type(algorithm).__name__}"
            )
        parts = dict[str, Any]()
        for name in RECIPE_PARTS:
            if name not in parameters and (value := getattr(self, name)) is not None:
                try:
                    parts[name] = with_part(name, value, getattr(algorithm, name))
                except ValueError as error:
                    raise UserError(f"{name}: {error}") from error
        return replace(algorithm, **parts) if parts else algorithm

    def _called(self, recipe: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        try:
            with feature_files("samplers.routes", self.name):
                return recipe(**arguments)
        except ValueError:  # settings that it refuses
            raise
        except Exception as error:
            if self.name in RECIPES:
                raise
            raise UserError(own_error(self.name, error)) from error


class OwnRecipe(RecipeSettings):
    """A recipe from a user's file, in the schema for editors."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(pattern=r".+\.py:\w+")]


def recipe_function(name: Any) -> Callable[..., Algorithm]:
    """Recipe of this name, or the function FILE.py:FUNCTION. UserError if there is none."""
    if isinstance(name, str) and name in RECIPES:
        with feature_files("samplers.routes", name):
            return RECIPES[name]
    if isinstance(name, str) and own_name(name) is not None:
        try:
            return user_function_of(name)
        except ValueError as error:
            raise UserError(f"recipe.name: {error}") from error
    if name is None:
        raise UserError(
            "recipe.name: missing: write one, such as `recipe: {name: nft, steps: 8}`; `flowrl "
            "recipes` lists them"
        )
    raise UserError(f"recipe.name: {unknown_name(name, list(RECIPES))}")


def single_kind(name: Any) -> type[RecipeSettings]:
    """Settings model of a recipe for one model. UserError for an unknown recipe or an invalid
    function."""
    if isinstance(name, str) and name in RECIPE_SETTINGS:
        return RECIPE_SETTINGS[name]
    return _own_kind(name, recipe_function(name))


@cache
def _own_kind(name: str, recipe: Callable[..., Algorithm]) -> type[RecipeSettings]:
    form = "write it as `def my_recipe(*, steps: int = 10, group: int = 8) -> Algorithm`"
    for parameter in function_parameters(recipe).values():
        at = f"recipe.name: {name}: the parameter {parameter.name!r}"
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise UserError(f"{at} collects arguments, but a setting needs a name: {form}")
        if parameter.name in ("name", *dir(RecipeSettings)) or parameter.name.startswith("_"):
            raise UserError(f"{at} cannot be a setting: choose another name")
        if parameter.annotation is parameter.empty:
            raise UserError(f"{at} has no type: {form}")
        if parameter.default is parameter.empty:
            raise UserError(f"{at} has no default: {form}")
    try:
        return recipe_settings(name, recipe)
    except PydanticSchemaGenerationError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"recipe.name: {name} has a setting whose type cannot be checked: {reason}"
        ) from error


def recipe_settings(name: str, recipe: Callable[..., Algorithm]) -> type[RecipeSettings]:
    """The keyword arguments of a recipe as a settings model."""
    fields: dict[str, Any] = {"name": (Literal[name], name)}  # type: ignore[valid-type]
    meanings = setting_meanings(recipe)
    for parameter in function_parameters(recipe).values():
        assert parameter.default is not inspect.Parameter.empty, (name, parameter.name)
        annotation, default = parameter.annotation, parameter.default
        kind = part_kind(annotation)
        if kind is not None:
            if not _plain(default):  # null stands for the part that the function has itself
                annotation, default = Union[annotation, None], None  # noqa: UP007
            annotation = part_setting(annotation, kind)
        elif annotation is int:
            most = _MOST.get(parameter.name, _MOST_OTHER)
            annotation = Annotated[int, Field(le=most)]
        meaning = meanings.get(parameter.name)
        fields[parameter.name] = (annotation, Field(default=default, description=meaning))
    return create_model(name, __base__=RecipeSettings, __doc__=recipe_words(recipe), **fields)


def _plain(value: Any) -> bool:
    """Whether a default can be written in YAML."""
    if isinstance(value, tuple | list):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


class PublishedKinds(Mapping[str, type[RecipeSettings]]):
    """Settings models of the published recipes by name, each built on first use."""

    def __getitem__(self, name: str) -> type[RecipeSettings]:
        if name not in RECIPES:  # a user's file, which asking for its name must not import
            raise KeyError(name)
        return _published_kind(name)

    def __contains__(self, name: object) -> bool:
        return name in RECIPES  # asking for a user's FILE.py:FUNCTION imports nothing

    def __iter__(self) -> Iterator[str]:
        return iter(RECIPES)

    def __len__(self) -> int:
        return len(RECIPES)


@cache
def _published_kind(name: str) -> type[RecipeSettings]:
    return recipe_settings(name, recipe_function(name))


RECIPE_SETTINGS = PublishedKinds()
