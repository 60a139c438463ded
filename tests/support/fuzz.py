"""Damage from seeds: what a reader of foreign bytes must never do, measured on every case.

Each case must end within 5 seconds and take less than 200 MB of memory. Its error is one sentence.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

SECONDS, BYTES = 5.0, 200 * 2**20
QUICK = pytest.param(300, id="quick")
SLOW = pytest.param(10_000, id="slow", marks=pytest.mark.slow)
COUNTS = pytest.mark.parametrize("count", [QUICK, SLOW])
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PIECES = (b"", b"\x00", b"\xff", b"[", b"{", b'"', b"\n", b"null", b"\xef\xbb\xbf", b"1e999",
          b"-1", b"9" * 400, b"[" * 60, b"\\ud800", b"NaN", b"\r", b"\xc3\x28")  # fmt: skip


def cases(count: int, check: Callable[[random.Random], None]) -> None:
    """Check `count` seeds in turn. A failure names its seed."""
    for seed in range(count):
        try:
            with watched():
                check(random.Random(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def examples(count: int, strategy: SearchStrategy, check: Callable[[Any], None]) -> None:
    """The same with examples of hypothesis."""

    def one(example: Any) -> None:
        with watched():
            check(example)

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    made = settings(max_examples=count, deadline=None, database=None, derandomize=True,
                    suppress_health_check=checks)  # fmt: skip
    made(given(strategy)(one))()


@contextmanager
def watched() -> Iterator[None]:
    (before, _), begin = memory(fresh=True), time.process_time()
    yield
    seconds, grown = time.process_time() - begin, memory()[1] - before
    assert seconds < SECONDS and grown < BYTES, f"{seconds:.1f} s, {grown / 2**20:.0f} MB"


def memory(fresh: bool = False) -> tuple[int, int]:
    """Bytes of this process: now, and the most since the last call with `fresh`."""
    if fresh:
        with suppress(OSError):
            CLEAR.write_text("5")  # resets the maximum
    if not STATUS.exists():  # no Linux
        return 0, 0
    words = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    now, most = (int(words[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


def one_sentence(text: str, most: int = 2000) -> None:
    assert text.strip() and "\n" not in text.strip() and len(text) < most, text[:500]
    assert "Traceback" not in text and "pydantic" not in text, text


def damaged(data: bytes, rng: random.Random, pieces: Sequence[bytes] = PIECES) -> bytes:
    """Bytes changed, cut, doubled, or replaced; up to four times."""
    for _ in range(rng.randint(1, 4)):
        at, piece = rng.randint(0, len(data)), rng.choice(pieces)
        other = bytes([rng.randrange(256)])
        data = rng.choice(
            [
                data[:at],
                data[:at] + piece + data[at:],
                data[:at] + piece + data[at + 9 :],
                data[:at] + other + data[at + 1 :],
                data + data[at:],
            ]
        )
    return data


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each place of a tree of mappings and lists: the one that holds it, and its key there."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from nodes(value)
