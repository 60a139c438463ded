"""Agreement of an image with its prompt by a CLIP model: arXiv:2103.00020.

kind  cosine      cos(image, prompt), about 0.1 to 0.4 for the published models
      logit       the cosine times the trained scale, at most 100
      clipscore   2.5 max(cosine, 0), CLIPScore of arXiv:2104.08718 without its "A photo depicts"

`library: transformers` takes a CLIPModel by hub name or folder (the demo's own is
flowrl/demo/shapes-clip); `library: open_clip` takes ViT-L-14/openai, hf-hub:... or local-dir:...
"""

from typing import Literal

from rewards.perception.embedding import Cosine, open_clip_towers, transformers_towers
from rewards.perception.hub import HubName
from rewards.perception.image_model import ImageModelSettings
from rewards.types import Inline, Kind, Reward

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

CLIPSCORE = 2.5  # arXiv:2104.08718, section 3


def load(
    model: HubName = "openai/clip-vit-large-patch14",
    library: Literal["transformers", "open_clip"] = "transformers",
    kind: Literal["cosine", "logit", "clipscore"] = "cosine",
    common: Inline[ImageModelSettings] = ImageModelSettings(),
) -> Reward:
    """Load the reward.

    model    CLIP model: a folder or a name on the hub; with `library: open_clip` ViT-L-14/openai,
             hf-hub:NAME or local-dir:FOLDER
    library  package that loads the model
    kind     cosine: of image and prompt, in -1..1; logit: the cosine times the model's trained
             scale, at most 100; clipscore: 2.5 times the cosine, and 0 where that is negative
    """
    towers_of = open_clip_towers if library == "open_clip" else transformers_towers
    towers = towers_of(model, common.placement)
    factor = {"cosine": 1.0, "logit": towers.scale, "clipscore": CLIPSCORE}[kind]
    floor = 0.0 if kind == "clipscore" else -1.0
    return common.over_frames("clip", Cosine(towers, factor, floor, common.batch))
