"""Agreement of an image with its prompt by a CLIP model: arXiv:2103.00020.

kind  cosine      cos(image, prompt), about 0.1 to 0.4 for the published models
      logit       the trained scale times the cosine, at most 100 times it
      clipscore   2.5 max(cosine, 0), CLIPScore of arXiv:2104.08718 without its "A photo depicts"

`library: transformers` takes a CLIPModel by hub name or folder (the demo's own is
flowrl/demo/shapes-clip); `library: open_clip` takes ViT-L-14/openai, hf-hub:... or local-dir:...
"""

from rewards.perception.embedding import Cosine, Placement, open_clip_towers, transformers_towers
from rewards.perception.frames import check_frames, over_frames
from rewards.perception.hub import HubName
from rewards.types import Reward

CLIPSCORE = 2.5  # arXiv:2104.08718, section 3
CLIP_KINDS = ("cosine", "logit", "clipscore")
LIBRARIES = {"transformers": transformers_towers, "open_clip": open_clip_towers}


def load(
    model: HubName = "openai/clip-vit-large-patch14",
    library: str = "transformers",
    kind: str = "cosine",
    frames: str | int = "all",
    aggregate: str = "mean",
    batch: int = 32,
    device: str = "auto",
    dtype: str = "float32",
) -> Reward:
    """The reward. `batch` images are computed at a time."""
    if kind not in CLIP_KINDS:
        raise ValueError(f"clip: kind is {', '.join(CLIP_KINDS)}, not {kind!r}")
    if library not in LIBRARIES:
        raise ValueError(f"clip: library is {' or '.join(LIBRARIES)}, not {library!r}")
    check_frames("clip", frames, aggregate)
    towers = LIBRARIES[library](model, Placement.of(device, dtype))
    if kind == "clipscore":
        reward = Cosine(towers, CLIPSCORE, floor=0.0, batch=batch)
    else:
        reward = Cosine(towers, towers.scale if kind == "logit" else 1.0, batch=batch)
    return over_frames(reward, "clip", frames, aggregate)
