"""Answers of servers, read with a bound: neither sent nor decompressed bytes exceed it."""

import zlib
from collections.abc import Mapping
from typing import Any

from rewards.serving.requests import Malformed

VALUE_BYTES = 64  # of a number, or of a token with its probability, in JSON
FIXED_BYTES = 2**16  # of everything around them, and of messages of errors
LIST_BYTES = 2**20  # of a server's description and its list of models
EXAMPLE_BYTES = 2**26  # of two samples, which may be videos
LONGEST_COMPLETION = 2**16  # of a completion whose request has no limit
_PARTS = 4  # values of a candidate token: its text, its bytes, its probability and its name


def most_bytes(values: int) -> int:
    """Bytes that an answer with this many values may have."""
    return FIXED_BYTES + VALUE_BYTES * values


def tokens_asked(body: Mapping[str, Any]) -> int:
    """Values in the answer to a request for completions: of each token, and of each candidate for
    its place."""
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    tokens = most if isinstance(most, int) and most > 0 else LONGEST_COMPLETION
    count, logprobs, top = (_number(body.get(name)) for name in ("n", "logprobs", "top_logprobs"))
    candidates = 1 + max(logprobs, top) if max(logprobs, top) else 0
    prompt = body.get("prompt")
    repeated = len(prompt) if isinstance(prompt, list) else 0  # servers return its tokens too
    return max(count, 1) * (tokens * (1 + _PARTS * candidates) + repeated)


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int) and value > 0 else 0


class Body:
    """The bytes of an answer, as they arrive. Malformed for more than `most`, for compression that
    is damaged or unknown, and for an answer that is cut off in it."""

    def __init__(self, encoding: str, most: int) -> None:
        self.most, self.parts, self.size = most, list[bytes](), 0
        kind = encoding.strip().lower()
        if kind not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise Malformed
        compressed = kind not in ("", "identity")
        self._inflate = zlib.decompressobj(wbits=47) if compressed else None  # gzip or zlib

    def add(self, part: bytes) -> None:
        """Take the next bytes that were sent."""
        if self._inflate is not None:
            try:
                part = self._inflate.decompress(part, self.most - self.size + 1)
            except zlib.error as error:
                raise Malformed from error
        self.size += len(part)
        if self.size > self.most:
            raise Malformed
        self.parts.append(part)

    def whole(self) -> bytes:
        """The whole answer."""
        if self._inflate is not None and not self._inflate.eof:
            raise Malformed
        return b"".join(self.parts)
