"""Weights that are shared out over processes (FSDP2) as one process sees them."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(tensor: Tensor) -> Tensor:
    """This process's piece, sharing its memory; a plain tensor is all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
