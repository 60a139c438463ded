"""The processes of a run: shares of the draws, gathering, and collective sections.

Draws are split over processes; a tree of samples stays on one process. Processes that share calls
of the denoiser (`model.context_parallel`) have the same draws. Each process holds all weights
(DDP), or blocks are sharded (FSDP2). See docs/processes.md.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from flowrl.errors import UserError, after
from flowrl.models.call_sizes import CallKind, CallTooLarge
from flowrl.models.shards import local_shard
from flowrl.processes import context_parallel
from flowrl.processes.context_parallel import Shared
from flowrl.processes.lockstep import Elsewhere, Lockstep, WeightsInUse
from flowrl.processes.sharding import Sharding, gathered, shard, sum_gradients
from samplers.host import on_host

T = TypeVar("T")


@dataclass(frozen=True)
class Parallel:
    processes: int
    rank: int
    device: str
    roots: Mapping[str, nn.Module]  # what is trained
    blocks: tuple[Any, ...] = ()  # sharded blocks
    lockstep: Lockstep | None = None  # if blocks are sharded
    resharding: bool = True  # whether a call frees the blocks that it gathered
    members: int = 1  # processes that share a call
    shared: Mapping[str, Shared] = field(default_factory=dict)  # denoisers with shared calls
    circle: Any = None  # their gloo process group

    @classmethod
    def open(
        cls,
        accelerator: Accelerator,
        roots: Mapping[str, nn.Module],
        how: Sharding | None,
        members: int = 1,
    ) -> "Parallel":
        """Open the parallel run: shard weights in place according to `how` (None: not at all), and
        share calls among `members` processes each."""
        parallel = cls(
            accelerator.num_processes, accelerator.process_index, accelerator.device.type, roots
        )
        if members > 1:
            shared = context_parallel.share(roots, members, accelerator.device)
            circle, _ = dist.new_subgroups(members, backend="gloo")
            parallel = replace(parallel, members=members, shared=shared, circle=circle)
        if how is None:
            return parallel
        blocks = shard(roots, how, accelerator.device)
        step = Lockstep(roots)
        return replace(parallel, blocks=tuple(blocks), lockstep=step, resharding=how.reshard)

    def __str__(self) -> str:
        if self.processes == 1:
            return "1 process"
        calls = "" if self.members == 1 else f"; {self.members} share each call"
        if self.lockstep is None:
            return f"{self.processes} processes, DDP: each holds all weights ({self.device}){calls}"
        parameters = [p for root in self.roots.values() for p in root.parameters()]
        local, whole = (
            sum(local_shard(p).numel() for p in parameters),
            sum(p.numel() for p in parameters),
        )
        return (
            f"{self.processes} processes, FSDP2: this one holds {local / 1e6:.4g} of "
            f"{whole / 1e6:.4g} million weights ({self.device}){calls}"
        )

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def leads(self) -> bool:
        """Whether this process leads its context-parallel group, whose members hold the same
        data."""
        return self.rank % self.members == 0

    def share(self, count: int) -> tuple[range, bool]:
        """This process's contiguous share of `count` draws, and whether the share counts.

        Sizes differ by at most one. A process without draws runs the first draw, to make the same
        collective calls as the others, and discards the result. A context-parallel group has one
        share.
        """
        place, places = self.rank // self.members, self.processes // self.members
        first, end = -(-count * place // places), -(-count * (place + 1) // places)
        return (range(first, end), True) if end > first else (range(1), False)

    def gatherer(self, count: int) -> Callable[[Tensor], Tensor]:
        """A function that concatenates the processes' shares of `count` draws on the CPU."""
        _, counts = self.share(count)
        rows_sent = slice(None if counts else 0)
        return lambda mine: torch.cat(self.every(on_host(mine)[rows_sent]))

    def every(self, mine: T) -> list[T]:
        """Gather one value per process, or one per context-parallel group."""
        return gather_object([mine] if self.leads else [])

    def once(self, do: Callable[[], T]) -> T:
        """Call `do` on the leader of a context-parallel group, and broadcast the result within
        it."""
        if self.members == 1:
            return do()
        box = [do() if self.leads else None]
        first = self.rank // self.members * self.members
        dist.broadcast_object_list(box, src=first, group=self.circle)
        result: Any = box[0]
        return result

    def proofs(self) -> Iterator[str]:
        """Sentences on how much shared calls differ from unshared ones."""
        for name, shared in self.shared.items():
            if shared.away is not None:
                yield (
                    f"{name}: a call shared by {self.members} processes differs from an unshared "
                    f"one by {shared.away:.1e} of its size"
                )

    def follow(self, weights: WeightsInUse) -> None:
        if self.lockstep is not None:
            self.lockstep.weights = weights

    def together(self) -> "Together | AbstractContextManager[None]":
        """Context for work that differs between processes, without gathering inside. It ends with
        a barrier that re-raises any process's error on all."""
        return nullcontext() if self.processes == 1 else Together(self)

    def backward(self, loss: Tensor) -> None:
        if self.lockstep is None:
            loss.backward()
        else:
            self.lockstep.backward(loss)

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        if self.processes > 1:
            sum_gradients(parameters.values())

    def reshard(self) -> None:
        """Free gathered weights because the shards have changed."""
        for block in self.blocks:
            block.reshard()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which every process holds the blocks' whole weights, gathered once, and calls
        them alone, without gradients. All processes enter it together, outside calls.

        UserError, on all processes, if a GPU has no room for them.
        """
        if self.lockstep is None:
            yield
            return
        self._check_room()
        for block in self.blocks:
            block.set_reshard_after_forward(False)
            block.unshard()
        try:
            with self.lockstep.unannounced():
                yield
        finally:
            for block in self.blocks:
                block.reshard()
                block.set_reshard_after_forward(self.resharding)

    def _check_room(self) -> None:
        sharded = {id(p): p for block in self.blocks for p in block.parameters()}
        more = sum(
            (p.numel() - local_shard(p).numel()) * p.element_size() for p in sharded.values()
        )
        if any(self.every(more > free_bytes(self.device))):
            raise UserError(
                f"FSDP2: text sampling gathers all weights once, which needs {more / 2**30:.1f} "
                "GiB more on each process and does not fit: let a server sample that keeps its "
                "weights (model.server with sync: none, without prompts.held_out)"
            )

    def gathered(self) -> AbstractContextManager[None]:
        """Context for saving, in which the main process's modules hold plain weights."""
        return gathered(self.roots, self.main) if self.blocks else nullcontext()


def free_bytes(device: str) -> float:
    """Free memory of this process's GPU; not measured on a CPU."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else math.inf


_Said = tuple[str, frozenset[CallKind] | None] | None  # a process's error and its large calls


class Together:
    """A barrier that re-raises any process's error on all processes; see `Parallel.together`."""

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        lockstep = self.parallel.lockstep
        if error is not None and not isinstance(error, Exception):
            return False  # KeyboardInterrupt and the like: stop at once
        if error is not None and self.parallel.members > 1:
            return False  # others may wait inside a call: the launcher ends them
        if lockstep is not None:
            if lockstep.broken:  # the others wait inside a call: the launcher ends them
                return False
            try:
                if error is None:
                    lockstep.settle()
                elif not isinstance(error, Elsewhere):
                    lockstep.fail()
            except Elsewhere as elsewhere:
                error = elsewhere
        kinds = error.kinds if isinstance(error, CallTooLarge) else None
        mine = None if error is None or isinstance(error, Elsewhere) else (_sentence(error), kinds)
        sayings = _all_said(mine, error)
        if sayings is None:
            return False
        failures = [(rank, *saying) for rank, saying in enumerate(sayings) if saying is not None]
        large = [kinds for *_, kinds in failures if kinds is not None]
        if (
            failures and len(large) == len(failures) and lockstep is None
        ):  # all may repeat smaller calls
            raise CallTooLarge(frozenset().union(*large), failures[0][1], agreed=True) from error
        if not failures or mine is not None:
            return False  # its own error propagates
        rank, text, _ = failures[0]
        raise UserError(f"process {rank} stopped: {text}") from None


def _all_said(mine: _Said, error: BaseException | None) -> list[_Said] | None:
    """The errors of all processes. None if one has ended meanwhile, as after the same error: then
    this process's own error stays the first."""
    if mine is None or error is None:
        return gather_object([mine])
    return after(error, lambda: gather_object([mine]), None)


def _sentence(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    notes = "; ".join([str(error), *vars(error).get("__notes__", ())])
    return f"{type(error).__name__}: {notes}"
