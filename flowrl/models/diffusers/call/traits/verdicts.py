"""Verdicts on diffusers' pipelines from a sweep over all of them, by diffusers' version:
`verdicts.json`, which `scripts/benchmarks/pipelines.py` writes beside docs/pipelines.md."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import diffusers

from flowrl.errors import UserError

VERDICTS_FILE = Path(__file__).with_suffix(".json")
# reasons that lie in what a folder or a run may set otherwise: these are judged at load
_OF_SETTINGS = re.compile(r"prediction_type|predicts NaN")
_FAILS = "its own call fails with these versions"

Verdicts = Mapping[str, Mapping[str, str]]


@cache
def swept_verdicts(version: str = diffusers.__version__) -> Verdicts:
    """Reasons by pipeline class, by verdict (exact, refused, known, not built); `sound`: verdicts
    and reasons by class and inputs, of pipelines of sound alone (`scripts/benchmarks/
    sound_pipelines.py`). Empty for a version of diffusers that no sweep has seen."""
    return json.loads(VERDICTS_FILE.read_text(encoding="utf-8")).get(version, {})


def refused_because(name: str) -> str | None:
    """Why no pipeline of a class can be driven with this version of diffusers, as far as the sweep
    found; None: it may be."""
    verdicts = swept_verdicts()
    reason = verdicts.get("refused", {}).get(name)
    notes_of_sound = [
        note for key, note in verdicts.get("sound", {}).items() if _class_of(key) == name
    ]
    if notes_of_sound and all(_FAILS in note for note in notes_of_sound):
        reason = notes_of_sound[0].partition(" | ")[2]
    if reason is None and _FAILS in verdicts.get("known", {}).get(name, ""):
        reason = verdicts["known"][name]
    return None if reason is None or _OF_SETTINGS.search(reason) else reason


def _class_of(key: str) -> str:
    """The class of a verdict on sound, whose key has its inputs too."""
    return key.partition(" | ")[0]


def refuse_known(name: str) -> None:
    """UserError for a class whose pipelines are known to be refused with this version."""
    if (reason := refused_because(name)) is not None:
        raise UserError(
            f"{name}: {reason} (found with diffusers {diffusers.__version__}; docs/pipelines.md "
            "lists the pipelines that can be trained)"
        )
