"""Sound files as rewards hear them, of one form or several."""

import io
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.evaluation.measure import Gallery, Item
from flowrl.evaluation.sources import Source
from flowrl.media.sounds import wav_bytes
from rewards import Samples, load, score_all
from rewards.audio import Audio
from rewards.perception.sound import tones
from rewards.perception.sound_files import is_wav, read_wav
from tests.support.reward_contract import images

RATE = 8000


def written(values: np.ndarray, width: int) -> io.BytesIO:
    """A WAV file of one channel with these whole numbers."""
    store = io.BytesIO()
    with wave.open(store, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(width)
        file.setframerate(RATE)
        shifted = values + (128 if width == 1 else 0)
        wide = shifted.astype("<i8").view(np.uint8).reshape(-1, 8)
        file.writeframes(wide[:, :width].tobytes())
    return io.BytesIO(store.getvalue())


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_numbers_of_each_width(width: int) -> None:
    full = 2 ** (8 * width - 1)
    values = np.array([0, full // 2, -full, -full // 4], dtype=np.int64)
    sound = read_wav(written(values, width))
    assert sound.rate == RATE and sound.waveform.shape == (1, 1, 4)
    torch.testing.assert_close(sound.waveform[0, 0], torch.tensor([0.0, 0.5, -1.0, -0.25]))


def test_what_is_written_is_read() -> None:
    stereo = torch.stack([torch.linspace(-1, 1, 50), torch.zeros(50)])
    data = wav_bytes(stereo, 22_050)
    sound = read_wav(io.BytesIO(data))
    assert is_wav(data) and not is_wav(b"RIFF....AVI ") and sound.rate == 22_050
    torch.testing.assert_close(sound.waveform[0], stereo, atol=1e-4, rtol=0)


@pytest.mark.parametrize("cut", [0, 8, 30, 44])
def test_a_damaged_file_is_a_sentence(cut: int) -> None:
    data = wav_bytes(torch.zeros(1, 40), RATE)[:cut]
    with pytest.raises(ValueError, match="WAV file"):
        read_wav(io.BytesIO(data))


@pytest.mark.parametrize("bits", [40, 64])
def test_wider_numbers_are_a_sentence(bits: int) -> None:
    size = bits // 8
    form = struct.pack("<HHIIHH", 1, 1, 8000, 8000 * size, size, bits)
    head = b"RIFF" + struct.pack("<I", 36 + 80) + b"WAVEfmt " + struct.pack("<I", 16) + form
    with pytest.raises(ValueError, match=f"of {bits} bits, over 32"):
        read_wav(io.BytesIO(head + b"data" + struct.pack("<I", 80) + bytes(80)))


def test_sounds_of_several_forms_are_scored_each(tmp_path: Path) -> None:
    levels = (0.5, 0.05, 0.5)
    sounds = [tones((x,), rate, 0.1) for x, rate in zip(levels, (8000, 8000, 16_000), strict=True)]
    samples = Samples(sounds, ["a tone"] * 3, torch.zeros(3, dtype=torch.long))
    assert samples.kind == "sound" and [rows for rows, _ in samples.by_sound] == [[0, 1], [2]]
    values = score_all({"loudness": load("loudness")}, samples).values[:, 0]
    assert values[0] == pytest.approx(float(values[2]), abs=0.1) and values[0] - values[1] > 19
    items = []
    for i, sound in enumerate(sounds):
        (tmp_path / f"{i}.wav").write_bytes(wav_bytes(sound.waveform[0], sound.rate))
        items.append(Item(Source(f"{i}.wav", tmp_path / f"{i}.wav"), "a tone", 0, {}))
    gallery = Gallery(items)
    shown = gallery.samples([0, 1, 2])
    assert shown.kind == "sound" and not gallery.broken
    again = score_all({"loudness": load("loudness")}, shown).values[:, 0]
    torch.testing.assert_close(again, values, atol=0.01, rtol=0)


def test_images_are_as_they_were() -> None:
    pictures = images(["a", "b"])
    ((rows, same),) = pictures.by_sound
    assert rows == [0, 1] and same is pictures
    alone = Samples.of_sound(Audio(torch.zeros(2, 1, 9), RATE), ["a", "b"], torch.zeros(2).long())
    assert alone.kind == "sound" and alone.take([1]).kind == "sound"
    plain = Samples(torch.zeros(2, 1, 9), ["a", "b"], torch.zeros(2).long())
    assert plain.kind == "tensor"
