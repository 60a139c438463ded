"""Fonts: prompts in any script that some font on the machine has."""

import logging
import unicodedata

import pytest
from PIL import Image, ImageDraw, ImageFont

from flowrl.media import fonts, pictures

SCRIPTS = {"Latin": "Füße", "Greek": "Ωμέγα", "Cyrillic": "Жизнь", "Arabic": "مرحبا"}
# these need a font of the system, such as fonts-wqy-microhei or fonts-noto-cjk
EASTERN = {"Chinese": "中文漢字", "Japanese": "ひらがなカタカナ", "Korean": "한국어"}
EASTERN_FONTS = ("notosanscjk", "notoserifcjk", "sourcehansans", "wqy-", "unifont")


def ink(text: str) -> list[int]:
    page = Image.new("L", (200, 30), 0)
    fonts.load_fonts(15).draw(ImageDraw.Draw(page), (2, 5), text, 255)
    return list(page.tobytes())


@pytest.mark.parametrize("script", [*SCRIPTS, *EASTERN])
def test_letters_are_not_boxes(script):
    text = {**SCRIPTS, **EASTERN}[script]
    names = [path.name.lower() for path in fonts.font_files()]
    wanted = EASTERN_FONTS if script in EASTERN else ("",)
    if not any(name.startswith(wanted) for name in names):
        pytest.skip(f"this machine has no font for {script}")
    drawn = fonts.load_fonts(15)
    assert all(any(fonts.has_letter(f, letter) for f in drawn.fonts) for letter in text)
    boxes = Image.new("L", (200, 30), 0)
    ImageDraw.Draw(boxes).text((2, 5), text, 255, ImageFont.load_default(15))
    assert ink(text) != list(boxes.tobytes())
    assert "".join(part for part, _ in drawn.runs(f"a {text} b")) == f"a {text} b"


def test_plain_text_looks_as_pillow_draws_it():
    page = Image.new("L", (200, 30), 0)
    ImageDraw.Draw(page).text((2, 5), "a red circle, 0.5", 255, ImageFont.load_default(15))
    assert ink("a red circle, 0.5") == list(page.tobytes())


class Kept(logging.Handler):
    """Keeps messages."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def test_a_script_without_a_font_is_named_once(monkeypatch):
    monkeypatch.setattr(fonts, "has_letter", lambda font, letter: letter.isascii())
    fonts._warn_once.cache_clear()
    logging.root.addHandler(kept := Kept())
    try:
        for _ in range(3):
            list(fonts.Fonts((ImageFont.load_default(11),)).runs("中文 한국 a"))
    finally:
        logging.root.removeHandler(kept)
    said = kept.messages
    assert len(said) == 2 and "Chinese" in said[0] and "Korean" in said[1]
    fonts._warn_once.cache_clear()


def test_lines_break_inside_chinese_and_at_spaces_elsewhere():
    lines = pictures._wrapped("中" * 20, 12)
    assert "".join(lines) == "中" * 20 and {len(line) for line in lines} == {6, 2}
    assert pictures._wrapped("a red circle above a square", 12) == [
        "a red circle",
        "above a",
        "square",
    ]
    for line in pictures._wrapped("中a文b" * 9, 12):
        assert sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line) <= 12
    assert pictures._wrapped("", 12) == []
