"""The format in which samples travel: nothing is lost, nothing is run, what is wrong is told."""

import base64
import importlib.util
import io
import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

from flowrl.paths import PROJECT
from rewards import Samples
from rewards.serving import codec, wire
from tests.support.servers import pictures


def back(samples: Samples, **how: str) -> Samples:
    """Through JSON's types and the checks of the receiver."""
    return wire.decode_samples(wire.WireSamples.model_validate(wire.encode_samples(samples, **how)))


@given(st.integers(1, 4), st.integers(1, 9), st.sampled_from(["png", "webp"]), st.integers(0, 99))
@settings(max_examples=25)
def test_pictures_travel_without_loss(n, size, how, seed):
    sent = pictures(n, size=size, seed=seed)
    got = back(sent, pictures=how)
    assert torch.equal(got.media, sent.media) and got.media.dtype == torch.float32
    assert got.prompts == sent.prompts and torch.equal(got.group, sent.group)


def test_values_between_the_levels_are_rounded():
    media = torch.tensor([0.1, 0.5, 1.3, -2.0, torch.nan]).view(5, 1, 1, 1).expand(5, 3, 2, 2)
    got = back(Samples(media, ["x"] * 5, torch.arange(5))).media[:, 0, 0, 0]
    wanted = torch.tensor([26, 128, 255, 0, 0]) / 255
    assert torch.equal(got, wanted)


def test_mixed_sizes_videos_texts_and_metadata_travel():
    mixed = Samples(
        [pictures(1).media[0], pictures(1, size=7).media[0]], ["a", "b"], torch.arange(2)
    )
    for got, sent in zip(back(mixed).media, mixed.media, strict=True):
        assert torch.equal(got, sent)
    clips = torch.stack([pictures(3, seed=s).media for s in range(2)])
    assert torch.equal(back(Samples(clips, ["a", "b"], torch.arange(2))).media, clips)
    texts = Samples(['say "{}"\n', "\U0001f600"], ["a", "b"], torch.tensor([7, 7]))
    meta = [{"n": 1, "nested": {"list": [1.5, None]}}, {"missing": float("nan")}]
    got = back(Samples(texts.media, texts.prompts, texts.group, meta))
    assert list(got.media) == texts.media and got.group.tolist() == [7, 7]
    assert list(got.meta) == [meta[0], {"missing": None}]
    odd = Samples(["x"], ["p"], torch.zeros(1, dtype=torch.long), [{"t": torch.zeros(1)}])
    with pytest.raises(ValueError, match="metadata of prompts cannot be sent"):
        wire.encode_samples(odd)


@pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="needs av")
def test_videos_may_travel_as_mp4():
    ramp = torch.linspace(0.2, 0.8, 6).view(1, 6, 1, 1, 1).expand(1, 6, 3, 33, 47)
    got = back(Samples(ramp, ["x"], torch.zeros(1, dtype=torch.long)), videos="mp4").media
    assert got.shape == ramp.shape
    torch.testing.assert_close(got, ramp, atol=0.02, rtol=0)


def gif() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 5), "red").save(file, "GIF")
    return file.getvalue()


GIF = gif()  # a good one, but nothing that we send


class Bomb:
    def __reduce__(self) -> tuple:
        return (Path("/tmp/flowrl-was-here").touch, ())


@pytest.mark.parametrize(
    ("media", "message"),
    [
        (base64.b64encode(pickle.dumps(Bomb())).decode(), r"media\[1\]: neither PNG nor WebP"),
        ("%%%", r"media\[1\]: not base64"),
        (base64.b64encode(GIF).decode(), "neither PNG nor WebP"),
        (codec.encode_image(torch.arange(192.0).view(3, 8, 8) / 192)[:80], "damaged image"),
        ({"frames": ["x"]}, "entry of kind image must be a string"),
    ],
    ids=["pickle", "no base64", "GIF", "damaged", "no picture"],
)
def test_what_is_no_picture_is_refused_by_place_and_never_run(media, message):
    batch = wire.encode_samples(pictures(2))
    batch["media"][1] = media
    with pytest.raises(ValueError, match=message):
        wire.decode_samples(wire.WireSamples.model_validate(batch))
    assert not Path("/tmp/flowrl-was-here").exists()


def test_too_many_pixels_are_refused_before_they_are_read(monkeypatch):
    monkeypatch.setattr(codec, "MOST_PIXELS", 60)
    assert back(pictures(1, size=7)).media.shape == (1, 3, 7, 8)
    with pytest.raises(ValueError, match="9 x 8 pixels is too large"):
        back(pictures(1, size=8))


@pytest.mark.parametrize(
    "body", [None, [], {}, {"values": [1]}, {"values": [1, "2"]}, {"values": [1, float("inf")]},
             {"values": [True, 1]}, {"values": [1, 2], "applies": [True]},
             {"values": [1, 2], "applies": [True, 1]},
             {"values": [1, 2], "applies": [True, False]}],
)  # fmt: skip
def test_an_answer_of_another_form_is_none(body):
    assert wire.read_scores(body, 2) is None


def test_a_null_is_a_failure_unless_the_reward_does_not_apply():
    failed = wire.read_scores({"values": [1, None]}, 2)
    assert failed is not None and failed.values[0] == 1 and failed.values[1].isnan()
    assert failed.applies.tolist() == [True, True]
    abstains = wire.read_scores({"values": [1, None], "applies": [True, False]}, 2)
    assert abstains is not None and abstains.applies.tolist() == [True, False]
    for scores in (failed, abstains):
        answer = wire.ScoreAnswer.of(scores).model_dump(exclude_none=True)
        again = wire.read_scores(answer, 2)
        assert again is not None and torch.equal(again.applies, scores.applies)
    assert "applies" not in wire.ScoreAnswer.of(failed).model_dump(exclude_none=True)


def test_the_examples_of_the_page_are_of_the_format():
    """docs/remote_rewards.md shows a request and an answer; they are what the code takes."""
    page = (PROJECT / "docs" / "remote_rewards.md").read_text()
    request, answer = re.findall(r"```json\n(.*?)```", page, re.DOTALL)[:2]
    samples = wire.decode_samples(wire.WirePairs.model_validate_json(request))
    assert samples.media.shape == (2, 3, 1, 1) and samples.meta[0]
    assert wire.ScoreAnswer.model_validate_json(answer).values == [0.75, None]
