"""The sound of samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Audio:
    """The sound of n samples: waveforms [n channels time], floats in -1..1, at `rate` Hz."""

    waveform: Float[Tensor, "n c t"]
    rate: int

    def __len__(self) -> int:
        return len(self.waveform)

    def take(self, rows: Sequence[int] | Int[Tensor, " m"]) -> "Audio":
        index = torch.as_tensor(rows, dtype=torch.long, device=self.waveform.device)
        return replace(self, waveform=self.waveform[index])

    @property
    def mono(self) -> Float[Tensor, "n t"]:
        """The mean of the channels, in float32."""
        return self.waveform.float().mean(1)

    @classmethod
    def joined(cls, parts: "Sequence[Audio]") -> "Audio":
        """Concatenate rows of one rate and length."""
        return cls(torch.cat([part.waveform for part in parts]), parts[0].rate)
