"""Sounds that a model is given: files in a prompt's columns and in `model.call`, at its rate."""

import inspect
import math
import wave
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from flowrl.errors import UserError
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.inputs.columns import GivenForm, SoundForm, waveform_in
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.saving import save_pipeline
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from flowrl.run.watch.start_check import check_start
from flowrl.settings.read import run_from
from rewards.audio import Audio
from rewards.perception.sound_files import open_sound_bytes, open_sound_file
from tests.support import runs
from tests.support.driving import PROMPTS
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.pipelines import tiny
from tests.support.zoo.sounds import INPUTS, SOUND_SPECIALS

torch.set_num_threads(1)
INPAINT = "StableAudio3InpaintPipeline"
SECONDS = {"mask_start_seconds": 0.03, "mask_end_seconds": 0.08}


def written(path: Path, hertz: float, rate: int = 1600, channels: int = 1) -> Path:
    """A WAV file of a tenth of a second of a sine."""
    numbers = [round(16_000 * math.sin(2 * math.pi * hertz * k / rate)) for k in range(rate // 10)]
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes(b"".join(n.to_bytes(2, "little", signed=True) * channels for n in numbers))
    return path


def given(**call: Any) -> PipelinePolicy:
    made = tiny(getattr(diffusers, INPAINT), SPECIALS | SOUND_SPECIALS, SIZES)
    return PipelinePolicy(made.pipe, call={**made.call, **SECONDS, **call})


def test_a_column_of_files_is_the_same_as_tensors(tmp_path: Path) -> None:
    """Each row has its own sound; the whole sample is the pipeline's own with that waveform."""
    files = [written(tmp_path / f"{hertz}.wav", hertz) for hertz in (100, 200)]
    made = given()
    assert list(made.loop.traits.required) == ["audio"]
    meta = [{"audio": str(file)} for file in files]
    velocities = []
    x, row = torch.randn(1, *made.shape(3), generator=torch.Generator().manual_seed(0)), [0]
    for cell in meta:
        form = SoundForm(800, 2)
        known = waveform_in(open_sound_file(cell["audio"]), form)
        assert known.shape == (1, 2, 80) and torch.equal(known[0, 0], known[0, 1])
        pair = [given(audio=known).encode(PROMPTS[:1]), made.encode(PROMPTS[:1], [cell])]
        level = torch.tensor([made.schedule(3).sigmas[1]])
        with torch.no_grad():
            of_call, of_column = (
                policy.bind(texts, steps=3, guidance=None)(x, level, torch.tensor(row))
                for policy, texts in zip((given(audio=known), made), pair, strict=True)
            )
        assert torch.equal(of_call, of_column)
        velocities.append(of_column)
    assert not torch.equal(*velocities)
    proof = made.prove(PROMPTS, steps=3, guidance=None, meta=meta[:1] * 2)
    rows = made.loop.extras(meta[:1] * 2, PROMPTS)
    whole = prove_whole(made, PROMPTS, rows, proof)
    assert whole.failure() is None and whole.own is not None and whole.own.media == 0


def test_a_given_sound_has_one_posterior(tmp_path: Path) -> None:
    """ACE-Step draws another sample of it in every call, without a generator: what it repaints
    would be another sound in each. Rows have sounds of their own."""
    more, _ = INPUTS["AceStepPipeline"]["prompt, lyrics, src_audio to repaint"]
    made = tiny(diffusers.AceStepPipeline, SPECIALS | SOUND_SPECIALS, SIZES)
    call = {**made.call, **more}
    del call["src_audio"]
    policy = PipelinePolicy(made.pipe, call=call)
    files = [written(tmp_path / f"{hertz}.wav", hertz, channels=2) for hertz in (100, 200)]
    meta = [{"src_audio": str(file)} for file in files]
    proof = policy.prove(PROMPTS, steps=3, guidance=1.0, meta=meta[:1] * 2)
    whole = prove_whole(policy, PROMPTS, policy.loop.extras(meta[:1] * 2, PROMPTS), proof)
    assert whole.failure() is None and whole.own is not None and whole.own.media < 1e-5
    x = torch.randn(1, *policy.shape(3), generator=torch.Generator().manual_seed(0))
    velocities = []
    for row in (meta[0], meta[0], meta[1]):
        velocity = policy.bind(policy.encode(PROMPTS[:1], [row]), steps=3, guidance=1.0)
        with torch.no_grad():
            level = torch.tensor([policy.schedule(3).sigmas[1]])
            velocities.append(velocity(x, level, torch.tensor([0])))
    assert torch.equal(*velocities[:2]) and not torch.equal(*velocities[1:])


def test_a_reference_is_one_sound_of_channels_and_time(tmp_path: Path) -> None:
    """ACE-Step repeats it to 30 seconds, and takes no batch of them, which files were."""
    file, form = written(tmp_path / "tone.wav", 100), SoundForm(800, 2)
    wave = columns.with_sounds({"reference_audio": str(file)}, form)["reference_audio"]
    batch = columns.with_sounds({"src_audio": str(file)}, form)["src_audio"]
    assert wave.shape == (2, 80) and torch.equal(batch, wave[None])
    assert columns.placeholder_sounds(["reference_audio"], form)["reference_audio"].ndim == 2
    row = columns.extras([{"reference_audio": str(file)}], ["reference_audio"], GivenForm(form))[0]
    assert torch.equal(row["reference_audio"], wave)


@pytest.mark.slow
def test_rows_have_references_of_their_own(tmp_path: Path) -> None:
    """The whole sample is the pipeline's own with that waveform; another file is another timbre."""
    made = tiny(diffusers.AceStepPipeline, SPECIALS | SOUND_SPECIALS, SIZES)
    policy = PipelinePolicy(made.pipe, call=made.call)
    files = [written(tmp_path / f"{hertz}.wav", hertz, channels=2) for hertz in (100, 200)]
    meta = [{"reference_audio": str(file)} for file in files]
    proof = policy.prove(PROMPTS, steps=3, guidance=1.0, meta=meta)
    whole = prove_whole(policy, PROMPTS, policy.loop.extras(meta, PROMPTS), proof)
    assert whole.failure() is None and whole.own is not None and whole.own.media == 0
    x = torch.randn(1, *policy.shape(3), generator=torch.Generator().manual_seed(0))
    known = waveform_in(open_sound_file(str(files[0])), SoundForm(made.pipe.sample_rate, 2))[0]
    of_call = PipelinePolicy(made.pipe, call={**made.call, "reference_audio": known})
    velocities = []
    for driven, rows in ((policy, meta[:1]), (of_call, []), (policy, meta[1:])):
        velocity = driven.bind(driven.encode(PROMPTS[:1], rows), steps=3, guidance=1.0)
        with torch.no_grad():
            level = torch.tensor([driven.schedule(3).sigmas[1]])
            velocities.append(velocity(x, level, torch.tensor([0])))
    assert torch.equal(*velocities[:2]) and not torch.equal(*velocities[1:])


SWITCHES = {
    "Kandinsky6TI2VAPipeline": {"sample_audio": False},
    "BriaFibo2Pipeline": {"render_text_images": False},
    "LTX2DFRPipeline": {"freeze_audio": True},
    "UniDiffuserPipeline": {"num_prompts_per_image": 2},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_with_the_name_of_media_stays_what_it_is(name: str) -> None:
    """An argument such as `sample_audio: false` was read as a sound that is missing."""
    call = SWITCHES[name]
    parameters = inspect.signature(getattr(diffusers, name).__call__).parameters
    switch = next(iter(call))
    assert switch not in columns.shaping(parameters) and not columns.shaping(call)
    assert columns.with_sounds(call, None) == call and not columns.shared_images(call)
    assert columns.extras([{"prompt": "a", **call}], parameters, GivenForm()) == ()


def test_a_call_names_a_file(tmp_path: Path) -> None:
    file = written(tmp_path / "tone.wav", 100)
    made = given(audio=str(file))
    assert made.loop.traits.call["audio"].shape == (1, 2, 80) and not made.loop.traits.required


def test_sounds_take_the_models_form() -> None:
    left = torch.stack([torch.ones(100), torch.zeros(100)])[None]
    assert waveform_in(Audio(left, 800), SoundForm(400, 1)).shape == (1, 1, 50)
    assert float(waveform_in(Audio(left, 800), SoundForm(800, 1)).mean()) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="a sound of 2 channels, where the model takes 6"):
        waveform_in(Audio(left, 800), SoundForm(800, 6))
    noise = columns.placeholder_sounds(["audio"], SoundForm(800, 2))["audio"]
    assert noise.shape == (1, 2, 800)


BROKEN = {
    "missing": (None, "is no file: sounds are read from WAV files"),
    "no sound": (b"RIFF, or not", "no WAV file of whole numbers"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("where", ["column", "call"])
def test_a_sound_that_cannot_be_read_is_named_before_weights_load(
    case: str, where: str, tmp_path: Path
) -> None:
    content, message = BROKEN[case]
    file = tmp_path / "broken.wav"
    if content is not None:
        file.write_bytes(content)
    made = tiny(getattr(diffusers, INPAINT), SPECIALS | SOUND_SPECIALS, SIZES)
    save_pipeline(made.pipe, tmp_path / "pipeline")
    tree = runs.tree(tmp_path / "pipeline", tmp_path, {"name": "nft", "steps": 3, "group": 4})
    call = {**made.call, **SECONDS}
    if where == "call":
        call["audio"] = str(file)
    else:
        table = tmp_path / "prompts.jsonl"
        table.write_text(f'{{"prompt": "a tone", "audio": "{file}"}}\n')
        tree["prompts"] |= {"train": str(table)}
    tree["model"] |= {"call": call, "guidance": {"sample": 1.0, "train": 1.0}}
    tree["rewards"] = [{"name": "loudness", "target": -20.0}]
    tree["evaluate"] |= {"guidance": 1.0}
    place = "prompts.jsonl.*audio" if where == "column" else "model.call, audio"
    with pytest.raises(UserError, match=f"{place}.*{message}"):
        check_start(run_from(tree, "run"))


def test_bytes_are_read_as_files_are(tmp_path: Path) -> None:
    file = written(tmp_path / "tone.wav", 100)
    assert torch.equal(
        open_sound_bytes(file.read_bytes(), "bytes").waveform, open_sound_file(file).waveform
    )
    with pytest.raises(ValueError, match="bytes: no WAV file"):
        open_sound_bytes(b"", "bytes")
