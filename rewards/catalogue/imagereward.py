"""ImageReward v1.0, arXiv:2304.05977: human preference by a BLIP.

A ViT-L/16 encodes the image (224 pixels, the central square); a BERT reads the prompt (truncated to
35 tokens) and attends to the image; five linear layers score its first token; the authors' mean and
standard deviation normalise the score, so real samples lie in about -2 to 2.

The released file has the names of the original BLIP code. transformers has the same network under
other names. Sizes come from the file's tensors; heads are 64 wide, as in both ViT-L and BERT. As in
the authors' loader, entries of the file that the networks do not have are ignored; unlike theirs, a
missing entry is refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from rewards.catalogue.aesthetic import head_of
from rewards.perception.embedding import (
    OPENAI_MEAN,
    OPENAI_STD,
    Placement,
    clip_normalised,
    in_pair_batches,
    tokenize,
)
from rewards.perception.hub import HubName, model_path, weights_file
from rewards.perception.image_model import ImageModelSettings
from rewards.perception.media import to_tensor
from rewards.perception.pixels import PixelPreparation
from rewards.perception.weight_files import weights_of_file
from rewards.rights import ReadFile
from rewards.types import Inline, Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

REPOSITORY, FILE = "THUDM/ImageReward", "ImageReward.pt"
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the scores on the authors' data
LONGEST_PROMPT = 35  # tokens
HEAD_WIDTH = 64
VISION = "blip.visual_encoder."
TEXT_ENCODER = "blip.text_encoder."
MLP = "mlp."

_RENAMED = (  # original BLIP to transformers, in this order
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.", "encoder.layers."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
    (r"\.attn\.", ".self_attn."),
)


def part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Entries that start with `prefix`, with the prefix removed."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def renamed(name: str) -> str:
    """The name in transformers' BlipVisionModel for an entry of BLIP's vision tower."""
    for old, new in _RENAMED:
        name = re.sub(old, new, name)
    return name


def layers_in(state: Mapping[str, Tensor], pattern: str) -> int:
    return 1 + max(int(match[1]) for name in state if (match := re.match(pattern, name)))


def vision_model(state: Mapping[str, Tensor]) -> Any:
    """Build the vision tower with BLIP's LayerNorm epsilon of 1e-6, as in timm; transformers has
    1e-5."""
    from transformers import BlipVisionConfig, BlipVisionModel

    width, _, _, patch = state["patch_embed.proj.weight"].shape
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=state["blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=layers_in(state, r"blocks\.(\d+)\."),
        num_attention_heads=width // HEAD_WIDTH,
        patch_size=patch,
        image_size=round((state["pos_embed"].shape[1] - 1) ** 0.5) * patch,
        layer_norm_eps=1e-6,
        hidden_act="gelu",
    )
    model = BlipVisionModel(config)
    return filled(model, {renamed(name): value for name, value in state.items()}, VISION)


def text_model(state: Mapping[str, Tensor], vision_width: int) -> Any:
    """Build the BERT with cross attention, which has the same names in both codes."""
    from transformers import BlipTextConfig
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    vocabulary, width = state["embeddings.word_embeddings.weight"].shape
    config = BlipTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        encoder_hidden_size=vision_width,
        intermediate_size=state["encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=layers_in(state, r"encoder\.layer\.(\d+)\."),
        num_attention_heads=width // HEAD_WIDTH,
        max_position_embeddings=state["embeddings.position_embeddings.weight"].shape[0],
        layer_norm_eps=1e-12,
        hidden_act="gelu",
        is_decoder=True,  # adds the cross attention; the masks stay bidirectional
    )
    model = BlipTextModel(config, add_pooling_layer=False)
    return filled(model, state, TEXT_ENCODER)


def filled(model: Any, state: Mapping[str, Tensor], prefix: str) -> Any:
    """Load the file's weights into a model. ValueError if one is missing or has another shape."""
    try:
        missing = model.load_state_dict(state, strict=False).missing_keys
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"imagereward: the file's {prefix}* entries do not fit: {reason}"
        ) from error
    if missing:
        raise ValueError(
            f"imagereward: the file has no {prefix}* entries for {', '.join(missing[:4])}"
        )
    return model


def middle(image: Image.Image, side: int) -> Float[Tensor, "3 side side"]:
    """Crop the central square after resizing the shorter side to `side` (bicubic, PIL), normalised
    as for CLIP."""
    width, height = image.size
    if width <= height:
        size = (side, int(side * height / width))
    else:
        size = (int(side * width / height), side)
    image = image.resize(size, Image.Resampling.BICUBIC)
    left, top = (round((length - side) / 2) for length in size)
    return clip_normalised(to_tensor(image.crop((left, top, left + side, top + side))))


@dataclass(frozen=True)
class ImageReward:
    vision: Any
    text: Any
    head: nn.Sequential
    tokenizer: Any
    placement: Placement
    batch: int

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        return in_pair_batches(self._score, samples, self.batch)

    def differentiable(
        self, media: Float[Tensor, "n 3 h w"], samples: Samples
    ) -> Float[Tensor, " n"]:
        side = self.vision.config.image_size
        prepare = PixelPreparation((side, side), OPENAI_MEAN, OPENAI_STD, rounded=True)
        parts = zip(media.split(self.batch), _split(samples.prompts, self.batch), strict=True)
        return torch.cat([self._read(prepare(part), prompts) for part, prompts in parts])

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[Image.Image, str]]) -> Float[Tensor, " m"]:
        images, prompts = zip(*pairs, strict=True)
        side = self.vision.config.image_size
        return self._read(torch.stack([middle(image, side) for image in images]), prompts)

    def _read(self, pixels: Tensor, prompts: Sequence[str]) -> Float[Tensor, " m"]:
        seen = self.vision(pixels.to(self.placement.device, self.placement.dtype)).last_hidden_state
        tokens = tokenize(self.tokenizer, prompts, LONGEST_PROMPT, self.placement.device)
        everywhere = torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device)
        read = self.text(
            **tokens, encoder_hidden_states=seen, encoder_attention_mask=everywhere
        ).last_hidden_state
        return (self.head(read[:, 0].float().cpu()).squeeze(-1) - MEAN) / STD


def _split(prompts: Sequence[str], size: int) -> list[Sequence[str]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def load(
    checkpoint: ReadFile | None = None,
    tokenizer: HubName = "bert-base-uncased",
    common: Inline[ImageModelSettings] = ImageModelSettings(),
) -> Reward:
    """Load the reward.

    checkpoint  file in the form of ImageReward.pt; null takes the hub's
    tokenizer   BERT's tokenizer: a folder or a name on the hub
    """
    file = Path(weights_file("imagereward", "checkpoint", checkpoint, (REPOSITORY, FILE)))
    from transformers import AutoTokenizer

    state = weights_of_file("imagereward", file)
    seen = part(state, VISION)
    if not seen:
        raise ValueError(f"imagereward: {file} has no {VISION}* entries, unlike the hub's file")
    placement, vision = common.placement, vision_model(seen)
    reward = ImageReward(
        placement.put(vision),
        placement.put(text_model(part(state, TEXT_ENCODER), vision.config.hidden_size)),
        head_of(part(state, MLP), f"imagereward: {file}"),
        AutoTokenizer.from_pretrained(model_path(tokenizer)),
        placement,
        common.batch,
    )
    return common.over_frames("imagereward", reward)
