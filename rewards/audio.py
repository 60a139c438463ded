"""The sound of samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Audio:
    """The sound of n samples: waveforms [n channels time], floats in -1..1, at `rate` Hz. `lengths`
    are the numbers of each that are its own, where shorter ones are padded with zeros to be shown
    or written; None: all. Rewards are never given padded ones."""

    waveform: Float[Tensor, "n c t"]
    rate: int
    lengths: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.waveform)

    @property
    def each(self) -> "list[Audio]":
        """The sounds one by one, without padding."""
        lengths = self.lengths or (self.waveform.shape[-1],) * len(self)
        waves = [self.waveform[row : row + 1, :, :size] for row, size in enumerate(lengths)]
        return [Audio(wave, self.rate) for wave in waves]

    def take(self, rows: Sequence[int] | Int[Tensor, " m"]) -> "Audio":
        index = torch.as_tensor(rows, dtype=torch.long, device=self.waveform.device)
        lengths = self.lengths and tuple(self.lengths[row] for row in index.tolist())
        return Audio(self.waveform[index], self.rate, lengths)

    @classmethod
    def padded(cls, sounds: "Sequence[Audio]") -> "Audio":
        """Sounds of one row and rate, one behind the other, padded to the longest."""
        lengths = tuple(sound.waveform.shape[-1] for sound in sounds)
        rows = [
            torch.nn.functional.pad(sound.waveform, (0, max(lengths) - size))
            for sound, size in zip(sounds, lengths, strict=True)
        ]
        return cls(torch.cat(rows), sounds[0].rate, lengths)

    def cpu(self) -> "Audio":
        """The same in host memory."""
        return replace(self, waveform=self.waveform.cpu())

    @property
    def mono(self) -> Float[Tensor, "n t"]:
        """The mean of the channels, in float32."""
        return self.waveform.float().mean(1)

    @classmethod
    def joined(cls, parts: "Sequence[Audio]") -> "Audio":
        """Concatenate rows of one rate and length."""
        return cls(torch.cat([part.waveform for part in parts]), parts[0].rate)
