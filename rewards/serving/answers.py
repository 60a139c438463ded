"""Read the JSON of a server's answer, which may be anything."""

import email.utils
import json
import time
from typing import TYPE_CHECKING, Any

from rewards.serving.requests import Malformed

if TYPE_CHECKING:
    import httpx

MOST_DIGITS = 300  # of an integer; a float holds 308
MOST_TOKENS = 2**53  # that a count can be


def parse_answer(answer: "httpx.Response") -> Any:
    """Parse the JSON of an answer. Raises Malformed if it is not JSON, nests too deeply, or has
    integers that are too large."""
    try:
        return json.loads(answer.content, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise Malformed from error


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def token_counts(body: Any) -> tuple[int, int]:
    """Tokens of the prompt and the completion from the answer's `usage`; 0 if it has none."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return 0, 0
    return _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else 0


def retry_seconds(retry_after: str | None) -> float:
    """Retry-After in seconds, from a number or a date; 0 if it is neither."""
    text = (retry_after or "").strip()
    if text.isascii() and text.isdigit():  # "²" is a digit too
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
