"""A small generator of sound: a flow of waveforms, and a reward that hears their pitch.

`flowrl train examples/own/tones.yaml`. A state is what `decode` turns into a waveform: the sine and
cosine amplitudes of four harmonics, [4 2]. So 0.1 s of sound at 8 kHz has 8 numbers to learn.
"""

import math

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from rewards.types import Samples

RATE, LENGTH = 8000, 800  # samples per second, and of a sound
PITCH, HARMONICS = 200.0, 4  # Hz of the first harmonic, and their number


def waves() -> Tensor:
    """Sine and cosine of each harmonic [4 2 t]."""
    at = 2 * math.pi * PITCH * torch.arange(1, HARMONICS + 1)[:, None] * torch.arange(LENGTH) / RATE
    return torch.stack([at.sin(), at.cos()], 1)


class Tones(nn.Module):
    """Sounds whose amplitudes are N(0, 0.25^2) before training, whatever the prompt.

    The exact velocity of that Gaussian, plus a network that begins at 0 and is trained.
    """

    state = (HARMONICS, 2)
    rate = RATE  # samples are sound, which rewards, pages and files get at this rate
    spread = 0.25

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(2 * HARMONICS + 3, width), nn.SiLU(), nn.Linear(width, 2 * HARMONICS)
        )
        nn.init.zeros_(self.network[-1].weight)
        nn.init.zeros_(self.network[-1].bias)
        self.register_buffer("waves", waves(), persistent=False)

    def encode(self, prompts, rows) -> Tensor:
        """[n 2]: whether a low and whether a high sound is asked for."""
        return torch.tensor([["low" in text, "high" in text] for text in prompts]).float()

    def forward(self, x: Tensor, sigma: Tensor, encoded: Tensor) -> Tensor:
        s = sigma.to(x)[:, None]
        flat = x.flatten(1)
        variance = ((1 - s) * self.spread) ** 2 + s**2
        exact = (s - (1 - s) * self.spread**2) / variance * flat
        return (exact + self.network(torch.cat([flat, s, encoded.to(x)], 1))).view_as(x)

    def decode(self, x0: Tensor, encoded: Tensor) -> Tensor:
        """Waveforms [n t]."""
        return torch.einsum("nkc,kct->nt", x0, self.waves.to(x0)) / HARMONICS

    def image(self, sample: Tensor) -> Image.Image:
        """The first 20 ms as a line."""
        image = Image.new("RGB", (160, 96), "white")
        part = sample[0, : RATE // 50]  # of [channels t]
        points = [(i, 48 - 90 * float(y)) for i, y in enumerate(part)]
        ImageDraw.Draw(image).line(points, fill="black")
        return image


class Timbre:
    """The share of a sound's energy in its two low harmonics, or in the high ones, as the prompt
    asks; with a gradient."""

    def __call__(self, samples: Samples) -> Tensor:
        return self.differentiable(samples.media, samples)

    def differentiable(self, media: Tensor, samples: Samples) -> Tensor:
        power = torch.fft.rfft(media.double()).abs().square()
        bins = [round(PITCH * k * LENGTH / RATE) for k in range(1, HARMONICS + 1)]
        energy = power[:, 0, bins]
        low = energy[:, : HARMONICS // 2].sum(1) / (energy.sum(1) + 1e-6)
        asked = torch.tensor(["high" not in text for text in samples.prompts]).to(low)
        return (asked * low + (1 - asked) * (1 - low)).to(media)
