"""Merge adapters into the weights that they adapt, in calls whose densities or targets are not
stored.

A merged layer computes (W + s B A) x in one product, with DoRA its rows at their lengths. Its
weight is computed from W and swapped in; W itself is never written, so it is restored to the bit,
also after an exception.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.models.adapters import ADAPTER

Merge = Literal["none", "evaluation", "untrained", "sampling"]
Aside = Callable[[], AbstractContextManager[None]]


@dataclass
class MergedAdapters:
    """The adapters of some modules, and when a run merges them (`model.lora.merge`)."""

    layers: list[Any]
    when: Merge = "none"
    _held: list[Tensor] | None = field(default=None, init=False)  # merged weights, while kept
    _keeps: bool = field(default=False, init=False)  # the same weights are merged again
    _inside: bool = field(default=False, init=False)

    @classmethod
    def of(cls, roots: Mapping[str, nn.Module], when: Merge) -> "MergedAdapters":
        """UserError for layers whose weights cannot be summed, such as quantized ones."""
        if when == "none":
            return cls([])
        layers = list(_adapted(roots.values()))
        for layer in layers:
            base = layer.get_base_layer()
            if not isinstance(base, nn.Linear) or not base.weight.is_floating_point():
                raise UserError(
                    f"model.lora.merge: a layer of kind {type(base).__name__} cannot be merged "
                    "with its adapter; set model.lora.merge: none"
                )
        return cls(layers, when)

    def evaluation(self) -> AbstractContextManager[None]:
        """Context for evaluations: adapters are merged unless `merge` is none."""
        return nullcontext() if self.when == "none" else self.merged()

    @contextmanager
    def sampling(self) -> Iterator[Aside | None]:
        """Context for training samples. Yields a context for calls whose results need no stored
        density; None if merging changes nothing there."""
        if self.when == "sampling":
            with self.merged():
                yield None
        elif self.when == "untrained":
            self._keeps = True
            try:
                yield self.merged
            finally:
                self._keeps, self._held = False, None
        else:
            yield None

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Context in which the adapters that are active at its start are merged. May be nested.
        Adapters that are switched off stay off."""
        if self._inside or all(layer.disable_adapters for layer in self.layers):
            yield
            return
        sums = self._held or [_summed(layer) for layer in self.layers]
        self._held = sums if self._keeps else None
        weights = [layer.get_base_layer().weight for layer in self.layers]
        originals = [weight.data for weight in weights]
        self._inside = True
        try:
            self._place(weights, sums, merged=True)
            yield
        finally:
            self._place(weights, originals, merged=False)
            self._inside = False

    def _place(self, weights: list[nn.Parameter], data: list[Tensor], merged: bool) -> None:
        for layer, weight, value in zip(self.layers, weights, data, strict=True):
            weight.data = value
            # peft's `enable_adapters` would also change which weights take a gradient
            layer._disable_adapters = merged


def _adapted(roots: Iterable[nn.Module]) -> Iterator[LoraLayer]:
    for root in roots:
        yield from (module for module in root.modules() if isinstance(module, LoraLayer))


@torch.no_grad()
def _summed(layer: Any) -> Tensor:
    """W + s B A [out in], with DoRA at its lengths, computed in float32 at least and rounded to the
    type of W."""
    weight = layer.get_base_layer().weight
    precise = torch.promote_types(weight.dtype, torch.float32)
    down, up = (side[ADAPTER].weight.to(precise) for side in (layer.lora_A, layer.lora_B))
    change = (up @ down).mul_(layer.scaling[ADAPTER])
    summed = change.add_(weight)
    if ADAPTER in layer.lora_magnitude_vector:
        lengths = layer.lora_magnitude_vector[ADAPTER].weight.to(precise)
        summed *= (lengths / torch.linalg.norm(summed, dim=1))[:, None]
    return summed.to(weight.dtype)
