"""FSDP2: each process keeps a shard of every block's weights and gathers them for a call.

`torch.distributed.fsdp.fully_shard` is applied to each block. Weights outside blocks are replicated
in denoisers, where they are few. A language model's (embeddings, the last norm, the head) are one
more block, which is gathered for a whole call. A sharded weight is a DTensor.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flowrl.errors import UserError
from flowrl.models.language.head import Float32Head
from flowrl.models.shards import GatheredCalls, local_shard
from flowrl.settings.checks.sharding import VISION_ADAPTERS

BUCKET = 2**24  # elements per all-reduce


@dataclass(frozen=True)
class Sharding:
    """The two FSDP settings of accelerate that flowrl uses."""

    reshard: bool = True  # free a block's gathered weights after its forward
    offload: bool = False  # keep shards on the CPU


def blocks(root: nn.Module) -> list[nn.Module]:
    """Modules with weights in a model's outermost `ModuleList`s."""
    if isinstance(root, GatheredCalls):
        root = root.repeated
    lists = [name for name, module in root.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{o}.") for o in lists)]
    children = [block for name in outer for block in root.get_submodule(name).children()]
    return [block for block in children if next(block.parameters(), None) is not None]


def shard(roots: Mapping[str, nn.Module], how: Sharding, device: torch.device) -> list[FSDPModule]:
    """Shard the blocks of these models over all processes, in place. UserError for a model without
    blocks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = CPUOffloadPolicy() if how.offload else OffloadPolicy()
    done: list[FSDPModule] = []
    for name, root in roots.items():
        sharded_blocks = blocks(root)
        if not sharded_blocks:
            raise UserError(
                f"FSDP2: {name} ({type(root).__name__}) has no list of blocks to shard; launch "
                "with configs/accelerate/ddp.yaml"
            )
        ignored: set[nn.Parameter] = set()
        if isinstance(root, GatheredCalls):
            ignored = replicated(root)
            sharded_blocks.append(root.whole)
        for block in sharded_blocks:
            sharded: Any = fully_shard(
                block, mesh=mesh, reshard_after_forward=how.reshard, offload_policy=policy,
                ignored_params=ignored or None,
            )  # fmt: skip
            # gradients are summed, not averaged: losses are divided by the counts of all processes
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            done.append(sharded)
    return done


def replicated(root: GatheredCalls) -> set[nn.Parameter]:
    """Weights outside a language model's blocks that are not sharded. The gradients of a block have
    one dtype, so these are the trained ones of another dtype than most, such as a float32 head
    beside bfloat16 embeddings. Heads keep no copies from now on.

    UserError for adapters that calls without images do not use: their backward passes have other
    collectives than those of calls with images.
    """
    often = set(root.repeated.parameters())
    trained = [p for p in root.parameters() if p.requires_grad]
    if len(trained) < len(set(root.parameters())) and any(p not in often for p in trained):
        raise UserError(VISION_ADAPTERS)
    for head in root.modules():
        if isinstance(head, Float32Head):
            head.keeps = False
    inside = {p for block in blocks(root) for p in block.parameters()}
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in trained:
        if p not in inside:
            kinds.setdefault(p.dtype, []).append(p)
    most = max(kinds, key=lambda kind: sum(p.numel() for p in kinds[kind]), default=None)
    return {p for kind, group in kinds.items() if kind != most for p in group}


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on the main process's CPU, an empty tensor elsewhere; collective. Plain
    tensors are returned unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    gathered = tensor.full_tensor()
    return gathered.cpu() if dist.get_rank() == 0 else gathered.new_empty(0)


def like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """Shard a tensor that every process holds whole, in the same way as `pattern`, without
    communication."""
    if not isinstance(pattern, DTensor):
        return tensor
    on_device = tensor.to(pattern.to_local().device)
    return distribute_tensor(on_device, pattern.device_mesh, pattern.placements, src_data_rank=None)


def groups(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Replicated and sharded parameters as two groups, because an optimizer cannot mix them in
    one."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault(isinstance(p, DTensor), []).append(p)
    return [kinds[kind] for kind in sorted(kinds)]


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of replicated weights over processes; backward has already summed the
    shards' gradients.

    A process without a gradient that others have (the second of two experts) contributes zeros.
    """
    whole = [p for p in parameters if not isinstance(p, DTensor)]
    if not whole:
        return
    used = torch.tensor([p.grad is not None for p in whole], device=whole[0].device).int()
    dist.all_reduce(used, dist.ReduceOp.MAX)
    used_weights = [p for p, flag in zip(whole, used.tolist(), strict=True) if flag]
    kinds: dict[Any, list[Tensor]] = {}
    for p in used_weights:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        kinds.setdefault(p.dtype, []).append(p.grad)
    for grads in kinds.values():
        for bucket in _buckets(grads):
            flat = torch.cat([grad.flatten() for grad in bucket])
            dist.all_reduce(flat)
            for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                grad.copy_(part.view_as(grad))


def _buckets(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for grad in grads:
        if bucket and sum(g.numel() for g in bucket) + grad.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(grad)
    yield bucket


@torch.no_grad()
def clip_shards(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Clip all gradients to norm `most`, and return the norm before clipping, over all shards."""
    with_grads = [p for p in parameters if p.grad is not None]
    shared = [p for p in with_grads if isinstance(p, DTensor)]
    if not shared:
        return torch.nn.utils.clip_grad_norm_(with_grads, most)
    grads = [local_shard(p.grad) for p in with_grads if p.grad is not None]
    squares = torch.zeros(
        2, dtype=torch.float64, device=grads[0].device
    )  # of shards, of replicated weights
    for p, grad in zip(with_grads, grads, strict=True):
        squares[int(not isinstance(p, DTensor))] += grad.double().square().sum()
    pieces = squares[:1].clone()
    dist.all_reduce(pieces)
    norm = (pieces[0] + squares[1]).sqrt()
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.device, grad.dtype))
    return norm


@contextmanager
def gathered(roots: Mapping[str, nn.Module], holds: bool) -> Iterator[None]:
    """Context in which trained weights are plain CPU tensors on processes with `holds`, for saving;
    collective."""
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for root in roots.values():
        for module in root.modules():
            for name, p in module.named_parameters(recurse=False):
                if p.requires_grad and isinstance(p, DTensor):
                    places.append((module, name, p))
    whole: dict[nn.Parameter, nn.Parameter] = {}  # tied weights are one
    for module, name, p in places:
        if p not in whole:
            plain = full(p.detach())
            whole[p] = nn.Parameter(plain, requires_grad=True)
        if holds:
            module._parameters[name] = whole[p]
    try:
        yield
    finally:
        for module, name, p in places:
            module._parameters[name] = p


def whole_state(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]
) -> dict[str, Any]:
    """Optimizer state as a single process would save it, so that a run can resume with another
    number of processes. Collective; only the main process gets the values."""
    listed = list(parameters)
    if not any(isinstance(p, DTensor) for p in listed):
        return optimizer.state_dict()
    state = {
        index: {key: full(value) for key, value in optimizer.state[p].items()}
        for index, p in enumerate(listed)
        if p in optimizer.state
    }
    group = {**optimizer.state_dict()["param_groups"][0], "params": list(range(len(listed)))}
    return {"state": state, "param_groups": [group]}


def load_state(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], state: Any
) -> None:
    """Load such a state, which every process has read. ValueError if it does not fit."""
    listed = list(parameters)
    if not any(isinstance(p, DTensor) for p in listed):
        optimizer.load_state_dict(state)
        return
    current = optimizer.state_dict()
    saved = {id(p): state["state"].get(index) for index, p in enumerate(listed)}
    cut: dict[int, Any] = {}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for index, p in enumerate(held):
        moments = saved[id(p)]
        if moments is not None:  # Adam's step count is a scalar
            cut[index] = {k: like(v, p) if v.ndim else v for k, v in moments.items()}
    optimizer.load_state_dict({"state": cut, "param_groups": current["param_groups"]})
