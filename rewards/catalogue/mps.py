"""MPS, the multi-dimensional preference score, arXiv:2405.14705: human preference by a CLIP whose
prompt and image tokens attend to each other.

All text tokens (77) and image tokens (257) of a CLIP ViT-H/14 are projected to its embedding. Four
cross-attention layers, each with a parallel block of rotary self attention, attend from the image
tokens to the text. Only text tokens count whose similarity to a fixed list of words, CONDITION, is
above `threshold` times the largest similarity: 0.3, as in the published evaluation (`threshold:
0.01` is the forward call of the training code).

    score = exp(logit scale) * cos(end token of the text, first token of the image after the layers)

Samples are scored one at a time, since the largest similarity would otherwise be taken over the
batch. Networks run in float32; the authors' mask and images are in half precision.

`checkpoint` is MPS_overall_checkpoint.pth, which is a pickled module. Its tensors are read without
running its code (`rewards.perception.pickled_module`); a safetensors file with the same names works
too. `clip` names the tokenizer, the image processor and the configuration.

Not tried on the published file. The networks follow Kwai-Kolors/MPS (eval_overall_mps_on_hpdv2.py
at ae290c23) and a copy of its trainer/models; the file's names follow from them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from rewards.perception.embedding import (
    Placement,
    image_processor,
    in_pair_batches,
    tokenize,
)
from rewards.perception.hub import HubName, model_path
from rewards.perception.image_model import ImageModelSettings
from rewards.perception.pickled_module import tensors_of
from rewards.perception.weight_files import weights_of_file
from rewards.rights import ReadFile, Right, need
from rewards.types import Inline, Kind, Reward, Samples, Share

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

CONDITION = (
    "light, color, clarity, tone, style, ambiance, artistry, shape, face, hair, hands, limbs, "
    "structure, instance, texture, quantity, attributes, position, number, location, word, things."
)
ATTENTION_WIDTH = 64
CLIP_PART, CROSS_PART = "model.", "cross_model."


class CrossBlock(nn.Module):
    """Multi-query attention from image tokens to the text, parallel to a gated network, then
    rotary self attention with another gated network; both are residual."""

    def __init__(self, width: int, inner: int, spread: int) -> None:
        super().__init__()
        self.norm, self.own_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_q = nn.Linear(width, inner, bias=False)
        self.to_kv = nn.Linear(width, 2 * ATTENTION_WIDTH, bias=False)
        self.to_out = nn.Linear(inner, width, bias=False)
        self.ff_in = nn.Linear(width, 2 * spread, bias=False)
        self.ff_out = nn.Linear(spread, width, bias=False)
        self.fused = nn.Linear(width, inner + 2 * ATTENTION_WIDTH + 2 * spread, bias=False)
        self.own_out = nn.Linear(inner, width, bias=False)
        self.own_ff = nn.Linear(spread, width, bias=False)
        self.split = (inner, ATTENTION_WIDTH, ATTENTION_WIDTH, 2 * spread)

    def forward(
        self, image: Float[Tensor, "i w"], text: Float[Tensor, "t w"], mask: Float[Tensor, " t"]
    ) -> Float[Tensor, "i w"]:
        x = self.norm(image)
        k, v = self.to_kv(text).chunk(2, -1)
        seen = self.to_out(attended(self.to_q(x), k, v, mask))
        image = image + seen + self.ff_out(gated(self.ff_in(x)))
        q, k, v, inner = self.fused(self.own_norm(image)).split(self.split, -1)
        heads = q.unflatten(-1, (-1, ATTENTION_WIDTH)).transpose(0, 1)
        q = rotated(heads).transpose(0, 1).flatten(1)
        none = torch.zeros(len(k), device=k.device, dtype=k.dtype)
        attention = self.own_out(attended(q, rotated(k), v, none))
        return image + attention + self.own_ff(gated(inner))


def attended(
    q: Float[Tensor, "i h"],
    k: Float[Tensor, "t d"],
    v: Float[Tensor, "t d"],
    mask: Float[Tensor, " t"],
) -> Float[Tensor, "i h"]:
    """Multi-head attention of q to a single head of k and v; the mask is added."""
    heads = q.unflatten(-1, (-1, ATTENTION_WIDTH)).transpose(0, 1) * ATTENTION_WIDTH**-0.5
    return ((heads @ k.T + mask).softmax(-1) @ v).transpose(0, 1).flatten(1)


def gated(x: Float[Tensor, "n w"]) -> Float[Tensor, "n v"]:
    """SwiGLU: the first half times SiLU of the second half."""
    value, gate = x.chunk(2, -1)
    return functional.silu(gate) * value


def rotated(x: Float[Tensor, "*h n d"]) -> Float[Tensor, "*h n d"]:
    """Apply rotary embeddings for positions 0 to n - 1, in halves."""
    n, width = x.shape[-2:]
    steps = torch.arange(0, width, 2, device=x.device).float() / width
    angles = torch.arange(n, device=x.device)[:, None] / 10000**steps
    angles = torch.cat([angles, angles], -1)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


NAMES = {  # in a layer of the file: in CrossBlock
    **{
        f"0.fn.{name}": name for name in ("norm.weight", "norm.bias", "to_q.weight", "to_kv.weight")
    },
    **{"0.fn.to_out.weight": "to_out.weight", "0.fn.ff.0.weight": "ff_in.weight"},
    **{"0.fn.ff.2.weight": "ff_out.weight", "1.fn.norm.weight": "own_norm.weight"},
    **{"1.fn.norm.bias": "own_norm.bias", "1.fn.fused_attn_ff_proj.weight": "fused.weight"},
    **{"1.fn.attn_out.weight": "own_out.weight", "1.fn.ff_out.1.weight": "own_ff.weight"},
}
IGNORED = ("1.fn.rotary_emb.inv_freq", "1.fn.pos_emb")  # computed


@dataclass(frozen=True)
class Mps:
    clip: Any
    layers: nn.ModuleList
    tokenizer: Any
    processor: Any
    placement: Placement
    threshold: float
    condition: str

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        return in_pair_batches(lambda one: self._score(*one[0])[None], samples, 1)

    @torch.no_grad()
    def _score(self, image: Image.Image, prompt: str) -> Float[Tensor, ""]:
        (words, condition), ends = self._texts([prompt, self.condition])
        likeness = (words @ condition.T).amax(1)
        mask = torch.where(likeness / likeness.max() > self.threshold, 0.0, -torch.inf)
        pixels = self.processor(image, return_tensors="pt")["pixel_values"]
        pixels = pixels.to(self.placement.device, self.placement.dtype)
        states = self.clip.vision_model(pixel_values=pixels).last_hidden_state
        seen = self.clip.visual_projection(states)[0]
        for layer in self.layers:
            seen = layer(seen, words, mask.to(seen.dtype))
        cosine = functional.cosine_similarity(ends[0].float(), seen[0].float(), dim=0)
        return self.clip.logit_scale.exp().float() * cosine

    def _texts(self, texts: list[str]) -> tuple[Float[Tensor, "k t e"], Float[Tensor, "k e"]]:
        """Projected states of all tokens, including padding as in the authors' call, and of the end
        tokens."""
        limit = self.clip.config.text_config.max_position_embeddings
        ids = tokenize(self.tokenizer, texts, limit, self.placement.device)["input_ids"]
        read = self.clip.text_model(input_ids=ids)
        project = self.clip.text_projection
        return project(read.last_hidden_state), project(read.pooler_output)


def cross_layers(state: dict[str, Tensor], place: str) -> nn.ModuleList:
    """Build the cross model from a file's entries. ValueError for entries that do not fit."""
    start = f"{CROSS_PART}layers."
    entries = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
    numbers = sorted({int(name.partition(".")[0]) for name in entries})
    layers = nn.ModuleList()
    for number in numbers:
        weights = {k.partition(".")[2]: v for k, v in entries.items() if k.startswith(f"{number}.")}
        weights = {k: v for k, v in weights.items() if k not in IGNORED}
        if set(weights) != set(NAMES):
            odd = ", ".join(sorted(set(weights) ^ set(NAMES))[:4])
            raise ValueError(f"mps: {place}: the cross model differs from MPS in {odd}")
        inner, width = weights["0.fn.to_q.weight"].shape
        block = CrossBlock(width, inner, weights["0.fn.ff.2.weight"].shape[1])
        block.load_state_dict({NAMES[name]: value for name, value in weights.items()})
        layers.append(block)
    if not layers:
        raise ValueError(f"mps: {place} has no {start}* entries, unlike MPS")
    return layers


def clip_of(state: dict[str, Tensor], folder: str, place: str) -> Any:
    from transformers import CLIPConfig, CLIPModel

    model = CLIPModel(CLIPConfig.from_pretrained(folder))
    of_clip = {k.removeprefix(CLIP_PART): v for k, v in state.items() if k.startswith(CLIP_PART)}
    of_clip = {k: v for k, v in of_clip.items() if not k.endswith("position_ids")}
    try:
        model.load_state_dict(of_clip)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"mps: the CLIP in {place} is not the one in {folder}: {reason}"
        ) from error
    return model


def load(
    checkpoint: ReadFile,
    clip: HubName = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    threshold: Share = 0.3,
    condition: str = CONDITION,
    common: Inline[ImageModelSettings] = ImageModelSettings(),
) -> Reward:
    """Load the reward.

    checkpoint  MPS_overall_checkpoint.pth, of which nothing runs, or its tensors as safetensors
    clip        CLIP model for the tokenizer, the image processor and the configuration: a folder or
                a name on the hub
    threshold   share of the largest similarity to `condition` that a token of the prompt must
                exceed to count, in (0, 1]; larger reads fewer tokens
    condition   words by which tokens of the prompt are selected
    batch       images per call, at least 1; no effect here, since samples are scored one at a time
    """
    need(Right.FILES, checkpoint, path=Path(checkpoint))
    file, folder, placement = Path(checkpoint), model_path(clip), common.placement
    if not file.is_file():
        raise ValueError(f"mps: no such file: {checkpoint}")
    pickled = file.suffix != ".safetensors"
    state = tensors_of("mps", file) if pickled else weights_of_file("mps", file)
    from transformers import AutoTokenizer

    reward = Mps(
        clip=placement.put(clip_of(state, folder, checkpoint)),
        layers=placement.put(cross_layers(state, checkpoint)),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        processor=image_processor(folder),
        placement=placement,
        threshold=threshold,
        condition=condition,
    )
    return common.over_frames("mps", reward)
