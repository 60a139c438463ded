"""A vision transformer from weights with timm's names, as in the files of DINO and DreamSim."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

VIT_HEAD_WIDTH = 64


@dataclass(frozen=True)
class PlainVit:
    """Class token of images [n 3 s s], before or after the last norm.

    quick   x sigmoid(1.702 x) instead of GELU, as in OpenAI's CLIP
    eps     of the layer norms. Entries `pos_drop.*` are a norm before the first block
    """

    state: Mapping[str, Tensor]
    quick: bool
    eps: float

    @property
    def side(self) -> int:
        """Side of an image in pixels, from the number of positions."""
        patches = self.state["pos_embed"].shape[1] - 1
        return round(patches**0.5) * self.state["patch_embed.proj.weight"].shape[-1]

    @torch.no_grad()
    def token(self, pixels: Float[Tensor, "n 3 s s"], normed: bool) -> Float[Tensor, "n e"]:
        kernel = self.state["patch_embed.proj.weight"]
        bias = self.state.get("patch_embed.proj.bias")
        x = functional.conv2d(pixels, kernel, bias, stride=kernel.shape[-1]).flatten(2).mT
        x = torch.cat([self.state["cls_token"].expand(len(x), -1, -1), x], 1)
        x = x + self.state["pos_embed"]
        if "pos_drop.weight" in self.state:
            x = self._norm("pos_drop", x)
        for block in range(blocks_in(self.state)):
            name = f"blocks.{block}"
            x = x + self._attention(f"{name}.attn", self._norm(f"{name}.norm1", x))
            inner = self._linear(f"{name}.mlp.fc1", self._norm(f"{name}.norm2", x))
            inner = inner * (1.702 * inner).sigmoid() if self.quick else functional.gelu(inner)
            x = x + self._linear(f"{name}.mlp.fc2", inner)
        return self._norm("norm", x[:, 0]) if normed else x[:, 0]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, self.eps)

    def _attention(self, name: str, x: Float[Tensor, "n t e"]) -> Float[Tensor, "n t e"]:
        n, t, e = x.shape
        heads = max(1, e // VIT_HEAD_WIDTH)
        q, k, v = self._linear(f"{name}.qkv", x).view(n, t, 3, heads, -1).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v)
        return self._linear(f"{name}.proj", out.transpose(1, 2).reshape(n, t, e))


def blocks_in(state: Mapping[str, Tensor]) -> int:
    return 1 + max(
        (int(match[1]) for name in state if (match := re.match(r"blocks\.(\d+)\.", name))),
        default=-1,
    )


def vit_entries(blocks: int, pre_norm: bool) -> set[str]:
    """Entries that the weights must contain."""
    names = {"cls_token", "pos_embed", "patch_embed.proj.weight", "norm.weight", "norm.bias"}
    layers = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    for part in ("weight", "bias"):
        names |= {f"blocks.{i}.{layer}.{part}" for i in range(blocks) for layer in layers}
        names |= {f"pos_drop.{part}"} if pre_norm else set()
    return names
