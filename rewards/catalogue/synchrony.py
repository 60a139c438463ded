"""Synchrony of sound and video: the correlation of onsets with changes between frames, -1 to 1.

    onset_k = mean over windows of boundary k of sum over bins of max(0, |X_t| - |X_t-1|)

is the spectral flux, half-wave rectified (Bello et al., IEEE TSAP 13(5), 2005; Dixon, DAFx 2006),
of Hann windows of 32 ms, one every 8 ms. Sound and video begin and end together, so boundary k of f
frames is at k / f of the sound, and its windows are centred within half a frame of it. The score is
Pearson's correlation of onset_k and the mean absolute difference of frames k - 1 and k; 0 where one
of them is constant (silence, a still video). One frame early or late counts as the largest of both,
as viewers do not notice 40 ms.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.audio import Audio
from rewards.perception.media import expect
from rewards.perception.sound import WrongMedia, expect_sound, windows
from rewards.types import Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("video",)

LEAST = 4  # frames


@dataclass(frozen=True)
class Synchrony:
    shift: int = 1  # frames by which the sound may be early or late

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        audio = expect_sound(samples, "synchrony")
        expect(samples, "synchrony", "video")
        tracks = zip(samples.media, audio.mono.detach().double().cpu(), strict=True)
        return torch.stack([self.score(video, wave, audio.rate) for video, wave in tracks])

    def score(self, video: Float[Tensor, "f 3 h w"], wave: Tensor, rate: int) -> Tensor:
        """The score of one sample, from its sound [t]. ValueError for fewer than 4 frames."""
        if len(video) < LEAST:
            raise WrongMedia(f"synchrony needs at least {LEAST} frames, not {len(video)}")
        frames = video.detach().double().cpu()
        change = (frames[1:] - frames[:-1]).abs().flatten(1).mean(1)
        onset, count = onsets(wave, rate, len(frames)), len(change)
        correlations = []
        for by in range(-self.shift, self.shift + 1):
            low, high = max(0, by), min(count, count + by)
            if high - low >= LEAST - 1:
                correlations.append(correlation(change[low - by : high - by], onset[low:high]))
        return torch.stack(correlations).amax()

    def examples(self) -> Samples:
        """Flashes with clicks at them, and with clicks between them."""
        rate, frames = 16_000, 12
        video = torch.zeros(2, frames, 3, 8, 8)
        video[:, 3:4] = video[:, 8:9] = 1
        waveform = torch.zeros(2, 1, rate)
        noise = torch.randn(400, generator=torch.Generator().manual_seed(0)) * 0.3
        for row, places in enumerate(((3, 4, 8, 9), (1, 6, 11))):
            for place in places:
                at = round(place / frames * rate)
                waveform[row, 0, at : at + 400] = noise[: len(waveform[row, 0, at : at + 400])]
        return Samples(video, ["a video"] * 2, torch.zeros(2).long(), (), Audio(waveform, rate))


def onsets(wave: Float[Tensor, " t"], rate: int, frames: int) -> Float[Tensor, " f-1"]:
    """Spectral flux at the boundaries between frames."""
    size, hop = max(2, round(0.032 * rate)), max(1, round(0.008 * rate))
    cut = windows(wave[None], size, hop)[0] * torch.hann_window(size, dtype=wave.dtype)
    lines = torch.fft.rfft(cut).abs()
    flux = (lines[1:] - lines[:-1]).clamp(min=0).sum(1)
    # a window's flux is at its centre, as a share of the whole sound
    at = (torch.arange(1, len(lines)) * hop + size / 2) / len(wave) * frames
    boundary = at.round().long()
    sums, counts = torch.zeros(2, frames + 1, dtype=wave.dtype)
    inside = boundary.clamp(0, frames)
    sums = sums.index_add(0, inside, flux)
    counts = counts.index_add(0, inside, torch.ones_like(flux))
    return (sums / counts.clamp(min=1))[1:frames]


def correlation(a: Float[Tensor, " k"], b: Float[Tensor, " k"]) -> Float[Tensor, ""]:
    """Pearson's correlation; 0 if one of them is constant."""
    a, b = a - a.mean(), b - b.mean()
    size = (a.square().sum() * b.square().sum()).sqrt()
    return torch.where(size > 1e-12, (a * b).sum() / size.clamp(min=1e-12), 0.0)


def load() -> Reward:
    return Synchrony()
