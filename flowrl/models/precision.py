"""Float32 master weights for networks that are trained in half precision.

A step of 1e-5 on a weight of 1 is lost in bfloat16, which has 8 significant bits. So the optimizer
updates a float32 copy, gradients are summed over chunks in float32, and the network holds the
rounded copy. So it is with adapters of a bfloat16 model, unless `lora.dtype` says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

HALF = (torch.bfloat16, torch.float16)
GROUPED, MOST = 256, 2**26  # gradients, and their bytes, that move to masters by one operation


@dataclass
class Gradients:
    """Gradients of half weights on their way to float32 masters: many by one operation, the last at
    the end of their backward pass."""

    waiting: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)  # master, gradient
    held: int = 0  # bytes
    backward: int = -1  # the backward pass that they are of

    def forget(self) -> None:
        """Drop those of a backward pass that failed."""
        self.waiting, self.held = [], 0

    def take(self, master: nn.Parameter, grad: Tensor) -> None:
        if isinstance(grad, DTensor):
            master.grad = grad.float() if master.grad is None else master.grad + grad
            return
        now = torch._C._current_graph_task_id()
        if now != self.backward:
            self.move()
            self.backward = now
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.move)
        self.waiting.append((master, grad))
        self.held += grad.nbytes
        if len(self.waiting) == GROUPED or self.held > MOST:
            self.move()

    @torch.no_grad()
    def move(self) -> None:
        """Add what waits to the masters' gradients, in float32."""
        waiting, self.waiting, self.held = self.waiting, [], 0
        if not waiting:
            return
        wide = [torch.empty_like(master) for master, _ in waiting]
        torch._foreach_copy_(  # type: ignore[reportPrivateImportUsage]
            wide, [grad for _, grad in waiting]
        )
        sums: list[Tensor] = []
        added: list[Tensor] = []
        for (master, _), grad in zip(waiting, wide, strict=True):
            if master.grad is None:
                master.grad = grad
            else:
                sums.append(master.grad)
                added.append(grad)
        if sums:
            torch._foreach_add_(sums, added)  # type: ignore[reportPrivateImportUsage]


def masters(
    parameters: Mapping[str, nn.Parameter], gradients: Gradients
) -> dict[str, nn.Parameter]:
    """The optimizer's weights by name: the network's own, or float32 masters of half-precision
    ones, to which `gradients` moves each gradient."""
    return {n: _master(p, gradients) if p.dtype in HALF else p for n, p in parameters.items()}


def _master(weight: nn.Parameter, gradients: Gradients) -> nn.Parameter:
    master = nn.Parameter(weight.detach().float())

    def hand_over(half: Tensor) -> None:
        grad, half.grad = half.grad, None
        assert grad is not None  # the hook runs after one has been accumulated
        gradients.take(master, grad)

    weight.register_post_accumulate_grad_hook(hand_over)
    return master


def scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """The loss scaler.

    float16 has no numbers below 6e-8, and gradients of a mean over rows and latents can be that
    small. So losses are multiplied before `backward`, and gradients are divided afterwards. If the
    scaled gradients overflow, the factor is halved and the step skipped. Disabled for other dtypes.
    """
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
