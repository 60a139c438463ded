"""A reward of one's own for calls of functions: the same calls in any order, written as JSON."""

import json
from collections.abc import Sequence
from typing import Any


def same_calls(completions: Sequence[str], answers: Sequence[str], **_: Any) -> list[float]:
    pairs = zip(completions, answers, strict=True)
    return [float(_calls(said) == _calls(wanted)) for said, wanted in pairs]


def _calls(text: str) -> list[str] | None:
    try:
        calls = json.loads(text)
    except ValueError:
        return None
    listed = calls if isinstance(calls, list) else [calls]
    return sorted(json.dumps(call, sort_keys=True) for call in listed)
