"""Adapters (LoRA) that can be switched off, so that a call costs what it costs the base model."""

from collections.abc import Callable, Iterable

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


def adapter_switch(roots: Iterable[nn.Module]) -> Callable[[bool], None] | None:
    """Return what switches all adapters of these modules on or off; None if they have none."""
    layers = [m for root in roots for m in root.modules() if isinstance(m, BaseTunerLayer)]
    if not layers:
        return None

    def switch(on: bool) -> None:
        for layer in layers:
            # peft's `enable_adapters` would also change which weights take a gradient
            layer._disable_adapters = not on  # pyright: ignore[reportPrivateUsage]

    return switch
