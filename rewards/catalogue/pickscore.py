"""PickScore: human choice between two images for a prompt, arXiv:2305.01569.

A CLIP ViT-H/14. The score is the trained scale times the cosine (`kind: logit`), about 18 to 26 on
real samples; Flow-GRPO divides it by 26, MixGRPO takes (score - 18) / 8, DanceGRPO uses the plain
cosine (`kind: cosine`). The processor comes from the CLIP model that was fine-tuned, as in the
authors' example.
"""

from typing import Literal

from rewards.perception.embedding import Cosine, transformers_towers
from rewards.perception.hub import HubName
from rewards.perception.image_model import ImageModelSettings
from rewards.types import Inline, Kind, Reward

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")


def load(
    model: HubName = "yuvalkirstain/PickScore_v1",
    processor: HubName = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    kind: Literal["logit", "cosine"] = "logit",
    common: Inline[ImageModelSettings] = ImageModelSettings(),
) -> Reward:
    """Load the reward.

    model      PickScore's CLIP model: a folder or a name on the hub
    processor  model whose tokenizer and image processor prepare prompt and image: a folder or a
               name on the hub
    kind       logit: the cosine times the trained scale, about 18 to 26; cosine: of image and
               prompt
    """
    towers = transformers_towers(model, common.placement, processor)
    factor = towers.scale if kind == "logit" else 1.0
    return common.over_frames("pickscore", Cosine(towers, factor, batch=common.batch))
