"""The policies that a run keeps: the one that is trained, its start, and its slow averages.

The only file that knows that weights change. All policies are the same modules with other numbers
in the trainable parameters: adapters, or all weights. `using(name)` puts them in and takes them
out again, so "the reference" of a LoRA run costs an adapter, not a second model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowrl.algorithm import Average
from flowrl.models.precision import masters
from flowrl.models.shards import local_shard
from flowrl.processes.sharding import full, like

NamedWeights = dict[str, Tensor]


class Policies:
    """Names: "current", "ref" (the frozen start), and those of `averages`.

    `keep_start` is false where nothing asks for "ref": full weights are then not held twice.
    `parameters` are what the optimizer steps and averages follow: float32 masters where the
    network's own weights, `network`, are of half precision. `changed` is called after every change
    of the network's weights. Under FSDP2 all of this is of this process's pieces alone.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        averages: Sequence[Average] = (),
        keep_start: bool = True,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.changed = changed
        self.network = dict(parameters)
        self.parameters = masters(self.network)
        self.averages = tuple(averages)
        self._weights = {average.name: _copy(self.parameters) for average in averages}
        if keep_start:
            self._weights["ref"] = _copy(self.network)  # it was loaded in its dtype: exact
        self._current: NamedWeights = {}  # while another policy's are in force
        self.inside = "current"

    @property
    def names(self) -> tuple[str, ...]:
        return ("current", *self._weights)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Run the modules with the weights of a policy. Not to be nested."""
        assert self.inside == "current", f"already using {self.inside!r}"
        self.put(name)
        try:
            yield
        finally:
            self.put("current")

    @torch.no_grad()
    def put(self, name: str) -> None:
        """Whatever policy's weights are in force, now it is this one's. `using` is for all but
        `flowrl.processes.lockstep`."""
        if name == self.inside:
            return
        if self.inside == "current":
            self._current = {key: _held(p) for key, p in self.network.items()}
        weights = self._current if name == "current" else self._weights[name]
        for key, p in self.network.items():
            _place(p, weights[key])
        if name == "current":
            self._current = {}
        self.inside = name
        self.changed()

    @torch.no_grad()
    def publish(self) -> None:
        """After an optimizer step: round the masters into the network."""
        for name, p in self.network.items():
            if p is not self.parameters[name]:
                p.copy_(self.parameters[name])
        self.changed()

    @torch.no_grad()
    def follow(self, optimizer_steps: int) -> None:
        """average <- d average + (1 - d) current, with each average's decay d at that step."""
        for average in self.averages:
            d = average.decay(optimizer_steps)
            for key, slow in self._weights[average.name].items():
                slow.lerp_(self.parameters[key].detach(), 1 - d)

    def state(self) -> dict[str, Tensor]:
        """All weights but the start, which is loaded anew: `policy/parameter` -> tensor, whole: all
        processes must ask."""
        kept = {"current": _copy(self.parameters), **self._weights}
        return {
            f"{policy}/{name}": full(value)
            for policy, weights in kept.items()
            if policy != "ref"
            for name, value in weights.items()
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(like(state[f"current/{name}"], p))
        for average in self.averages:
            for name, slow in self._weights[average.name].items():
                slow.copy_(like(state[f"{average.name}/{name}"], slow))
        self.publish()


def _copy(parameters: Mapping[str, nn.Parameter]) -> NamedWeights:
    return {name: p.detach().clone() for name, p in parameters.items()}


def _held(p: nn.Parameter) -> Tensor:
    """What brings a parameter back: it itself, or a copy of its piece."""
    return local_shard(p.detach()).clone() if isinstance(p, DTensor) else p.data


def _place(p: nn.Parameter, weight: Tensor) -> None:
    """A piece is copied, since its memory is known elsewhere; whole weights change hands."""
    if isinstance(p, DTensor):
        local_shard(p.detach()).copy_(local_shard(weight))
    else:
        p.data = weight.to(p.dtype)
