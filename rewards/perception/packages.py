"""Packages that rewards need beside flowrl's own, asked for before any weights load."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


def needs_client(_: _Given) -> None:
    """ValueError if the packages of clients of a server are missing."""
    for library in ("httpx", "tenacity"):
        if importlib.util.find_spec(library) is None:
            raise ValueError(f"{library} is not installed; pip install 'flowrl[remote]'")


class RewardPackages(NamedTuple):
    """The packages that a reward needs.

    check  raises ValueError if one is missing that these settings need
    words  which they are, and how they are installed
    """

    check: Callable[[_Given], None]
    words: str


_SERVED = RewardPackages(needs_client, "httpx and tenacity: pip install 'flowrl[remote]'")
# by the reward's name; rewards that are not listed need none
REWARD_PACKAGES: Mapping[str, RewardPackages] = {
    "hps": RewardPackages(needs_open_clip, "open_clip: pip install 'flowrl[rewards]'"),
    "clip": RewardPackages(
        needs_open_clip_if_named,
        "with `library: open_clip`, open_clip: pip install 'flowrl[rewards]'",
    ),
    "ocr": RewardPackages(needs_ocr, "rapidocr and onnxruntime: pip install 'flowrl[ocr]'"),
    "math_answer": RewardPackages(needs_math_verify, "math-verify: pip install 'flowrl[math]'"),
    "compbench": _SERVED,
    "deqa": _SERVED,
    "dpg_bench": _SERVED,
    "editscore": _SERVED,
    "judge": _SERVED,
    "remote": _SERVED,
    "soft_tifa": _SERVED,
    "unified_reward": _SERVED,
    "unigenbench": _SERVED,
    "vqascore": _SERVED,
}
