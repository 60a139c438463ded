"""Share of the sound that is not silent, in 0..1.

Windows of 20 ms, one every 10 ms, whose level (see `loudness`) is below `below` dBFS are silent. A
sound without pauses, such as a hum or hiss, has the highest score: give it little weight.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from rewards.perception.sound import decibels, expect_sound, tones, windows
from rewards.types import Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("sound", "video")


@dataclass(frozen=True)
class Silence:
    below: float = -60.0

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        audio = expect_sound(samples, "silence")
        wave = audio.waveform.detach().double().cpu().square().mean(1)
        size, hop = max(1, round(0.02 * audio.rate)), max(1, round(0.01 * audio.rate))
        levels = decibels(windows(wave, size, hop).mean(2))
        return 1 - (levels < self.below).double().mean(1)

    def examples(self) -> Samples:
        """A tone, and the same that ends in the middle."""
        audio = tones((0.5, 0.5))
        audio.waveform[1, :, audio.waveform.shape[2] // 2 :] = 0
        return Samples(
            torch.zeros(2, 2, 3, 8, 8), ["a video"] * 2, torch.zeros(2).long(), (), audio
        )


def load(below: Annotated[float, Field(ge=-120, le=0)] = -60.0) -> Reward:
    """Load the reward.

    below  level in dBFS below which a window of 20 ms is silent, in [-120, 0]; higher calls more of
           the sound silent
    """
    return Silence(below)
