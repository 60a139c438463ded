"""Rewards without weights, against other computations of the same numbers."""

import colorsys
import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rewards import Samples, load
from rewards.catalogue.colour import HUES
from rewards.catalogue.exact_answer import FIND, exact_number, last_match
from tests.support.golden_tools import arrays

NAN = float("nan")


def of(media, meta=()) -> Samples:
    n = len(media)
    return Samples(media, ["p"] * n, torch.zeros(n, dtype=torch.long), meta)


def flat(*colours: tuple[float, float, float]) -> Samples:
    return of(torch.tensor(colours)[:, :, None, None].expand(-1, 3, 4, 4))


def test_jpeg_sizes_are_the_published_ones():
    z = arrays("reward_text_helpers")
    samples = of(torch.as_tensor(z["jpeg_images"]))
    large = load("jpeg")(samples)
    np.testing.assert_allclose(large, z["jpeg_kb"], atol=0.008)  # bytes depend on libjpeg's build
    small = load("jpeg", kind="small", unit=500)(samples)
    np.testing.assert_allclose(small, z["jpeg_compressibility"], atol=0.008 / 500)


def test_jpeg_sizes_are_those_of_pillow():
    image = torch.rand(3, 20, 30, generator=torch.Generator().manual_seed(1))
    pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    assert load("jpeg")(of(image[None])).tolist() == [len(file.getvalue()) / 1000]


@pytest.mark.slow
@given(st.lists(st.tuples(*[st.integers(0, 64).map(lambda v: v / 64)] * 3), min_size=1, max_size=4))
def test_saturation_and_hue_are_those_of_colorsys(colours):
    saturation = [colorsys.rgb_to_hsv(*c)[1] for c in colours]
    got = load("colour")(flat(*colours))
    np.testing.assert_allclose(got, saturation, atol=1e-4)
    for hue, wanted in (("green", 120.0), (300.0, 300.0), ("red", 0.0)):
        got = load("colour", kind="hue", hue=hue, width=80.0)(flat(*colours))
        for score, colour in zip(got.tolist(), colours, strict=True):
            h, s, v = colorsys.rgb_to_hsv(*colour)
            apart = abs((h * 360 - wanted + 180) % 360 - 180)
            if min(abs(s - 0.25), abs(v - 0.2), abs(apart - 40) / 360) > 1e-3:
                assert score == float(s >= 0.25 and v >= 0.2 and apart <= 40)


def test_colourfulness_and_contrast_are_their_formulas():
    rng = np.random.default_rng(0)
    image = rng.random((2, 3, 6, 5), dtype=np.float32)
    for i in range(2):
        r, g, b = (image[i, c].astype(np.float64) * 255 for c in range(3))
        rg, yb = r - g, 0.5 * (r + g) - b  # as published, on 0..255
        published = np.sqrt(rg.var() + yb.var()) + 0.3 * np.sqrt(rg.mean() ** 2 + yb.mean() ** 2)
        got = load("colour", kind="colourfulness")(of(torch.from_numpy(image)))
        assert float(got[i]) * 255 == pytest.approx(published, rel=1e-5)
        luma = (0.299 * r + 0.587 * g + 0.114 * b) / 255
        got = load("colour", kind="contrast", more=False)(of(torch.from_numpy(image)))
        assert float(got[i]) == pytest.approx(-luma.std(), rel=1e-5)


def test_a_video_is_scored_by_all_its_pixels():
    frames = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0.5, 0.5, 0.5]])[:, :, None, None]
    samples = of(frames.expand(3, 3, 4, 4)[None])
    assert float(load("colour")(samples)) == pytest.approx(2 / 3)
    assert float(load("colour", kind="hue")(samples)) == pytest.approx(1 / 3)
    assert set(HUES) >= {"red", "green", "blue"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,000", 1000), ("-0.50", -0.5), ("$3", 3), ("3/4", 0.75), ("50%", 0.5), ("7.", 7)],
)
def test_numbers_are_read(text, value):
    assert exact_number(text) == value


def test_what_is_no_number_is_none():
    assert [exact_number(t) for t in ("", "x", "1/0", "--1", "1/2/3", "inf", "nan", "1 2")] == [
        None
    ] * 8


@pytest.mark.parametrize(
    ("find", "text", "answer"),
    [
        ("all", "  7 \n", "7"),
        ("last_number", "3 + 4 = 7, so 7.5", "7.5"),
        ("last_number", "about 1,234,567 of -3", "-3"),
        ("last_number", "none", None),
        ("last_line", "first\n  second \n\n", "second"),
        ("boxed", r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (
            "boxed",
            r"\boxed{\frac{\sqrt{2}}{\sqrt{\frac{3}{4}}}}",
            r"\frac{\sqrt{2}}{\sqrt{\frac{3}{4}}}",
        ),
        ("boxed", r"\boxed{1} then \boxed{", "1"),
        ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("last_number", "it is 5-3", "3"),
        ("tag", "<answer>5 <answer> 7 </answer>", "7"),
        ("tag", "<answer>5</answer> no: <answer>7</answer> <answer>", "7"),
        ("tag", "<answer>\n 7\n</answer>", "7"),
        ("hash", "so\n#### 1,234\nend", "1,234"),
        ("hash", "#### 12", "12"),
    ],
)
def test_the_last_answer_is_found(find, text, answer):
    import re

    assert last_match(text, re.compile(FIND[find])) == answer


def test_answers_are_compared_by_kind():
    texts = ["7", "7.0", "seven", "Seven ", "", "14/2", "8"]
    meta = [{"answer": a} for a in (7, "7", "Seven", "seven", "7", 7, None)]
    for kind, wanted in (
        ("number", [1, 1, 1, 1, 0, 1, NAN]),
        ("text", [1, 0, 1, 1, 0, 0, NAN]),
        ("exact", [1, 0, 0, 0, 0, 0, NAN]),
    ):
        got = load("exact_answer", kind=kind)(of(texts, meta))
        np.testing.assert_array_equal(got, wanted)
    own = load("exact_answer", find=r"is (\d+)", column="sum")
    assert own(of(["it is 7", "7"], [{"sum": 7}] * 2)).tolist() == [1, 0]
    with pytest.raises(ValueError, match="add a column 'sum' to the prompt file"):
        own(of(["it is 7"]))


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            "think_answer",
            ["<think>a\nb</think>\n<answer>7</answer>\n"],
            [
                "<answer>7</answer><think></think>",
                "x <think></think><answer></answer>",
                "<think></think><answer></answer><answer></answer>",
            ],
        ),
        (
            "boxed",
            [r"a \boxed{\frac{1}{2}} b", r"\boxed{\frac{\sqrt{\frac{1}{2}}}{3}}"],
            [r"\boxed{1} \boxed{2}", r"\boxed{1", "1", r"\boxed{}"],
        ),
        ("number", ["7", " -1,234.5\n"], ["7 apples", "", ".", "1.2.3"]),
        ("json", ['{"a": [1, 2]}', "3"], ["{a: 1}", "", "[" * 100_000]),
    ],
)
def test_formats_take_the_whole_text(kind, good, bad):
    reward = load("format", kind=kind)
    assert reward(of(good)).tolist() == [1] * len(good)
    assert reward(of(bad)).tolist() == [0] * len(bad)


def test_a_pattern_is_a_format():
    reward = load("format", kind="pattern", pattern=r"\d+ \+ .*")
    assert reward(of(["3 + 4\n= 7", "a 3 + 4", "3 + 4"])).tolist() == [1, 0, 1]


@given(st.integers(0, 60))
def test_overlong_texts_cost_what_dapo_says(n):
    most, soft = 40, 16
    if n <= most - soft:
        wanted = 0.0
    elif n <= most:
        wanted = ((most - soft) - n) / soft  # arXiv:2503.14476, equation 13
    else:
        wanted = -1.0
    text = "w " * n
    assert float(load("length", most=most, soft=soft)(of([text]))) == pytest.approx(wanted)
    letters = load("length", most=most, soft=soft, unit="characters")
    assert float(letters(of(["w" * n]))) == pytest.approx(wanted)


def test_a_length_without_slope_and_a_target():
    hard = load("length", most=2)
    assert hard(of(["a b", "a b c", ""])).tolist() == [0, -1, 0]
    near = load("length", most=4, kind="near")
    assert near(of(["", "a", "a b c d", "a " * 6, "a " * 9])).tolist() == [0, 0.25, 1, 0.5, 0]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("jpeg", {"kind": "tiny"}, "kind: expected 'large' or 'small', not 'tiny'"),
        ("jpeg", {"unit": 0}, "unit: expected a number greater than 0"),
        ("jpeg", {"unit": "two"}, "unit: expected a valid number, .* not 'two'"),
        ("colour", {"kind": "hue", "hue": "mauve"}, "one of red"),
        ("colour", {"kind": "tint"}, "kind: expected 'saturation'"),
        ("colour", {"width": 0}, "width: expected a number greater than 0"),
        ("exact_answer", {"find": "last"}, "or a regular expression with a group"),
        ("exact_answer", {"find": "("}, "is not a valid pattern"),
        ("exact_answer", {"kind": "near"}, "kind: expected 'number'"),
        ("format", {"kind": "xml"}, "kind: expected 'think_answer'"),
        ("format", {"kind": "pattern"}, "`pattern` and `kind: pattern` belong together"),
        ("format", {"pattern": "a"}, "`pattern` and `kind: pattern` belong together"),
        ("format", {"kind": "pattern", "pattern": "("}, "is not a valid pattern"),
        ("length", {"most": 0}, "most: expected a number greater than or equal to 1"),
        ("length", {"most": 4, "soft": 5}, "soft must be at most `most`, 4"),
        ("length", {"most": 4, "unit": "tokens"}, "`tokenizer` and `unit: tokens` belong together"),
        ("length", {"most": 4, "unit": "bytes"}, "unit: expected"),
    ],
)
def test_settings_that_cannot_be_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        load(name, **settings)
