"""Packages that rewards need beside flowrl's own, asked for before any weights load."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

_Given = Mapping[str, Any]


def needs_open_clip(_: _Given) -> None:
    """ValueError if open_clip is missing."""
    if importlib.util.find_spec("open_clip") is None:
        raise ValueError("this reward needs open_clip: pip install 'flowrl[rewards]'")


def needs_open_clip_if_named(settings: _Given) -> None:
    """The same, for a reward whose `library` may be another."""
    if settings.get("library") == "open_clip":
        needs_open_clip(settings)


def needs_ocr(_: _Given) -> None:
    """ValueError if the OCR engine is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("rapidocr", "onnxruntime")):
        raise ValueError(
            "the reward 'ocr' needs rapidocr and onnxruntime: pip install 'flowrl[ocr]'"
        )


def needs_math_verify(_: _Given) -> None:
    """ValueError if math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("math_answer needs math-verify: pip install 'flowrl[math]'")


# by the reward's name; rewards that are not listed need none
REWARD_PACKAGES: Mapping[str, Callable[[_Given], None]] = {
    "hps": needs_open_clip,
    "clip": needs_open_clip_if_named,
    "ocr": needs_ocr,
    "math_answer": needs_math_verify,
}
