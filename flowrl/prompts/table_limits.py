"""Limits on tables that anybody may have written, checked before memory is taken for their rows."""

import psutil

MOST_TABLE_BYTES = 2**30  # of a file, and of its rows once unpacked
MOST_TABLE_ROWS = 20_000_000
MOST_CELLS = 200_000_000
CELL = 64  # bytes of a value in Python beside its content, about
_SHARE = 0.5  # of the free memory that the rows of a table may take
_SMALL = 2**26  # bytes that no machine lacks
_MARKS = (b",", b"[", b"{", b"\n")  # of a text, each of which may begin a value


def check_rows_fit(size: int) -> None:
    """ValueError if rows of about `size` bytes take more than half of the free memory."""
    if size <= _SMALL:
        return
    free = psutil.virtual_memory().available
    if size > _SHARE * free:
        raise ValueError(
            f"its rows would take about {size / 2**30:.1f} GiB, and this machine has "
            f"{free / 2**30:.1f} GiB of free memory: make a smaller table of them"
        )


def check_text_fits(data: bytes) -> None:
    """The same for the values of a table of text (JSON, CSV)."""
    if len(data) > _SMALL // CELL:
        check_rows_fit(len(data) + CELL * sum(map(data.count, _MARKS)))
