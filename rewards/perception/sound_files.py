"""Sound files for models and rewards: WAV files of whole numbers (PCM), of 8 to 32 bits."""

import io
import wave
from pathlib import Path

import numpy as np
import torch

from rewards.audio import Audio
from rewards.rights import Right, need

# changes where a file's numbers are read otherwise than before; in the record of a run
SOUND_READER = 1

MOST_WAV_NUMBERS = 2**27  # of a file: over 12 minutes of stereo at 48 kHz
WIDEST_NUMBER = 4  # bytes of a number
WAV_HEAD = 12  # bytes by which a WAV file is known


def is_wav(begin: bytes) -> bool:
    """Whether a file with these first bytes is a WAV file."""
    return begin[:4] == b"RIFF" and begin[8:WAV_HEAD] == b"WAVE"


def open_sound_file(path: str | Path) -> Audio:
    """The sound [1 channels time] of a WAV file. ValueError, one sentence with the path, for a file
    that is missing or that `read_wav` refuses."""
    need(Right.FILES, str(path), path=Path(path))
    if not Path(path).is_file():
        raise ValueError(f"{path} is no file: sounds are read from WAV files")
    try:
        return read_wav(Path(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def open_sound_bytes(data: bytes, name: str) -> Audio:
    """The same of a file's bytes, which messages name so."""
    try:
        return read_wav(io.BytesIO(data))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def read_wav(source: Path | io.BytesIO) -> Audio:
    """Read one sound [1 channels time] in -1..1. ValueError for what is no such file, for an empty
    one, for numbers of more than 32 bits, and for more than 2^27 of them."""
    try:
        with wave.open(str(source) if isinstance(source, Path) else source, "rb") as file:
            channels, width, rate, frames, *_ = file.getparams()
            if width > WIDEST_NUMBER:
                raise ValueError(f"a sound of {8 * width} bits, over {8 * WIDEST_NUMBER}")
            if channels * frames > MOST_WAV_NUMBERS:
                raise ValueError(f"a sound of {channels * frames} numbers, over {MOST_WAV_NUMBERS}")
            data = file.readframes(frames)
    except (wave.Error, EOFError) as error:
        raise ValueError(f"no WAV file of whole numbers (PCM): {error}") from error
    numbers = _numbers(data, width)
    if rate < 1 or not len(numbers) or len(numbers) % channels:
        raise ValueError("a WAV file without sound, or cut off")
    return Audio(torch.from_numpy(numbers).view(-1, channels).T.contiguous()[None], rate)


def _numbers(data: bytes, width: int) -> np.ndarray:
    """Numbers in -1..1 as float32; 8 bits have no sign, and 24 become 32 with zeros."""
    if width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data[: len(wide) * 3], np.uint8).reshape(-1, 3)
        data, width = wide.tobytes(), 4
    kind = {2: "<i2", 4: "<i4"}[width]
    whole = data[: len(data) // width * width]
    return np.frombuffer(whole, kind).astype(np.float32) / 2 ** (8 * width - 1)
