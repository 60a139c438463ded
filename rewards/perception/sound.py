"""Samples' sound for rewards that listen: one channel, levels of windows, other rates."""

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.audio import Audio
from rewards.perception.media import WrongMedia, plural
from rewards.types import Samples

QUIETEST = -120.0  # dBFS of nothing


def expect_sound(samples: Samples, name: str) -> Audio:
    """The samples' sound. WrongMedia, naming the reward, for samples without."""
    if samples.audio is None:
        raise WrongMedia(
            f"the reward {name!r} scores sound; it was given {plural(samples.kind)} without: take "
            "a model that makes sound, or videos with sound"
        )
    return samples.audio


def decibels(mean_square: Tensor) -> Tensor:
    """Levels in dBFS of mean squares: 10 log10 of them, at least -120. A full-scale square wave has
    0, a full-scale sine -3.01."""
    return (10 * mean_square.clamp(min=1e-30).log10()).clamp(min=QUIETEST)


def windows(wave: Float[Tensor, "n t"], size: int, hop: int) -> Float[Tensor, "n w s"]:
    """Windows of `size` numbers every `hop`; one, padded with zeros, of a shorter sound."""
    short = max(0, size - wave.shape[1])
    return torch.nn.functional.pad(wave, (0, short)).unfold(1, size, hop)


def resampled(wave: Float[Tensor, "n t"], rate: int, wanted: int) -> Float[Tensor, "n m"]:
    """The sound at another rate: its Fourier series up to the lower of both limits."""
    if rate == wanted:
        return wave
    before = wave.shape[1]
    after = max(1, round(before * wanted / rate))
    lines = torch.fft.rfft(wave.double())
    spectrum = torch.zeros(len(wave), after // 2 + 1, dtype=lines.dtype, device=wave.device)
    common = min(spectrum.shape[1], lines.shape[1])
    spectrum[:, :common] = lines[:, :common]
    return (torch.fft.irfft(spectrum, n=after) * (after / before)).to(wave)


def tones(levels: tuple[float, ...], rate: int = 16_000, seconds: float = 0.5) -> Audio:
    """A sine of 440 Hz at each of these amplitudes."""
    time = torch.arange(round(rate * seconds)) / rate
    sine = torch.sin(2 * torch.pi * 440 * time)
    return Audio(torch.stack([level * sine for level in levels])[:, None], rate)
