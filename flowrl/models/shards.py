"""The part of sharded weights (FSDP2) that one process holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard, without a copy; a plain tensor is returned whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
