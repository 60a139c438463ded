"""Sums of a step's metrics, read from a device once."""

import math
from dataclasses import dataclass, field

import torch
from accelerate.utils import gather_object
from torch import Tensor

from flowrl.losses.base import Derived, Metric, as_derived
from samplers.host import host_copy, on_host


@dataclass
class Tally:
    """Sums over masked entries, from which means over chunks, steps and processes are exact."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    lowest: dict[str, float] = field(default_factory=dict)
    waiting: list[tuple[str, Derived, Tensor]] = field(default_factory=list)  # on the device

    def add(self, name: str, values: Metric, mask: Tensor) -> None:
        """Keep values until `settle`, because reading them would wait for a GPU."""
        self.waiting.append((name, as_derived(values), mask))

    def settle(self, *numbers: Tensor) -> list[float]:
        """Move all values to the CPU, with other numbers of the device, in one transfer; add the
        values in order, and return the numbers."""
        waiting, self.waiting = self.waiting, []
        on_cpu, to_move = dict[int, Tensor](), dict[int, Tensor]()  # by the tensors' ids
        for _, metric, _ in waiting:
            for tensor in metric.inputs:
                copy = host_copy(tensor)
                if copy is None:
                    to_move[id(tensor)] = tensor
                else:
                    on_cpu[id(tensor)] = copy
        flat = [tensor.flatten() for tensor in (*numbers, *to_move.values())]
        numbers_on_cpu = torch.cat(flat).cpu() if flat else torch.empty(0)
        sizes = [len(numbers), *(tensor.numel() for tensor in to_move.values())]
        first, *parts = numbers_on_cpu.split(sizes)
        for (key, tensor), part in zip(to_move.items(), parts, strict=True):
            on_cpu[key] = part.to(tensor.dtype).view(tensor.shape)
        for name, metric, mask in waiting:
            values = metric.of(*(on_cpu[id(tensor)] for tensor in metric.inputs))
            self._add(name, values.double().expand(mask.shape)[on_host(mask)])
        return first.double().tolist()

    def _add(self, name: str, unmasked: Tensor) -> None:
        if len(unmasked) == 0:
            return
        self.sums[name] = self.sums.get(name, 0.0) + float(unmasked.sum())
        self.counts[name] = self.counts.get(name, 0.0) + len(unmasked)
        self.highest[name] = max(self.highest.get(name, -math.inf), float(unmasked.max()))
        self.lowest[name] = min(self.lowest.get(name, math.inf), float(unmasked.min()))

    def means(self) -> dict[str, float]:
        """Means over all processes, extremes of `ratio` and the largest `mismatch`. Processes that
        share rows report equal sums, which leaves means correct."""
        self.settle()
        total = Tally()
        for part in gather_object([self]):
            for name in part.sums:
                total.sums[name] = total.sums.get(name, 0.0) + part.sums[name]
                total.counts[name] = total.counts.get(name, 0.0) + part.counts[name]
                total.highest[name] = max(total.highest.get(name, -math.inf), part.highest[name])
                total.lowest[name] = min(total.lowest.get(name, math.inf), part.lowest[name])
        means = {name: total.sums[name] / total.counts[name] for name in total.sums}
        if "ratio" in means:
            means |= {"ratio_max": total.highest["ratio"], "ratio_min": total.lowest["ratio"]}
        if "mismatch" in means:
            means["mismatch_max"] = total.highest["mismatch"]
        return means
