"""A digest of weights that reads them once, on their device."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

SUMMED = 2**22  # numbers of a checksum at a time


def weights_checksum(named: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of named weights, from exact sums of their bits and of bits times positions."""
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in named:
        bits = weight.detach().contiguous().view(-1).view(torch.uint8)
        sums = [_sums(part) for part in bits.split(SUMMED)]
        digest.update(f"{name} {torch.stack(sums).tolist()}".encode())
    return digest.hexdigest()


def _sums(bits: Tensor) -> Tensor:
    indices = torch.arange(1, len(bits) + 1, device=bits.device)
    return torch.stack([bits.sum(dtype=torch.int64), (bits * indices).sum()])
