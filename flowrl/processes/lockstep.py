"""Under FSDP2 all processes call the model together, whatever each of them has to do.

A call gathers weights from all processes, so all must make the same calls in the same order, or
they wait for ever. Their work differs: one has more draws, its texts are longer, its rows lie on
the other of two experts. So before each call the processes tell each other what they want to call
next, and one with something else to do (or nothing) makes the others' call too, on inputs that it
has seen before, and gives the result the weight zero. Backward is such a common step as well.

What is agreed on is one small number a process, over gloo, so a GPU's queue is not waited for.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

DONE, FAILED, BACKWARD = 0, -1, 1  # what a process may want, beside a call


class Elsewhere(Exception):
    """Another process failed; what it said is gathered by whoever catches this."""


@runtime_checkable
class WeightsInUse(Protocol):
    """What a call's result depends on beside its inputs: `flowrl.run.policies.Policies`."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def inside(self) -> str: ...  # the policy whose weights are in force

    def put(self, name: str) -> None: ...


class ModuleCall(NamedTuple):
    """A call: of which module, under whose weights, with gradients or without."""

    module: int
    policy: int
    graded: bool

    def number(self, modules: int) -> int:
        return 2 + 2 * (self.policy * modules + self.module) + self.graded

    @classmethod
    def of(cls, number: int, modules: int) -> "ModuleCall":
        place, graded = divmod(number - 2, 2)
        return cls(place % modules, place // modules, bool(graded))


class Lockstep:
    """Of the modules that are sharded; their `forward` announces itself from now on."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = tuple(modules.values())
        self.group = dist.new_group(backend="gloo")
        self.weights: WeightsInUse | None = None  # set once there are policies
        self.kept: list[Tensor] = []  # results of others' calls that backward must pass
        self.company = 0  # calls made for the sake of others
        self.broken = False  # an error came inside a call that others wait in
        self._seen: dict[int, tuple[int, Any, Any]] = {}
        self._forwards = [module.forward for module in self.modules]
        self._alone = False
        for index, module in enumerate(self.modules):
            module.forward = self._announced(index)  # type: ignore[method-assign]

    def _announced(self, index: int) -> Callable[..., Any]:
        def forward(*args: Any, **named: Any) -> Any:
            if self._alone:
                return self._forwards[index](*args, **named)
            self._remember(index, args, named)
            weights = self.weights
            policy = 0 if weights is None else weights.names.index(weights.inside)
            wanted = ModuleCall(index, policy, torch.is_grad_enabled()).number(len(self.modules))
            while (chosen := self._agree(wanted)) != wanted:
                self._accompany(chosen)
            return self._guarded(self._forwards[index], *args, **named)

        return forward

    def backward(self, loss: Tensor) -> None:
        """Of everyone's losses at once."""
        while (chosen := self._agree(BACKWARD)) != BACKWARD:
            self._accompany(chosen)
        self._back(loss)

    def settle(self) -> None:
        """Keep the others company until all have come here."""
        while (chosen := self._agree(DONE)) != DONE:
            self._accompany(chosen)
        self.kept.clear()

    def fail(self) -> None:
        """Tell the others, who then stop as well; they are in `_agree` or come there next."""
        self._gather(FAILED)
        self.kept.clear()

    def _gather(self, wanted: int) -> list[int]:
        own = torch.tensor([wanted])
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own, group=self.group)
        return [int(one) for one in every]

    def _agree(self, wanted: int) -> int:
        """What all do next: somebody's call, the lowest number first; then backward; then end."""
        every = self._gather(wanted)
        if FAILED in every:
            raise Elsewhere
        calls = [one for one in every if one > BACKWARD]
        return min(calls) if calls else max(every)

    def _accompany(self, chosen: int) -> None:
        if chosen == BACKWARD:
            self._back(None)
            return
        call, weights = ModuleCall.of(chosen, len(self.modules)), self.weights
        assert call.module in self._seen, "the proof at the start calls every module everywhere"
        _, args, named = self._seen[call.module]
        before = None if weights is None else weights.inside
        if weights is not None:
            weights.put(weights.names[call.policy])
        self.company += 1
        with torch.set_grad_enabled(call.graded):
            result = self._guarded(self._forwards[call.module], *args, **named)
        if weights is not None and before is not None:
            weights.put(before)
        if call.graded:
            parts = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
            self.kept += [t for t in parts if t.requires_grad]

    def _back(self, loss: Tensor | None) -> None:
        """A result with weight zero passes on zeros, so the graph is gone through as elsewhere."""
        parts = [(result * 0).sum() for result in self.kept]
        if loss is not None:
            parts.insert(0, loss)
        self.kept = []
        if parts:
            self._guarded(torch.stack([p.to(parts[0]) for p in parts]).sum().backward)

    def _guarded(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Inside, calls are not announced; an error there leaves the others waiting."""
        self._alone, self.broken = True, True
        try:
            result = call(*args, **named)
        finally:
            self._alone = False
        self.broken = False
        return result

    def _remember(self, index: int, args: Any, named: Any) -> None:
        """The smallest inputs that a module was called with; a cache would grow, so none of it."""
        if any(name.startswith(("past_", "cache")) and named[name] is not None for name in named):
            return
        size = sum(t.numel() for t in tree_flatten((args, named))[0] if isinstance(t, Tensor))
        if index not in self._seen or size < self._seen[index][0]:
            args, named = tree_map(_detached, (args, named))
            self._seen[index] = (size, args, named)


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
