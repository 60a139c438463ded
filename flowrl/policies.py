"""The policies that a run keeps: the one that is trained, its start, and its slow averages.

The only file that knows that weights change. All policies are the same modules with other numbers
in the trainable parameters: adapters, or all weights. `using(name)` puts them in and takes them
out again, so "the reference" of a LoRA run costs an adapter, not a second model.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flowrl.algorithm import Average

Weights = dict[str, Tensor]


class Policies:
    """Names: "current", "ref" (the frozen start), and those of `averages`.

    `keep_start` is false where no loss asks for "ref": full weights are then not held twice.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        averages: Sequence[Average] = (),
        keep_start: bool = True,
    ) -> None:
        self.parameters = dict(parameters)
        self.averages = tuple(averages)
        names = [average.name for average in averages] + (["ref"] if keep_start else [])
        self._weights: dict[str, Weights] = {name: self._copy() for name in names}
        self._inside = "current"

    def _copy(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Run the modules with the weights of a policy. Not to be nested."""
        assert self._inside == "current", f"already using {self._inside!r}"
        if name == "current":
            yield
            return
        weights = self._weights[name]
        current = {key: p.data for key, p in self.parameters.items()}
        self._inside = name
        try:
            for key, p in self.parameters.items():
                p.data = weights[key]
            yield
        finally:
            for key, p in self.parameters.items():
                p.data = current[key]
            self._inside = "current"

    @torch.no_grad()
    def follow(self, optimizer_steps: int) -> None:
        """average <- d average + (1 - d) current, with each average's decay d at that step."""
        for average in self.averages:
            d = average.decay(optimizer_steps)
            for key, slow in self._weights[average.name].items():
                slow.lerp_(self.parameters[key].detach(), 1 - d)

    def state(self) -> dict[str, Tensor]:
        """All weights but the start, which is loaded anew: `policy/parameter` -> tensor."""
        kept = {"current": self._copy(), **self._weights}
        return {
            f"{policy}/{name}": value
            for policy, weights in kept.items()
            if policy != "ref"
            for name, value in weights.items()
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(state[f"current/{name}"])
        for average in self.averages:
            for name, slow in self._weights[average.name].items():
                slow.copy_(state[f"{average.name}/{name}"])
