"""Given samples: preference pairs, images, videos or texts to train on."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from flowrl.settings.base import Settings
from rewards.rights import ReadFile

OF_GIVEN = "given"  # name of the data set of prompts that the file of given samples is
GivenKind = Literal["pairs", "images", "texts"]


class GivenSettings(Settings):
    """Given samples, in place of generated samples or in addition to them: see
    docs/given_data.md."""

    file: ReadFile = Field(min_length=1)
    """A file (jsonl, json, csv, tsv, parquet) or a folder of them. Paths in it are relative to its
    folder."""
    kind: GivenKind
    """pairs (a better and a worse sample of a prompt), images (or videos), or texts."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of each iteration's prompts with given samples; the others get generated samples."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of given images and texts in the loss: their advantage. Pairs have no weight."""
    column: str = "prompt"
    """Column of the prompts for images and texts; layouts of pairs have their own column."""
    media: str | None = None
    """Column of the images or videos, or of the completions of texts; null: image or video, or
    completion."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Additional names for columns, such as {chosen: response_a}."""
    layout: str | None = None
    """Layout of pairs of images, as in `flowrl evaluate-rewards`; null: determined by the
    columns."""
    label: str | None = None
    """Column of the labels of pairs of images; null: the layout's column."""
    folder: ReadFile | None = None
    """Folder to which paths of images are relative; null: the file's folder."""
    fit: Literal["exact", "crop"] = "exact"
    """For images of another size than the run's: raise an error, or scale and crop them at the
    centre. For texts of more than recipe.length tokens: raise an error, or cut them."""

    def count(self, draws: int) -> int:
        """Number of given prompts among an iteration's `draws`: at least one."""
        return max(1, round(self.share * draws))


def _is_one(share: Any) -> bool:
    """Whether a share, which an option has as a text, is 1; what is no number is refused later."""
    try:
        return float(share) == 1.0
    except (TypeError, ValueError):
        return False


def with_prompts(tree: Any) -> Any:
    """The run's settings, with the given file as training prompts if all samples are given and
    `prompts.train` names no other file. The data set is then called `given`, which identifies it
    when an option names another file."""
    if not isinstance(tree, Mapping) or not isinstance(tree.get("given"), Mapping):
        return tree
    section, prompts = tree["given"], tree.get("prompts", {})
    alone = _is_one(section.get("share", 1.0)) and isinstance(section.get("file"), str)
    if not alone or not isinstance(prompts, Mapping):
        return tree
    train = prompts.get("train")
    if train is not None and not (isinstance(train, Mapping) and train.get("name") == OF_GIVEN):
        return tree
    column = section.get("column") or prompts.get("column") or "prompt"
    column = "caption" if section.get("layout") == "pickapic" else column
    names = section.get("columns")
    if section.get("kind") == "pairs" and isinstance(names, Mapping):
        column = names.get("prompt", column)
    source = {"source": section["file"], "column": column, "name": OF_GIVEN}
    return {**tree, "prompts": {**prompts, "train": source}}
