"""Similarity of an image to a reference image, for edits: the cosine of two embeddings.

A column of the prompt file names the reference file. kind clip compares CLIP's image vectors
(semantic content; CLIP-I), dino the class tokens of a DINO or DINOv2 (identity and appearance of
the subject; DINO-I): both from DreamBooth, arXiv:2208.12242. 1 is the same image.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional

from rewards.perception.embedding import (
    Placement,
    complete,
    image_processor,
    in_batches,
    pil_images,
    transformers_towers,
)
from rewards.perception.hub import HubName, model_path
from rewards.perception.image_model import ImageModelSettings
from rewards.perception.media import to_pil
from rewards.perception.references import read_references, reference_key
from rewards.types import Inline, Kind, NeededColumn, Reward, Samples, cell

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

MODELS = {"clip": "openai/clip-vit-large-patch14", "dino": "facebook/dinov2-base"}
Embed = Callable[[Sequence[Image.Image]], Float[Tensor, "n e"]]


@dataclass(frozen=True)
class Similarity:
    """Cosine similarity to the reference; NaN for samples whose reference is missing or
    unreadable."""

    embed: Embed
    column: str
    batch: int

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        score = torch.full((len(samples.prompts),), torch.nan)
        cells = [cell(row, self.column) for row in samples.meta] or [None] * len(score)
        images = read_references("similarity:", cells)
        keys = [reference_key(value) for value in cells]
        pairs = zip(keys, images, strict=True)
        pixels_by_key = {key: pixels for key, pixels in pairs if pixels is not None}
        rows = [row for row, key in enumerate(keys) if key in pixels_by_key]
        if not rows:
            return score
        shown = [to_pil(pixels) for pixels in pixels_by_key.values()]
        references = in_batches(self.embed, shown, self.batch)
        embeddings = in_batches(self.embed, pil_images(samples.take(rows)), self.batch)
        index = {key: number for number, key in enumerate(pixels_by_key)}
        score[rows] = (embeddings * references[[index[keys[row]] for row in rows]]).sum(-1)
        return score


def dino(model: str, placement: Placement) -> Embed:
    """Return a function from images to the last layer's class tokens after its norm, as unit
    vectors."""
    from transformers import AutoModel

    loaded, processor = (
        placement.put(complete(AutoModel.from_pretrained, model)),
        image_processor(model),
    )

    @torch.no_grad()
    def embed(images: Sequence[Image.Image]) -> Float[Tensor, "n e"]:
        pixels = processor(list(images), return_tensors="pt")["pixel_values"]
        out = loaded(pixel_values=pixels.to(placement.device, placement.dtype)).last_hidden_state
        return functional.normalize(out[:, 0].float(), dim=-1)

    return embed


def load(
    kind: Literal["clip", "dino"] = "clip",
    model: HubName | None = None,
    column: NeededColumn = "reference",
    common: Inline[ImageModelSettings] = ImageModelSettings(),
) -> Reward:
    """Load the reward.

    kind    embedding that is compared: CLIP's image vectors (content), or a DINO's class tokens
            (identity and appearance of the subject)
    model   model that reads images: a folder or a name on the hub; null takes
            openai/clip-vit-large-patch14 or facebook/dinov2-base
    column  column of the prompt file with the reference image: a path or its bytes
    """
    model = model or MODELS[kind]
    if kind == "clip":
        embed = transformers_towers(model, common.placement).images
    else:
        embed = dino(model_path(model), common.placement)
    return common.over_frames("similarity", Similarity(embed, column, common.batch))
