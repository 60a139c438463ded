"""A language model's head in float32, for half-precision models."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.models.precision import HALF


class Float32Head(nn.Linear):
    """A head whose logits are float32: bfloat16 rounds a logit of 20 to a multiple of 1/8
    (MiniMax-M1, arXiv:2506.13585, section 3.2). Weights tied to the embedding stay in half
    precision; while they are frozen and `keeps` is set, a float32 copy of them is kept."""

    keeps: bool = True  # FSDP2 frees the weights after a call
    copy: tuple[int, Tensor] | None = None  # of the weight's version

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), self._precise(), self.bias)

    def _precise(self) -> Tensor:
        weight = self.weight
        if weight.dtype not in HALF or weight.requires_grad or not self.keeps:
            return weight.float()
        if self.copy is None or self.copy[0] != weight._version:
            self.copy = weight._version, weight.detach().float()
        return self.copy[1]


def float32_head(model: Any) -> None:
    """Make a transformers model compute its logits in float32. UserError if its head is not a
    linear layer."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UserError(
            f"model.head_dtype: the head of {type(model).__name__} is not a linear layer; leave "
            "the setting out"
        )
    if head.weight is not model.get_input_embeddings().weight:
        head.float()
    head.__class__ = Float32Head
    assert head.bias is None or head.bias.dtype == torch.float32, "a tied head has no bias"
