"""The dtype and device in which states are kept from sampling to training."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Storage:
    """Dtype and device of stored states; None keeps the sampler's own.

    Under another dtype the sampler continues from the rounded state, so the next state is drawn
    from exactly the stored one, and the ratio of unchanged weights stays exactly 1.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def rounded(self, x: Tensor) -> Tensor:
        """Round a state to the storage dtype, but keep its own dtype and device."""
        return x if self.dtype is None else x.to(self.dtype).to(x.dtype)

    def put(self, x: Tensor) -> Tensor:
        """Convert x for storage; x itself if nothing is set."""
        return self.moved(x if self.dtype is None else x.to(self.dtype))

    def moved(self, x: Tensor) -> Tensor:
        """Move a tensor to the storage device without changing its dtype."""
        return x if self.device is None else x.to(self.device)
