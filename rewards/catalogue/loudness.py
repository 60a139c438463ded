"""Loudness of the sound: its root mean square in dBFS, from -120 (nothing) to 0.

    level = 10 log10(mean over channels and time of x^2)

x is the waveform in -1..1, so a full-scale square wave has 0 and a full-scale sine -3.01. With
`target` the score is minus the distance from that level in dB: -23 suits speech. Without
one it is the level itself, which pays for clipping: give it a target.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from rewards.perception.sound import decibels, expect_sound, tones
from rewards.types import Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("sound", "video")


@dataclass(frozen=True)
class Loudness:
    target: float | None = None

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        wave = expect_sound(samples, "loudness").waveform.detach().double().cpu()
        levels = decibels(wave.square().flatten(1).mean(1))
        return levels if self.target is None else -(levels - self.target).abs()

    def examples(self) -> Samples:
        """A tone at the target (a loud one without), and a tone 30 dB below."""
        high = 0.9 if self.target is None else 2**0.5 * 10 ** (self.target / 20)
        audio = tones((high, high * 10**-1.5))
        return Samples(
            torch.zeros(2, 2, 3, 8, 8), ["a video"] * 2, torch.zeros(2).long(), (), audio
        )


def load(target: Annotated[float, Field(ge=-120, le=0)] | None = None) -> Reward:
    """Load the reward.

    target  wanted level in dBFS, in [-120, 0]: the score is minus the distance from it in dB; null:
            the score is the level itself
    """
    return Loudness(target)
