"""The recipe of a language model that writes the prompts of an image model."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from flowrl.algorithm import Algorithm
from flowrl.credit.trackers import NoTracker
from flowrl.errors import UserError
from flowrl.settings.base import OnResume
from flowrl.settings.parts.own_parts import RECIPE_PARTS
from flowrl.settings.sections.recipe import RecipeSettings, single_kind
from flowrl.settings.words.sentences import explain

JOINT = "joint"


class JointSettings(RecipeSettings):
    """One tree from texts to images: `text.group` rewritings of each prompt, `image.group` images
    of each rewriting, scored against the prompt. A rewriting's score is the mean score of its
    images.

    text    a text recipe, for `model.rewriter`; its group is the rewritings of a prompt
    image   an image recipe, for `model.pipeline`; its group is the images of a rewriting
    train   the models to train; text or image alone: the other model is only sampled from
    credit  tree: images are compared within a rewriting, and rewritings within a prompt. shared:
            the image recipe compares all images of a prompt, and a rewriting has the mean advantage
            of its images (UniGRPO, arXiv:2603.23500)
    weight  of the image model's loss relative to the language model's
    """

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "name": OnResume.NEVER,
        "train": OnResume.NEVER,
        "credit": OnResume.NEVER,
    }
    name: Literal["joint"] = JOINT  # type: ignore[reportIncompatibleVariableOverride]
    text: dict[str, Any]
    image: dict[str, Any]
    train: Literal["both", "text", "image"] = "both"
    credit: Literal["tree", "shared"] = "tree"
    weight: float = Field(default=1.0, gt=0)

    @field_validator("text", "image", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _sides(self) -> "JointSettings":
        for part in RECIPE_PARTS:
            if getattr(self, part) is not None:
                raise ValueError(
                    f"{part} belongs to one of the two models: set text.{part} or image.{part}"
                )
        for side, settings in (("text", self.text_recipe), ("image", self.image_recipe)):
            algorithm = _algorithm(side, settings)
            if algorithm.text != (side == "text"):
                kind = "texts" if algorithm.text else "images"
                name = getattr(self, side)["name"]
                raise ValueError(
                    f"{side}: {name} is a recipe for {kind}; `flowrl recipes` lists both kinds"
                )
        return self

    @cached_property
    def text_recipe(self) -> RecipeSettings:
        return _settings("text", self.text)

    @cached_property
    def image_recipe(self) -> RecipeSettings:
        return _settings("image", self.image)

    def algorithm(self) -> Algorithm:
        """The image model's algorithm: it generates the scored samples. UserError for choices
        that cannot be combined."""
        text, image = _algorithm("text", self.text_recipe), self.image_recipe.algorithm()
        if len(text.plans) > 1 or text.tracker is not NoTracker:
            raise UserError(
                f"text: {self.text['name']} has several plans or a tracker of prompts, which "
                "rewritings do not support: choose another recipe, such as text_grpo"
            )
        if image.tracker is not NoTracker:
            raise UserError(
                f"image: {self.image['name']} keeps statistics of prompts, but each rewriting is "
                "a new prompt: choose another credit"
            )
        if self.modalities is not None:
            raise UserError("modalities: a joint run's images have one part: leave it out")
        if self.credit == "shared" and image.reward_gradient and self.train != "image":
            raise UserError(
                "credit: a recipe with reward gradients has no advantages to share: set credit: "
                "tree"
            )
        return image

    @cached_property
    def unread(self) -> Sequence[str]:
        return ()


def _settings(side: str, values: Mapping[str, Any]) -> RecipeSettings:
    """Settings of one side's recipe. ValueError, in one sentence."""
    if values.get("name") == JOINT:
        raise ValueError(f"{side}: a joint recipe has two recipes, neither of which can be joint")
    try:
        kind = single_kind(values.get("name"))
    except UserError as error:
        raise ValueError(f"{side}: {error}") from error
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{side}.{explain(error, kind)}") from error
    except UserError as error:
        raise ValueError(f"{side}: {error}") from error


def _algorithm(side: str, settings: RecipeSettings) -> Algorithm:
    try:
        return settings.algorithm()
    except ValueError as error:
        raise UserError(f"{side}: {error}") from error
