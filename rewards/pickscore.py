"""PickScore: people's choice between two images for a prompt, arXiv:2305.01569.

A CLIP ViT-H/14. The score is the trained scale times the cosine (`kind: logit`), about 18 to 26 on
real samples; Flow-GRPO divides it by 26, MixGRPO takes (score - 18) / 8, DanceGRPO the plain
cosine (`kind: cosine`). The processor is that of the CLIP it was fine-tuned from, as in the
authors' example.
"""

from rewards.perception.embedding import Cosine, Placement, transformers_towers
from rewards.perception.frames import check_frames, over_frames
from rewards.perception.hub import HubName
from rewards.types import Reward

PICKSCORE_KINDS = ("logit", "cosine")


def load(
    model: HubName = "yuvalkirstain/PickScore_v1",
    processor: HubName = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    kind: str = "logit",
    frames: str | int = "all",
    aggregate: str = "mean",
    batch: int = 32,
    device: str = "auto",
    dtype: str = "float32",
) -> Reward:
    """The reward; `model` and `processor` are hub names or folders."""
    if kind not in PICKSCORE_KINDS:
        raise ValueError(f"pickscore: kind is {' or '.join(PICKSCORE_KINDS)}, not {kind!r}")
    check_frames("pickscore", frames, aggregate)
    towers = transformers_towers(model, Placement.of(device, dtype), processor)
    reward = Cosine(towers, towers.scale if kind == "logit" else 1.0, batch=batch)
    return over_frames(reward, "pickscore", frames, aggregate)
