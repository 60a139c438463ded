"""Float32 master weights for networks that are trained in half precision.

A step of 1e-5 on a weight of 1 is lost in bfloat16, which has 8 significant bits. So the optimizer
updates a float32 copy, gradients are summed over chunks in float32, and the network holds the
rounded copy. Adapters are float32 unless `lora.dtype` says otherwise.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


def masters(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The optimizer's weights by name: the network's own weights, or float32 masters of
    half-precision weights."""
    return {name: _master(p) if p.dtype in HALF else p for name, p in parameters.items()}


def _master(weight: nn.Parameter) -> nn.Parameter:
    """Return the master of a half-precision weight; each gradient of the weight is moved to it at
    once."""
    kept = nn.Parameter(weight.detach().float())

    def hand_over(half: Tensor) -> None:
        assert half.grad is not None  # the hook runs after one has been accumulated
        kept.grad = half.grad.float() if kept.grad is None else kept.grad + half.grad
        half.grad = None

    weight.register_post_accumulate_grad_hook(hand_over)
    return kept


def scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """The loss scaler.

    float16 has no numbers below 6e-8, and gradients of a mean over rows and latents can be that
    small. So losses are multiplied before `backward`, and gradients are divided afterwards. If the
    scaled gradients overflow, the factor is halved and the step skipped. Disabled for other dtypes.
    """
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
