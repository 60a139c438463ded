"""The policies of a run: the trained policy, the initial one, its slow averages, and loaded
teachers.

Only this file changes weights outside the optimizer. All policies are the same modules with other
values in the trainable parameters: adapters, or all weights. `using(name)` swaps them in and out,
so the reference of a LoRA run costs one adapter, not a second model.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowrl.algorithm import Average
from flowrl.models.precision import HALF, Gradients, masters
from flowrl.models.shards import local_shard
from flowrl.processes.sharding import full, like

NamedWeights = dict[str, Tensor]
PolicyWeights = dict[str, NamedWeights]  # by policy
SAMPLED = "sampled: "  # before the name of a policy with the weights that sampled
TOGETHER = 64  # tensors of one comparison, which makes a copy of them


class Policies:
    """Weights of all policies: "current", "ref" (the frozen initial policy), the `averages`, and
    `loaded` weights.

    `keep_start` is false if nothing reads "ref": full weights are then held once.
    The optimizer and the averages follow `parameters`: float32 masters where the network's own
    weights, `network`, have half precision. `changed` is called after every change of the
    network's weights. Under FSDP2 each process holds only its own shards.

    `switch` turns adapters on or off. If adapters initially add 0, "ref" is the network without
    them: the same numbers at a lower cost.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        averages: Sequence[Average] = (),
        keep_start: bool = True,
        changed: Callable[[], None] | None = None,
        switch: Callable[[bool], None] | None = None,
        loaded: Mapping[str, NamedWeights] = {},
    ) -> None:
        self.changed = changed
        self.network = dict(parameters)
        self.gradients: Gradients | None = None  # on their way to masters, if there are any
        self.parameters = dict(self.network)
        if any(p.dtype in HALF for p in self.network.values()):
            self.gradients = Gradients()
            self.parameters = masters(self.network, self.gradients)
        self.sharded = any(isinstance(p, DTensor) for p in self.network.values())
        self.averages = tuple(averages)
        self._weights = {average.name: _copy(self.parameters) for average in averages}
        self._switch = switch if switch is not None and _adds_nothing(self.network) else None
        if keep_start:  # loaded in this dtype: exact
            self._weights["ref"] = _copy(self.network) if self._switch is None else {}
        for name, weights in loaded.items():
            self._weights[name] = {key: like(weights[key], p) for key, p in self.network.items()}
        self._current: NamedWeights = {}  # kept here while another policy's weights are placed
        self._placed = self.inside = "current"  # with adapters off, "ref" has no weights to place

    @property
    def names(self) -> tuple[str, ...]:
        return ("current", *self._weights)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Run modules with the weights of a policy. Inside, only the same policy can be used."""
        if name == self.inside:
            yield
            return
        assert self.inside == "current", f"already using {self.inside!r}"
        self.put(name)
        try:
            yield
        finally:
            self.put("current")

    @torch.no_grad()
    def put(self, name: str) -> None:
        """Activate a policy, whichever policy is active now. Only `flowrl.processes.lockstep` calls
        this directly; others call `using`."""
        if name == self.inside:
            return
        if self._switch is not None and "ref" in (name, self.inside):
            self._switch(name != "ref")
        if self._switch is None or name != "ref":
            self._swap(name)
        self.inside = name
        if self.changed is not None:
            self.changed()

    def _swap(self, name: str) -> None:
        """Put a policy's weights into the network, unless they are there."""
        if name == self._placed:
            return
        if self._placed == "current":
            self._current = {key: _held(p) for key, p in self.network.items()}
        for key, weight in (self._current if name == "current" else self._weights[name]).items():
            _place(self.network[key], weight)
        if name == "current":
            self._current = {}
        self._placed = name

    @torch.no_grad()
    def replace_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Copy whole weights into a policy that is not in use."""
        assert self.inside == "current" and not self.sharded
        for key, p in (self.network if name == "current" else self._weights[name]).items():
            p.copy_(weights[key])
        if self.changed is not None:
            self.changed()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the network after an optimizer step."""
        if self.gradients is not None:
            halves = [name for name, p in self.network.items() if p is not self.parameters[name]]
            network, masters = self.local(self.network), self.local(self.parameters)
            torch._foreach_copy_(  # type: ignore[reportPrivateImportUsage]
                [network[name].detach() for name in halves],
                [masters[name].detach() for name in halves],
            )
        if self.changed is not None:
            self.changed()

    def forget_gradients(self) -> None:
        """Drop all gradients, also those of a backward pass that failed."""
        if self.gradients is not None:
            self.gradients.forget()
        for p in self.parameters.values():
            p.grad = None

    @torch.no_grad()
    def follow(self, optimizer_steps: int, refreshed: Collection[str] = ()) -> None:
        """Update averages: average <- d average + (1 - d) current, where d is this step's decay, or
        0 for those `refreshed`."""
        parameters = self.local(self.parameters)
        for average in self.averages:
            d = 0.0 if average.name in refreshed else average.decay(optimizer_steps)
            slow = self.local(self._weights[average.name])
            torch._foreach_lerp_(  # type: ignore[reportPrivateImportUsage]
                list(slow.values()), [parameters[key].detach() for key in slow], 1 - d
            )

    @torch.no_grad()
    def equal_to_current(self, names: Collection[str]) -> set[str]:
        """Averages among `names` whose weights at sampling are bit-identical to the current weights
        on this process: NFT's average follows without lag at first, for 75 steps with the settings
        for OCR. Waits for a GPU once per average."""
        averages = [average.name for average in self.averages if average.name in names]
        return {name for name in averages if self._is_current(name)}

    def _is_current(self, name: str) -> bool:
        weights = self.local(self._weights[self.at_sampling(name)])
        current = self.local(self.network)
        return same_values(list(current.values()), [weights[key] for key in current])

    # Samples that are drawn ahead (`workers.lag`) were drawn by older weights

    @torch.no_grad()
    def copies(self, names: Collection[str]) -> PolicyWeights:
        """Whole CPU copies of the weights of these policies. Collective if they are sharded."""
        weights_by_name = {"current": self.network, **self._weights}
        return {
            name: {key: whole_copy(value.detach()) for key, value in weights_by_name[name].items()}
            for name in sorted(names)
        }

    def keep_sampled(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Keep the weights, by policy, that sampled the next samples to learn from; nothing if they
        are unchanged."""
        weights_by_name = {
            name: weights for name, weights in self._weights.items() if not name.startswith(SAMPLED)
        }
        for name, old in weights.items():
            pairs = ((key, old[key].to(p.device), p) for key, p in self.network.items())
            weights_by_name[SAMPLED + name] = {key: like(weight, p) for key, weight, p in pairs}
        self._weights = weights_by_name

    @contextmanager
    def earlier(self, name: str, weights: NamedWeights | None) -> Iterator[str]:
        """The name of a policy inside: its own, or one with the weights that it had earlier, which
        takes the place of the weights that sampled."""
        if weights is None:
            yield name
            return
        self.keep_sampled({name: weights})
        try:
            yield self.at_sampling(name)
        finally:
            self.keep_sampled({})

    def at_sampling(self, name: str) -> str:
        """The name of a policy's weights as they were when the samples were drawn."""
        return SAMPLED + name if SAMPLED + name in self._weights else name

    def state(self) -> dict[str, Tensor]:
        """CPU copies of all weights as `policy/parameter` -> whole tensor, except the initial
        policy and the teachers, which are loaded again. Collective: all processes call it."""
        averages = {average.name: self._weights[average.name] for average in self.averages}
        stored = {"current": self.parameters, **averages}
        return {
            f"{policy}/{name}": _whole(value.detach())
            for policy, weights in stored.items()
            for name, value in weights.items()
        }

    def local(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """This process's part of the weights: all weights unless blocks are sharded."""
        if not self.sharded:
            return weights
        return {name: local_shard(weight.detach()) for name, weight in weights.items()}

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this process's part of every weight that changes, with a name for messages: first
        trained weights, then averages."""
        network = self.local(self.network)
        for name, p in self.local(self.parameters).items():
            yield f"the weight {name}", p
            if self.parameters[name] is not self.network[name]:
                yield f"the weight {name} in the model's dtype", network[name]
        for average in self.averages:
            for weight in self.local(self._weights[average.name]).values():
                yield f"the average {average.name}", weight

    def check(self, state: Mapping[str, Tensor]) -> None:
        """ValueError for weights that `restore` could not take: one is missing, or has another
        shape or no floating-point numbers."""
        expected = {"current": self.parameters}
        expected |= {average.name: self._weights[average.name] for average in self.averages}
        for policy, weights in expected.items():
            for name, parameter in weights.items():
                saved = state.get(f"{policy}/{name}")
                if saved is None:
                    raise ValueError(f"it has no {policy}/{name}")
                if saved.shape != parameter.shape or not saved.is_floating_point():
                    raise ValueError(
                        f"{policy}/{name} is {saved.dtype} of shape {list(saved.shape)}, but this "
                        f"run's is {parameter.dtype} of shape {list(parameter.shape)}"
                    )

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(like(state[f"current/{name}"], p))
        for average in self.averages:
            for name, slow in self._weights[average.name].items():
                slow.copy_(like(state[f"{average.name}/{name}"], slow))
        self.publish()


def same_values(ours: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether tensors are equal once `other` is rounded to their types. On a GPU, groups of
    TOGETHER tensors are compared in two kernels, with a single wait."""
    pairs = [(p.detach(), w.detach()) for p, w in zip(ours, other, strict=True) if p.numel()]
    if all(p.device.type == "cpu" for p, _ in pairs):  # needs no copy
        return all(bool((p == w.to(p.dtype)).all()) for p, w in pairs)
    return not bool(_differences(pairs).ne(0).any())


def _differences(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The largest difference of each pair of tensors, in the first tensor's type."""
    largest: list[Tensor] = []
    for k in range(0, len(pairs), TOGETHER):
        mine = [p for p, _ in pairs[k : k + TOGETHER]]
        theirs = [w.to(p.dtype) for p, w in pairs[k : k + TOGETHER]]
        gaps = torch._foreach_sub(mine, theirs)  # type: ignore[reportPrivateImportUsage]
        largest += torch._foreach_norm(gaps, math.inf)  # type: ignore[reportPrivateImportUsage]
    return torch.stack([difference.float() for difference in largest])


def _adds_nothing(network: Mapping[str, Tensor]) -> bool:
    """Whether these are the weights of adapters that add 0 (B of B A is 0). False for shards, since
    processes would have to agree."""
    ends = [p for name, p in network.items() if ".lora_B." in name]
    is_lora = all(".lora_A." in name or ".lora_B." in name for name in network)
    if not ends or not is_lora or any(isinstance(p, DTensor) for p in ends):
        return False
    return not bool(torch.stack([p.detach().count_nonzero() for p in ends]).any())


def _copy(parameters: Mapping[str, nn.Parameter]) -> NamedWeights:
    return {name: p.detach().clone() for name, p in parameters.items()}


def _whole(weight: Tensor) -> Tensor:
    """Gather shards, which makes a copy; copy a whole weight."""
    return full(weight) if isinstance(weight, DTensor) else weight.to("cpu", copy=True)


def whole_copy(weight: Tensor) -> Tensor:
    """A copy on the CPU of every process, gathered if sharded."""
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).to("cpu", copy=True)


def _held(p: nn.Parameter) -> Tensor:
    """Return what restores a parameter: its data, or a copy of its shard."""
    return local_shard(p.detach()).clone() if isinstance(p, DTensor) else p.data


def _place(p: nn.Parameter, weight: Tensor) -> None:
    """Copy into a shard, whose memory FSDP refers to; swap the data of a whole weight."""
    if isinstance(p, DTensor):
        local_shard(p.detach()).copy_(local_shard(weight))
    else:
        p.data = weight.to(p.dtype)
