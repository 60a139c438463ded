"""Keep the model calls of all processes in the same order under FSDP2.

A call gathers weights from all processes, so all must make the same calls in the same order, or
they deadlock. But their work differs: a process may have more draws, longer texts, or rows for the
other of two experts. So before each call the processes exchange the call that each wants next. A
process with other work (or none) joins the chosen call with earlier inputs of its kind, and gives
the result weight zero. Backward is also such a collective step.

Calls of one kind use the same weights: those of another may skip layers or the attention between
video and sound (SD3's and LTX-2's guidance), and gradients are summed over processes for the
weights of a block that have one.

The exchange is one small integer per process over gloo, which does not wait for a GPU's queue.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

DONE, FAILED, BACKWARD = 0, -1, 1  # states of a process, beside a call that it wants
CALL_KINDS = 2**16  # numbers of kinds of calls


class Elsewhere(Exception):
    """Another process failed; the code that catches this gathers its message."""


@runtime_checkable
class WeightsInUse(Protocol):
    """The weights that calls use, implemented by `flowrl.session.policies.Policies`."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def inside(self) -> str: ...  # the policy whose weights are in use

    def put(self, name: str) -> None: ...


class ModuleCall(NamedTuple):
    """A call: the module's index, the policy whose weights it uses, whether it has gradients, and
    its kind (`kind_of_call`)."""

    module: int
    policy: int
    graded: bool
    kind: int = 0

    def number(self, modules: int) -> int:
        place = (self.policy * modules + self.module) * CALL_KINDS + self.kind
        return 2 + 2 * place + self.graded

    @classmethod
    def of(cls, number: int, modules: int) -> "ModuleCall":
        place, graded = divmod(number - 2, 2)
        place, kind = divmod(place, CALL_KINDS)
        return cls(place % modules, place // modules, bool(graded), kind)


def kind_of_call(arguments: Any) -> int:
    """A number of 16 bits for what decides which weights a call uses: the switches, the lists of
    layers and the presence of its arguments, but no tensor, size or number of rows. Two kinds have
    one number by chance once in 65,536."""
    return int.from_bytes(blake2b(_form(arguments).encode(), digest_size=2).digest(), "big")


def _form(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_form(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if any(isinstance(cell, Tensor) for cell in value):  # rows of different forms
            return "[" + ",".join(sorted({_form(cell) for cell in value})) + "]"
        layers = [str(cell) if type(cell) is int else _form(cell) for cell in value]
        return "[" + ",".join(layers) + "]"
    return str(value) if value is None or isinstance(value, bool | str) else type(value).__name__


class _Inputs(NamedTuple):
    """Inputs of a call: how many numbers its tensors have, and its arguments."""

    size: int
    args: Any
    named: Any


class Lockstep:
    """Wraps the `forward` of sharded modules, so that processes agree on every call first."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = tuple(modules.values())
        self.group = dist.new_group(backend="gloo")
        self.weights: WeightsInUse | None = None  # set after the policies are made
        self.kept: list[Tensor] = []  # results of joined calls, for backward
        self.company = 0  # calls joined for other processes
        self.broken = False  # an error occurred inside a collective call
        self._seen: dict[int, dict[int, _Inputs]] = {}  # the smallest by module and kind
        self._forwards = [module.forward for module in self.modules]
        self._alone = False
        for index, module in enumerate(self.modules):
            module.forward = self._announced(index)  # type: ignore[method-assign]

    def _announced(self, index: int) -> Callable[..., Any]:
        @wraps(self._forwards[index])  # blocks choose a network's arguments by its signature
        def forward(*args: Any, **named: Any) -> Any:
            if self._alone:
                return self._forwards[index](*args, **named)
            kind = kind_of_call((args, named))
            self._remember(index, kind, args, named)
            weights = self.weights
            policy = 0 if weights is None else weights.names.index(weights.inside)
            call = ModuleCall(index, policy, torch.is_grad_enabled(), kind)
            wanted = call.number(len(self.modules))
            while (chosen := self._agree(wanted)) != wanted:
                self._join(chosen)
            return self._guarded(self._forwards[index], *args, **named)

        return forward

    @contextmanager
    def unannounced(self) -> Iterator[None]:
        """Context in which calls are not announced, since their weights are already gathered."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def backward(self, loss: Tensor) -> None:
        """Run backward on all processes' losses at once."""
        while (chosen := self._agree(BACKWARD)) != BACKWARD:
            self._join(chosen)
        self._back(loss)

    def settle(self) -> None:
        """Join the other processes' collective calls until all arrive."""
        while (chosen := self._agree(DONE)) != DONE:
            self._join(chosen)
        self.kept.clear()

    def fail(self) -> None:
        """Announce a failure, which stops the others at their next `_agree`."""
        self._gather(FAILED)
        self.kept.clear()

    def _gather(self, wanted: int) -> list[int]:
        mine = torch.tensor([wanted])
        calls = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(calls, mine, group=self.group)
        return [int(one) for one in calls]

    def _agree(self, wanted: int) -> int:
        """Choose the next collective step: calls by lowest number, then backward, then the end."""
        all_calls = self._gather(wanted)
        if FAILED in all_calls:
            raise Elsewhere
        calls = [one for one in all_calls if one > BACKWARD]
        return min(calls) if calls else max(all_calls)

    def _join(self, chosen: int) -> None:
        if chosen == BACKWARD:
            self._back(None)
            return
        call, weights = ModuleCall.of(chosen, len(self.modules)), self.weights
        assert call.module in self._seen, (
            "the proof at the start calls every module on every process"
        )
        by_kind = self._seen[call.module]
        smallest = min(by_kind.values(), key=lambda inputs: inputs.size)
        _, args, named = by_kind.get(call.kind, smallest)
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
        """Joined results enter with weight zero, so the backward pass is the same on all
        processes."""
        parts = [(result * 0).sum() for result in self.kept]
        if loss is not None:
            parts.insert(0, loss)
        self.kept = []
        if parts:
            self._guarded(torch.stack([p.to(parts[0]) for p in parts]).sum().backward)

    def _guarded(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call without announcing inner calls. An error inside leaves the other processes
        waiting."""
        self._alone, self.broken = True, True
        try:
            result = call(*args, **named)
        finally:
            self._alone = False
        self.broken = False
        return result

    def _remember(self, index: int, kind: int, args: Any, named: Any) -> None:
        """Keep the smallest inputs of each module's calls of a kind; a call without any is not
        repeated."""
        size = sum(t.numel() for t in tree_flatten((args, named))[0] if isinstance(t, Tensor))
        if size == 0:
            return
        by_kind = self._seen.setdefault(index, {})
        if kind not in by_kind or size < by_kind[kind].size:
            args, named = tree_map(_detached, (args, named))
            by_kind[kind] = _Inputs(size, args, named)


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
