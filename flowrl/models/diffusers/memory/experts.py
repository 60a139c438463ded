"""Experts of a pipeline (two denoisers, as in Wan 2.2): unused experts stay on the CPU.

Adapters, and all other weights with gradients, stay on the device, since optimizers and averages
refer to them. So a change of expert moves only frozen weights.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import UserError

CPU = torch.device("cpu")


@dataclass
class Expert:
    module: nn.Module
    awake: bool = True
    graded: int = 0  # calls whose gradients were not computed yet

    def resting(self) -> Iterator[Tensor]:
        """Tensors that are moved with an expert. Its first parameter stays, to mark the module's
        device."""
        first, *movable = self.module.parameters()
        del first
        yield from (p for p in movable if not p.requires_grad)

    def rest(self) -> None:
        """Move to the CPU."""
        self.move(CPU)
        self.awake = False

    def wake(self, device: torch.device) -> None:
        """Move to the device, unless it is there."""
        if not self.awake:
            self.move(device)
            self.awake = True

    def count(self, calls: int) -> None:
        """Count calls whose gradient is pending."""
        self.graded += calls

    def move(self, device: torch.device) -> None:
        for tensor in self.resting():
            move_weight(tensor, device)


def move_weight(tensor: Tensor, device: torch.device) -> None:
    """Move the data of a weight to a device."""
    tensor.data = tensor.data.to(device)


def refuse_single_denoiser(denoisers: Collection[str]) -> None:
    """UserError for a pipeline with one denoiser, which never rests."""
    if len(denoisers) < 2:
        raise UserError(
            "model.offload_experts: the pipeline has only one denoiser "
            f"({', '.join(denoisers)}), which every step calls: leave it out"
        )


@dataclass
class RestingExperts:
    """Moves an expert to the device before it is called, and all others back to the CPU. An expert
    with a pending backward pass stays, since that needs its weights."""

    device: torch.device = CPU
    experts: list[Expert] = field(default_factory=list[Expert])

    @classmethod
    def of(cls, denoisers: Mapping[str, nn.Module], device: torch.device) -> "RestingExperts":
        """Add hooks to the denoisers, which are still on the CPU. UserError for a single
        denoiser."""
        refuse_single_denoiser(denoisers)
        resting = cls(device, [Expert(module) for module in denoisers.values()])
        for expert in resting.experts:
            expert.module.register_forward_pre_hook(lambda *_, expert=expert: resting.wake(expert))
            expert.module.register_forward_hook(
                lambda *a, expert=expert: resting.called(expert, a[-1])
            )
        resting.settle()
        return resting

    def settle(self) -> None:
        """Move everything that stays on the device there; call this again after adding adapters."""
        for expert in self.experts:
            rests = {id(tensor) for tensor in expert.resting()}
            for tensor in (*expert.module.parameters(), *expert.module.buffers()):
                if id(tensor) not in rests:
                    tensor.data = tensor.data.to(self.device)
            expert.rest()

    def wake(self, expert: Expert) -> None:
        """Prepare an expert for a call."""
        for other in self.experts:
            if other is not expert and other.awake and not other.graded:
                other.rest()
        expert.wake(self.device)

    def called(self, expert: Expert, result: Any) -> None:
        """Count a finished call until its gradient is computed."""
        if not torch.is_grad_enabled():
            return
        first = result[0] if isinstance(result, tuple) else result.sample
        if first.requires_grad:
            expert.count(1)
            first.register_hook(lambda _: self.done(expert))

    def done(self, expert: Expert) -> None:
        """Mark an expert's backward pass as started; it will end before the next call."""
        expert.count(-1)
