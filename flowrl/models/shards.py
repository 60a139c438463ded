"""The part of sharded weights (FSDP2) that one process holds."""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard, without a copy; a plain tensor is returned whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(model: nn.Module) -> bool:
    """Whether parts of a model are sharded, gathered at the moment or not."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def is_apart(model: nn.Module) -> bool:
    """Whether some weights of a model are shards at the moment."""
    return any(isinstance(p, DTensor) for p in model.parameters())
