"""The end of a start in its run's folder: a record of the reason, and the page as of then."""

from contextlib import suppress
from pathlib import Path

from flowrl.errors import UserError
from flowrl.pages.records import EndRecord, write_end
from flowrl.pages.run_page import write_report


def keep_end(folder: Path, end: EndRecord) -> None:
    """Record how a start ended before its run did, and write `report.html` again: it was last
    written after an evaluation, which may be many iterations ago.

    The folder may have been moved, or its disk be full: neither takes the place of the reason for
    which the start ends.
    """
    if not (folder / "run.yaml").is_file():
        return
    with suppress(OSError, UserError):
        write_end(folder, end)
    with suppress(OSError, UserError):
        write_report(folder)
