"""LAION's aesthetic score, about 1 to 10: how much people like an image, regardless of its prompt.

Five linear layers, without a non-linearity between them, on the unit vector that CLIP ViT-L/14
returns for an image (768, 1024, 128, 64, 16, 1). The published file is
`sac+logos+ava1-l14-linearMSE.pth` of christophschuhmann/improved-aesthetic-predictor; the hub's
copy of the same layers is the default here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rewards.perception.embedding import Towers, in_batches, pil_images, transformers_towers
from rewards.perception.hub import HubName, weights_file
from rewards.perception.image_model import ImageModelSettings
from rewards.perception.weight_files import weights_of_file
from rewards.rights import ReadFile
from rewards.types import Inline, Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

REPOSITORY, FILE = "trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth"
LINEAR = (0, 2, 4, 6, 7)  # indices of the linear layers in the file; the others are dropout


def head_of(state: Mapping[str, Tensor], place: str) -> nn.Sequential:
    """Build the layers `layers.<i>.weight` and `.bias` with the sizes in the file."""
    wanted = {f"layers.{i}.{part}" for i in LINEAR for part in ("weight", "bias")}
    if set(state) != wanted:
        differ = ", ".join(sorted(set(state) ^ wanted)[:4])
        raise ValueError(
            f"{place} does not hold a head of five linear layers: {differ} missing or unexpected"
        )
    layers = nn.Sequential()
    for i in LINEAR:
        weight, bias = state[f"layers.{i}.weight"], state[f"layers.{i}.bias"]
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight, "bias": bias})
        layers.append(layer)
    return layers.float().eval().requires_grad_(False)


@dataclass(frozen=True)
class Aesthetic:
    towers: Towers
    head: nn.Sequential
    batch: int

    @torch.no_grad()
    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        vectors = in_batches(self.towers.images, pil_images(samples), self.batch)
        return self.head(vectors).squeeze(-1)

    def differentiable(
        self, media: Float[Tensor, "n 3 h w"], samples: Samples
    ) -> Float[Tensor, " n"]:
        parts = [self.towers.graded(part).cpu() for part in media.split(self.batch)]
        return self.head(torch.cat(parts)).squeeze(-1)


def load(
    model: HubName = "openai/clip-vit-large-patch14",
    head: ReadFile | None = None,
    common: Inline[ImageModelSettings] = ImageModelSettings(),
) -> Reward:
    """Load the reward.

    model  CLIP model whose image vectors the head reads: a folder or a name on the hub; the
           published head reads those of ViT-L/14
    head   file with the five linear layers; null takes the published one from the hub
    """
    file = Path(weights_file("aesthetic", "head", head, (REPOSITORY, FILE)))
    layers = head_of(weights_of_file("aesthetic", file), f"aesthetic: {file}")
    towers = transformers_towers(model, common.placement)
    return common.over_frames("aesthetic", Aesthetic(towers, layers, common.batch))
