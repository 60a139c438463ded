"""Offloading of frozen parts (text and image encoders, VAE) to the CPU while they are unused."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

from flowrl.models.diffusers.memory.experts import RestingExperts
from flowrl.settings.model.quantization import Quantization


class Waking(ModelHook):
    """A hook that moves its module to the device when it is called; `OffloadedParts.rest` moves it
    back.

    accelerate's CpuOffload moves it back when the next module of a fixed sequence is called, but
    here parts are called in chunks and in any order. diffusers reads `execution_device` to place
    inputs, and also calls the hook for `encode` and `decode` of a VAE.
    """

    def __init__(self, device: torch.device):
        self.execution_device = device
        self.awake = False

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.awake:
            module.to(self.execution_device)
            self.awake = True
        return args, kwargs

    def rest(self, module: nn.Module) -> None:
        """Move the module back to the CPU, if it was used."""
        if self.awake:
            module.to("cpu")
            self.awake = False


@dataclass(frozen=True)
class OffloadedParts:
    """Offloaded parts of a pipeline; empty without offloading."""

    parts: Mapping[str, tuple[nn.Module, Waking]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, pipe: Any, denoisers: Collection[str], device: torch.device, placed: bool = True
    ) -> "OffloadedParts":
        """Move the denoisers to the device if requested, and add hooks to all other modules.

        Calling a denoiser also moves these back to the CPU.
        """
        modules = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
        frozen = cls({n: (m, Waking(device)) for n, m in modules.items() if n not in denoisers})
        for module, hook in frozen.parts.values():
            add_hook_to_module(module, hook)
        for name in modules.keys() - frozen.parts.keys():
            denoiser = modules[name].to(device) if placed else modules[name]
            denoiser.register_forward_pre_hook(lambda *_: frozen.rest())
        return frozen

    def rest(self) -> None:
        """Move the used parts back to the CPU."""
        for module, hook in self.parts.values():
            hook.rest(module)


@dataclass(frozen=True)
class BaseMemory:
    """Savings of the frozen base: parts that rest on the CPU, and weights of fewer bits."""

    offload: bool = False
    experts: bool = False
    quantized: Quantization | None = None


def placed_parts(
    pipe: Any, denoisers: Collection[str], device: torch.device, offload: bool, experts: bool
) -> tuple[OffloadedParts, RestingExperts]:
    """Freeze a pipeline and move it to the device, except parts that stay on the CPU until used."""
    modules = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    for module in modules.values():
        module.requires_grad_(False)
    frozen, resting = OffloadedParts(), RestingExperts()
    if experts:
        denoiser_modules = {name: module for name, module in modules.items() if name in denoisers}
        resting = RestingExperts.of(denoiser_modules, device)
    if offload:
        frozen = OffloadedParts.of(pipe, denoisers, device, placed=not experts)
    elif experts:
        for name in modules.keys() - set(denoisers):
            modules[name].to(device)
    else:
        pipe.to(device)
    return frozen, resting
