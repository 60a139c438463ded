"""Rewards that listen, and sound as files: known levels, plain loops, the model's own forward."""

import io
import math
import wave
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowrl.media.sounds import small_sound, spectrogram, wav_bytes
from rewards import Samples, load
from rewards.audio import Audio
from rewards.checks.self_test import self_test
from rewards.perception.media import WrongMedia
from rewards.perception.sound import resampled
from tests.support.tiny_clap import saved_clap

RATE = 16_000
TIME = torch.arange(RATE) / RATE


def sounding(*waves: torch.Tensor, video: torch.Tensor | None = None, rate: int = RATE) -> Samples:
    n = len(waves)
    media = torch.zeros(n, 8, 3, 4, 4) if video is None else video.expand(n, *video.shape)
    audio = Audio(torch.stack(waves)[:, None], rate)
    return Samples(media, ["a red cube"] * n, torch.zeros(n).long(), (), audio)


def sine(hertz: float, size: float = 1.0) -> torch.Tensor:
    return size * torch.sin(2 * torch.pi * hertz * TIME)


@pytest.mark.parametrize("name", ["loudness", "silence", "synchrony"])
def test_a_reward_that_listens_passes_its_self_test(name: str):
    assert "one by one the same" in self_test(name, load(name))


def test_samples_without_sound_are_refused_with_the_reason():
    mute = Samples(torch.zeros(1, 8, 3, 4, 4), ["a"], torch.zeros(1).long())
    for name in ("loudness", "silence", "synchrony"):
        with pytest.raises(WrongMedia, match="videos without"):
            load(name)(mute)


def test_levels_are_those_of_a_full_scale_sine_a_square_wave_and_nothing():
    square = sine(440).sign()
    square[square == 0] = 1
    found = load("loudness")(sounding(sine(440), square, sine(440, 0.1), 0 * TIME))
    wanted = [-10 * math.log10(2), 0.0, -20 - 10 * math.log10(2), -120.0]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), atol=1e-5, rtol=0)
    near = load("loudness", target=-23)(sounding(sine(440), sine(440, 0.1)))
    assert near.tolist() == pytest.approx([-(23 - 3.0103), -0.0103], abs=1e-3)


def test_silence_is_a_share_of_windows():
    half = sine(440) * (TIME < 0.5)
    found = load("silence")(sounding(sine(440), half, 0 * TIME, sine(440, 1e-4)))
    assert found.tolist() == pytest.approx([1.0, 0.5, 0.0, 0.0], abs=0.02)
    assert load("silence", below=-90)(sounding(sine(440, 1e-4))).item() == 1.0


def plain_synchrony(video: np.ndarray, sound: np.ndarray, rate: int) -> float:
    """The definition, number by number, at no shift."""
    size, hop, frames = round(0.032 * rate), round(0.008 * rate), len(video)
    change = [float(np.abs(video[k] - video[k - 1]).mean()) for k in range(1, frames)]
    window = [0.5 - 0.5 * math.cos(2 * math.pi * i / size) for i in range(size)]
    spectra = [
        np.abs(np.fft.rfft(sound[at : at + size] * window))
        for at in range(0, len(sound) - size + 1, hop)
    ]
    near: dict[int, list[float]] = {}
    for t in range(1, len(spectra)):
        flux = sum(max(0.0, float(b - a)) for a, b in zip(spectra[t - 1], spectra[t], strict=True))
        near.setdefault(round((t * hop + size / 2) / len(sound) * frames), []).append(flux)
    onset = [sum(near.get(k, [])) / max(1, len(near.get(k, []))) for k in range(1, frames)]
    return float(np.corrcoef(change, onset)[0, 1])


def test_synchrony_is_the_correlation_of_onsets_and_changes():
    from rewards.catalogue.synchrony import Synchrony

    draws = np.random.default_rng(0)
    video, sound = draws.random((10, 3, 4, 4)), draws.standard_normal(4000) * 0.2
    sound[1500:] *= 0.2
    given = sounding(torch.tensor(sound), video=torch.tensor(video), rate=4000)
    assert Synchrony(shift=0)(given).item() == pytest.approx(
        plain_synchrony(video, sound, 4000), abs=1e-9
    )
    assert load("synchrony")(given).item() >= Synchrony(shift=0)(given).item()


def test_synchrony_of_silence_and_of_a_still_video_is_0():
    moving = torch.rand(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    still = moving[:1].expand(8, 3, 4, 4)
    assert load("synchrony")(sounding(0 * TIME, video=moving)).tolist() == [0.0]
    assert load("synchrony")(sounding(sine(440), video=still)).tolist() == [0.0]
    with pytest.raises(ValueError, match="at least 4 frames"):
        load("synchrony")(sounding(sine(440), video=moving[:3]))


def test_another_rate_keeps_a_tone():
    wave_ = torch.sin(2 * torch.pi * 440 * torch.arange(RATE).double() / RATE)[None]
    for rate in (8000, 24_000, 48_000):
        time = torch.arange(rate).double() / rate
        wanted = torch.sin(2 * torch.pi * 440 * time)
        torch.testing.assert_close(resampled(wave_, RATE, rate)[0], wanted, atol=1e-9, rtol=0)


@pytest.fixture(scope="module")
def clap_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_clap(tmp_path_factory.mktemp("clap"))


def test_clap_is_the_models_own_forward(clap_folder: str):
    """logits_per_audio of `ClapModel`, over its scale; also in other batches."""
    from transformers import AutoFeatureExtractor, AutoTokenizer, ClapModel

    short = sounding(sine(300)[: RATE // 2], sine(2000)[: RATE // 2], sine(70)[: RATE // 2])
    short = replace(short, prompts=["a red cube", "two blue cat", "a dog"])
    found = load("clap", model=clap_folder, device="cpu")(short)
    one = load("clap", model=clap_folder, device="cpu", batch=1)(short)
    torch.testing.assert_close(found, one, atol=1e-6, rtol=0)
    model = ClapModel.from_pretrained(clap_folder).eval()
    assert short.audio is not None
    waves = resampled(short.audio.mono, RATE, 8000)
    given = AutoFeatureExtractor.from_pretrained(clap_folder)(
        list(waves.numpy()), sampling_rate=8000, return_tensors="pt"
    )
    tokens = AutoTokenizer.from_pretrained(clap_folder)(
        list(short.prompts), padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        out = model(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"],
            input_features=given["input_features"], is_longer=torch.as_tensor(given["is_longer"]),
        )  # fmt: skip
    wanted = out.logits_per_audio.diagonal() / model.logit_scale_a.exp()
    torch.testing.assert_close(found.float(), wanted, atol=1e-6, rtol=0)
    assert found.std() > 1e-4


def test_a_wav_file_holds_the_waveform():
    stereo = torch.stack([sine(440, 0.5), 2 * sine(100)])
    with wave.open(io.BytesIO(wav_bytes(stereo, RATE))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, RATE, RATE)
        raw = np.frombuffer(file.readframes(RATE), "<i2").reshape(-1, 2)
    wanted = (stereo.clamp(-1, 1) * 32767).round().T.numpy()
    assert np.abs(raw - wanted).max() <= 1


def test_a_spectrogram_shows_a_tone_at_its_frequency():
    """Low frequencies are below, and silence is black."""
    pixels = np.asarray(spectrogram((sine(2000) * (TIME < 0.5))[None]))
    assert pixels.shape == (64, 224)
    row = int(pixels[:, 40].argmax())
    assert abs((63.5 - row) / 64 - 2000 / (RATE / 2)) < 0.03
    assert pixels[:, -20:].max() == 0 and pixels[row, 40] > 230
    copy = small_sound(sine(440).repeat(2, 12), RATE)
    assert copy.sound.startswith("data:audio/wav;base64,") and len(copy.sound) < 300_000
    assert copy.spectrum.startswith("data:image/png;base64,")


def test_samples_take_their_sound_along():
    samples = sounding(sine(1), sine(2), sine(3))
    part = samples.take([2, 0])
    assert part.audio is not None and samples.audio is not None
    assert torch.equal(part.audio.waveform, samples.audio.waveform[[2, 0]])
    with pytest.raises(ValueError, match="2 waveforms"):
        Samples(samples.media, samples.prompts, samples.group, (), part.audio)
