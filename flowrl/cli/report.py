"""`flowrl report` and `flowrl compare`: the page of a run, and several runs on one page"""

from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import UserError
from flowrl.evaluation.outputs import check_output_file
from flowrl.pages.compare_page import write_comparison
from flowrl.pages.run_page import REPORT, write_report
from flowrl.settings.command_line.arguments import Word


@dataclass
class Report:
    """Write the page of a run: one HTML file that opens without a network, with its curves, the
    same samples over the run, the best and the worst samples, a rollout tree, plan, settings,
    environment and alarms. A run also writes it at each evaluation and at its end."""

    run: Word[Path]
    """The run's folder."""
    out: Path | None = None
    """A file for the page; RUN/report.html if absent."""


@dataclass
class Compare:
    """Write several runs on one page: scores with paired intervals over prompts, curves, the same
    samples side by side, and the settings that differ."""

    runs: Word[tuple[Path, ...]] = ()
    """Folders of two to twelve runs. If there are many, all are compared with the first one."""
    out: Path = Path("comparison.html")
    """A file for the page, which is overwritten."""


def print_report(arguments: Report) -> Path:
    """Write the page of a run, print its path and return it. UserError if it cannot be written."""
    out = arguments.out or arguments.run / REPORT
    if arguments.run.is_dir():  # otherwise the reader of the folder says what is wrong
        check_output_file(out, begins=b"<")
    try:
        written = write_report(arguments.run, out)
    except OSError as error:
        raise UserError(f"report: {out} cannot be written: {error.strerror or error}") from error
    print(f"page: {written}")
    return written


def print_comparison(arguments: Compare) -> Path:
    """Write the page of several runs, print its path and return it. UserError if it cannot be
    written."""
    check_output_file(arguments.out, begins=b"<")
    try:
        write_comparison(arguments.runs, arguments.out)
    except OSError as error:
        text = f"compare: {arguments.out} cannot be written: {error.strerror or error}"
        raise UserError(text) from error
    print(f"page: {arguments.out}")
    return arguments.out
