"""Sound as files and images to look at: WAV files, spectrograms, and small copies for pages."""

import base64
import io
import wave
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn.functional import adaptive_max_pool1d

from flowrl.errors import UserError
from flowrl.media.pictures import PAPER

MOST_SECONDS, MOST_RATE = 6, 16_000  # of a page's copy
WINDOW, SPAN = 512, 80.0  # samples of a window; decibels from black to white
WIDTH, HEIGHT = 224, 64  # pixels of a spectrogram, and of a waveform
WAVE = (46, 110, 180)  # colour of a waveform


class SoundCopy(NamedTuple):
    """A small copy as data URLs: a player's WAV, and the image of its spectrogram."""

    sound: str
    spectrum: str


def save_wav(waveform: Float[Tensor, "c t"], rate: int, path: Path) -> None:
    """Write a WAV file of 16-bit samples. UserError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wav_bytes(waveform, rate))
    except OSError as error:
        raise UserError(f"{path}: cannot write the sound: {error}") from error


def wav_bytes(waveform: Float[Tensor, "c t"], rate: int) -> bytes:
    """The content of a WAV file; values beyond -1..1 are cut."""
    whole = (waveform.detach().cpu().double().clamp(-1, 1) * 32767).round().to(torch.int16)
    store = io.BytesIO()
    with wave.open(store, "wb") as file:
        file.setnchannels(len(whole))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(whole.T.contiguous().numpy().astype("<i2").tobytes())
    return store.getvalue()


def spectrogram(waveform: Float[Tensor, "c t"]) -> Image.Image:
    """Levels over time, left to right, and frequency, low to high: 80 dB from black to white, where
    white is a full-scale sine. A Hann window of 512 samples, a quarter of it from one to the next;
    a pixel is the loudest of its place."""
    mono = waveform.detach().cpu().float().mean(0)
    mono = torch.nn.functional.pad(mono, (0, max(0, WINDOW - len(mono))))
    window = torch.hann_window(WINDOW)
    lines = torch.stft(mono, WINDOW, WINDOW // 4, window=window, return_complex=True).abs()
    level = 20 * (lines * 2 / window.sum()).clamp(min=1e-10).log10()
    gray = ((level + SPAN) / SPAN).clamp(0, 1).flip(0)
    gray = torch.nn.functional.adaptive_max_pool2d(gray[None], (HEIGHT, WIDTH))[0]
    return Image.fromarray((gray * 255).round().to(torch.uint8).numpy())


def wave_image(waveform: Float[Tensor, "c t"], reach: float = 1.0) -> Image.Image:
    """A waveform over time, from -reach to reach: its lowest and highest numbers in each column of
    pixels, over all channels."""
    image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    pen, middle = ImageDraw.Draw(image), (HEIGHT - 1) / 2
    wave = waveform.detach().cpu().float().nan_to_num(0.0, reach, -reach)[None]
    high = adaptive_max_pool1d(wave, WIDTH)[0].amax(0).clamp(-reach, reach) / reach
    low = -adaptive_max_pool1d(-wave, WIDTH)[0].amax(0).clamp(-reach, reach) / reach
    for at, (top, bottom) in enumerate(zip(high.tolist(), low.tolist(), strict=True)):
        pen.line((at, middle - middle * top, at, middle - middle * bottom), fill=WAVE)
    return image


def small_sound(waveform: Float[Tensor, "c t"], rate: int) -> SoundCopy:
    """Copy a sound for a page: one channel, at most 6 seconds and 16 kHz, by averages of
    neighbours."""
    store = io.BytesIO()
    spectrogram(waveform).save(store, "PNG", optimize=True)
    mono, fewer = waveform.float().mean(0, keepdim=True), -(-rate // MOST_RATE)
    mono = mono[:, : MOST_SECONDS * rate]
    if fewer > 1 and mono.shape[1] >= fewer:
        mono = torch.nn.functional.avg_pool1d(mono[None], fewer)[0]
    sound = wav_bytes(mono, round(rate / fewer))
    code = [base64.b64encode(part).decode() for part in (sound, store.getvalue())]
    return SoundCopy(f"data:audio/wav;base64,{code[0]}", f"data:image/png;base64,{code[1]}")
