"""Consistency of a video's subject or background over its frames, as in VBench (arXiv:2311.17982).

Frames become unit vectors. Each frame from the second on has (max(0, cos to the previous frame) +
max(0, cos to the first frame)) / 2, and the score is the mean.

* `kind: dino`, subject consistency: class tokens of DINO ViT-B/16 after the last norm, the shorter
  side resized to the model's (bilinear, no antialias, no crop);
* `kind: clip`, background consistency: CLIP's image vectors, the central square (bicubic, no
antialias). Any CLIP model can be used: `{kind: clip, model: flowrl/demo/shapes-clip}` needs no
download.

Frames stay floats between resizing and the network, as in VBench's code; some of its versions leave
colours in 0..255 before the normalisation, which is not reproduced.

A frozen video has the highest value, 1. It rewards small motion, empty scenes and one large
subject that fills the frame; use it together with `motion`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from rewards.perception.embedding import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    OPENAI_MEAN,
    OPENAI_STD,
    DtypeName,
    Placement,
    complete,
    standardised,
)
from rewards.perception.hub import HubName, model_path
from rewards.perception.media import each_video
from rewards.types import Kind, OneOrMore, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("video",)

VBENCH_MODELS = {"dino": "facebook/dino-vitb16", "clip": "openai/clip-vit-base-patch32"}
VideoFrames = Float[Tensor, "f 3 h w"]


@dataclass(frozen=True)
class Consistency:
    embed: Callable[[VideoFrames], Float[Tensor, "f e"]]
    batch: int

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        return each_video("consistency", samples, self._score, least=2)

    def _score(self, video: VideoFrames) -> Tensor:
        parts = video.float().clamp(0, 1).split(self.batch)
        vectors = torch.cat([self.embed(frames) for frames in parts])
        before = (vectors[1:] * vectors[:-1]).sum(-1).clamp(min=0)
        first = (vectors[1:] * vectors[0]).sum(-1).clamp(min=0)
        return ((before + first) / 2).mean()

    def examples(self) -> Samples:
        """A frozen video, and one whose frames have nothing in common."""
        noise = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
        unlike = noise * torch.tensor([0.1, 1.0, 0.3, 0.7]).view(4, 1, 1, 1)
        unlike[1] = torch.linspace(0, 1, 64).expand(3, 64, 64)
        unlike[3] = 1 - unlike[1].mT
        media = torch.stack([noise[:1].expand(4, -1, -1, -1), unlike])
        return Samples(media, ["a video"] * 2, torch.zeros(2, dtype=torch.long))


def sized(
    frames: VideoFrames, side: int, mode: Literal["bilinear", "bicubic"]
) -> Float[Tensor, "f 3 a b"]:
    """Resize the shorter side to `side`, without antialiasing; the longer side is rounded down."""
    h, w = frames.shape[-2:]
    short = min(h, w)
    size = [side if length == short else int(side * length / short) for length in (h, w)]
    return functional.interpolate(frames, size, mode=mode, antialias=False)


def dino_frames(model: str, placement: Placement) -> Callable[[VideoFrames], Float[Tensor, "f e"]]:
    """Return a function from frames in 0..1 to a ViT's class tokens, as unit vectors."""
    from transformers import ViTModel

    unpooled = partial(ViTModel.from_pretrained, add_pooling_layer=False)
    loaded: Any = placement.put(complete(unpooled, model))
    side = loaded.config.image_size

    @torch.no_grad()
    def embed(frames: VideoFrames) -> Float[Tensor, "f e"]:
        pixels = standardised(sized(frames, side, "bilinear"), IMAGENET_MEAN, IMAGENET_STD)
        out = loaded(
            pixel_values=pixels.to(placement.device, placement.dtype), interpolate_pos_encoding=True
        )
        return functional.normalize(out.last_hidden_state[:, 0].float(), dim=-1)

    return embed


def clip_frames(model: str, placement: Placement) -> Callable[[VideoFrames], Float[Tensor, "f e"]]:
    """Return a function from frames in 0..1 to CLIP's image embeddings, as unit vectors."""
    from transformers import CLIPModel

    loaded: Any = placement.put(complete(CLIPModel.from_pretrained, model))
    side = loaded.config.vision_config.image_size

    @torch.no_grad()
    def embed(frames: VideoFrames) -> Float[Tensor, "f e"]:
        small = sized(frames, side, "bicubic")
        top, left = (round((length - side) / 2) for length in small.shape[-2:])
        square = small[..., top : top + side, left : left + side]
        pixels = standardised(square, OPENAI_MEAN, OPENAI_STD).to(placement.device, placement.dtype)
        pooled = loaded.vision_model(pixel_values=pixels).pooler_output
        return functional.normalize(loaded.visual_projection(pooled).float(), dim=-1)

    return embed


def load(
    kind: Literal["dino", "clip"] = "dino",
    model: HubName | None = None,
    batch: OneOrMore = 32,
    device: str = "auto",
    dtype: DtypeName = "float32",
) -> Reward:
    """Load the reward.

    kind   dino: of the subject, by a ViT's class tokens; clip: of the background, by CLIP's image
           vectors
    model  model that reads frames: a folder or a name on the hub; null takes VBench's,
           facebook/dino-vitb16 or openai/clip-vit-base-patch32
    batch  frames per call of the model, at least 1; fewer need less memory; no effect on scores
    """
    source, placement = model_path(model or VBENCH_MODELS[kind]), Placement.of(device, dtype)
    frames = dino_frames if kind == "dino" else clip_frames
    return Consistency(frames(source, placement), batch)
