"""Texts that are compared, the OCR reward's formulas, and its engine on a handful of pictures."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from rewards import Samples, load
from rewards.catalogue.ocr import Ocr, score_frames, score_texts
from rewards.checks.self_test import self_test
from rewards.perception.media import to_tensor
from rewards.perception.strings import distance_within, edit_distance, normalise, quoted
from tests.support.golden_tools import arrays

engine = pytest.mark.skipif(
    importlib.util.find_spec("rapidocr") is None, reason="rapidocr is not installed"
)
short = st.text("ab ", max_size=6)


def test_texts_are_compared_without_case_and_blanks():
    assert normalise(" Hello\n\tWORLD\u00a0") == "helloworld" == normalise("\uff28\uff45llo world")
    assert quoted('a "B c" and “D”, "" and " " and "e') == ["B c", "D"]


@given(short, short, short)
def test_edit_distance_is_a_distance(a, b, c):
    assert edit_distance(a, b) == edit_distance(b, a)
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)
    assert abs(len(a) - len(b)) <= edit_distance(a, b) <= max(len(a), len(b))


@given(short, short)
def test_edit_distance_is_the_recursive_one(a, b):
    def slow(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        if a[0] == b[0]:
            return slow(a[1:], b[1:])
        return 1 + min(slow(a[1:], b), slow(a, b[1:]), slow(a[1:], b[1:]))

    assert edit_distance(a, b) == slow(a, b)
    parts = [b[i:j] for i in range(len(b) + 1) for j in range(i, len(b) + 1)]
    assert distance_within(a, b) == min(edit_distance(a, part) for part in parts)


# prompts and what was read of the golden arrays' pictures; None is an engine that failed
CASES = (
    ('A sign that says "Hello World"', ["Hello World"]),
    ('A sign that says "Hello World"', ["HELLO", "world!!"]),
    ('A sign that says "Hello World"', ["Helo Wrld"]),
    ('A sign that says "Hello World"', []),
    ('A sign that says "Hi"', ["completely different and long text"]),
    ('mug with "Stay Calm" and "ignored"', ["stay clam"]),
    ('poster "Grand Opening Sale 50%"', ["Grand Openin", "Sale 5O%"]),
    ('poster "abc"', ["xxabcxx"]),
)
FRAMES = (["Hello"], ["Hxllo World"], ["zzz"], ["Hello World"])


def test_the_published_formula_gives_the_published_scores():
    z = arrays("reward_text_helpers")
    got = [score_texts(lines, quoted(prompt), "published") for prompt, lines in CASES]
    np.testing.assert_allclose(got, z["ocr_reward"][: len(CASES)], rtol=1e-12)
    got = score_frames(FRAMES, ["Hello World"], "published")
    np.testing.assert_allclose(got, z["video_ocr_reward"][0], rtol=1e-12)


@pytest.mark.parametrize(
    ("read", "wanted", "graded", "strict"),
    [
        (["Hello", "World"], ["Hello World"], 1.0, 1.0),
        (["World", "Hello"], ["Hello", "World"], 1.0, 1.0),
        (["Hello"], ["Hello", "World"], 0.5 + 0.1, 0.0),  # World takes the o of Hello, or its l
        (["Grand Opening", "buy now"], ["Grand Opening"], 1.0, 0.0),
        (["GrandXpening"], ["Grand Opening"], 11 / 12, 0.0),
        ([], ["Hi"], 0.0, 0.0),
        (["zzz"], ["Hi"], 0.0, 0.0),
    ],
)
def test_graded_and_strict(read, wanted, graded, strict):
    assert score_texts(read, wanted) == pytest.approx(graded)
    assert score_texts(read, wanted, "strict") == strict


def test_a_wrong_letter_in_ten_costs_a_tenth():
    assert score_texts(["abcdefghij"], ["abcdXfghij"]) == pytest.approx(0.9)


def test_a_prompt_without_a_quotation_is_unscored_and_videos_are_read_frame_by_frame():
    asked = []

    def reader(image: torch.Tensor) -> list[str]:
        asked.append(float(image.mean()))
        return ["Hello"] if image.mean() > 0.5 else []

    still = Ocr(reader, "graded", every=4)
    media = torch.ones(2, 3, 4, 4)
    got = still(Samples(media, ['say "Hello"', "say nothing"], torch.arange(2)))
    assert got[0] == 1 and got[1].isnan() and len(asked) == 1
    asked.clear()
    frames = torch.linspace(0.1, 1.0, 10).view(1, 10, 1, 1, 1).expand(1, 10, 3, 2, 2)
    got = still(Samples(frames, ['say "Hello"'], torch.arange(1)))
    np.testing.assert_allclose(asked, [0.1, 0.5, 0.9], rtol=1e-6)
    assert got.tolist() == [pytest.approx(1 / 3)]


def page(text: str, size: int, angle: float = 0.0, noise: float = 0.0) -> torch.Tensor:
    image = Image.new("RGB", (40 + 12 * size, 40 + 2 * size), (240, 238, 230))
    ImageDraw.Draw(image).text((20, 20), text, (20, 30, 60), ImageFont.load_default(size))
    image = image.rotate(angle, Image.Resampling.BICUBIC, fillcolor=(240, 238, 230))
    pixels = to_tensor(image)
    return pixels + noise * torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@engine
def test_the_engine_reads_rendered_text():
    texts = [("Open Daily", 16, 0.0, 0.0), ("Route 66", 24, 5.0, 0.0), ("Coffee", 32, 0.0, 0.1)]
    media = [page(*text) for text in texts]
    prompts = [f'a sign that says "{text[0]}"' for text in texts]
    samples = Samples(media, prompts, torch.arange(3))
    assert load("ocr", kind="strict")(samples).tolist() == [1, 1, 1]
    wrong = Samples(media[:1], ['a sign that says "Open Dairy"'], torch.arange(1))
    assert float(load("ocr")(wrong)) == pytest.approx(8 / 9)
    assert "1 for the better" in self_test("ocr", load("ocr"))


def test_without_the_engine_the_way_out_is_told(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(ValueError, match=r"pip install 'flowrl\[ocr\]'"):
        load("ocr")
    for settings, message in (
        ({"kind": "exact"}, "kind: expected 'graded'"),
        ({"every": 0}, "every: expected a number greater than or equal to 1"),
        ({"side": 8}, "side: expected a number greater than or equal to 32"),
    ):
        with pytest.raises(ValueError, match=message):
            load("ocr", **settings)


def test_the_cases_are_those_of_the_golden_arrays():
    """Nine scores: the eight above, and the one of an engine that failed."""
    assert len(arrays("reward_text_helpers")["ocr_reward"]) == len(CASES) + 1
    assert json.dumps(FRAMES)
