"""Distance of an image to the most similar other image of its group: 0 for a copy, at most 2.

score = 1 - the largest cosine with another image of the group, of two embeddings: kind dino takes
the class tokens of a DINO or DINOv2, clip CLIP's image vectors. Below 1e-6 it is rounding, and 0.
An image without others in its group is unscored.

It says nothing about quality: trained, it asks for noise. Give it weight 0 and a recipe that reads
it (gardo, arXiv:2512.24138, whose authors use DINOv3's ViT-L). To an embedding that sees little
but what the prompt asks for, all right samples are copies.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from rewards.catalogue.similarity import MODELS, Embed, dino
from rewards.perception.embedding import (
    DtypeName,
    Placement,
    in_batches,
    pil_images,
    transformers_towers,
)
from rewards.perception.hub import HubName, model_path
from rewards.perception.media import expect
from rewards.types import Kind, OneOrMore, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image",)

ROUNDED = 1e-6  # of cosines of float32 vectors


@dataclass(frozen=True)
class Distance:
    per: ClassVar[Literal["group"]] = "group"
    embed: Embed
    batch: int

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "distance", "image")
        seen = in_batches(self.embed, pil_images(samples), self.batch).double()
        seen, group = functional.normalize(seen, dim=-1), samples.group.cpu()
        other = (group[:, None] == group) & ~torch.eye(len(group), dtype=torch.bool)
        nearest = (seen @ seen.T).clamp(-1, 1).masked_fill(~other, -torch.inf).amax(1)
        gap = torch.where(1 - nearest < ROUNDED, 0.0, 1 - nearest)
        return torch.where(other.any(1), gap, torch.nan)


def load(
    kind: Literal["clip", "dino"] = "dino",
    model: HubName | None = None,
    batch: OneOrMore = 32,
    device: str = "auto",
    dtype: DtypeName = "float32",
) -> Reward:
    """Load the reward.

    kind   embedding that is compared: a DINO's class tokens, or CLIP's image vectors
    model  model that reads images: a folder or a name on the hub; null takes facebook/dinov2-base
           or openai/clip-vit-large-patch14
    """
    model, placement = model or MODELS[kind], Placement.of(device, dtype)
    if kind == "clip":
        return Distance(transformers_towers(model, placement).images, batch)
    return Distance(dino(model_path(model), placement), batch)
