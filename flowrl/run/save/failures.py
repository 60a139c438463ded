"""Turn failures into one-sentence errors that say how to resume. Saved files stay intact."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

from flowrl.errors import NotFiniteError, Stopped, UnusableCheckpoint, UserError, after
from flowrl.pages.run_folder import RunFolder
from flowrl.pages.run_page import last_words
from flowrl.processes.meeting import lost
from flowrl.session.atomic import numbered_folders, reason
from flowrl.session.live import of_callback
from rewards.combine import blamed

TRACE = "error.txt"


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Turn errors in the body into `Stopped`, and write their traceback to a file in the run's
    folder.

    Unexpected errors propagate unchanged, with their traceback: they are bugs of this program or of
    a callback. So do user errors before the first checkpoint, when there is nothing to resume from.
    """
    try:
        yield
    except Exception as error:
        stop = after(error, lambda: _stop(folder, error), None)
        if stop is None:
            raise
        raise stop from error


class Mistake(UserError):
    """A mistake in settings or files, found when a run resumes. Exit code 2."""


@contextmanager
def starting(folder: Path) -> Iterator[None]:
    """Turn user errors in the body into `Mistake` if there is a checkpoint to resume from.

    Of a checkpoint that cannot be used, the message has the way on: it is not called intact, and
    the command that has just failed is not given again."""
    newest = _newest(folder)
    try:
        yield
    except NotFiniteError:
        raise
    except UnusableCheckpoint as error:
        raise Mistake(str(error)) from error
    except UserError as error:
        if newest is None:
            raise
        text = f"{str(error).rstrip('.')}. {_way_on(folder, newest)}"
        raise Mistake(text) from error


def _stop(folder: Path, error: Exception) -> Stopped | None:
    """The error to raise instead; None for an error that propagates unchanged."""
    newest = _newest(folder)
    not_finite = isinstance(error, NotFiniteError)
    text = _sentence(error)
    if text is None or (isinstance(error, UserError) and newest is None and not not_finite):
        return None
    text += _trace(folder, error)
    stands = _stands(folder) if not_finite else ""
    return Stopped(f"{text}.{stands or ' '}{_way_on(folder, newest)}")


def _stands(folder: Path) -> str:
    """Lines for the end of a collapsed run: its last alarm, and whose its best weights are. Empty
    for a run that keeps none."""
    if not numbered_folders(folder / "best"):
        return ""
    try:
        said = last_words(RunFolder.read(folder), quote(str(folder)))
    except UserError:  # the folder was changed while the run trained
        said = ""
    return (
        f"\n{said}\nThey are untouched in {folder / 'best'}. "
        if said
        else (f" The best weights are untouched in {folder / 'best'}. ")
    )


def _newest(folder: Path) -> Path | None:
    return next(reversed(numbered_folders(folder / "checkpoints")), None)


def _way_on(folder: Path, newest: Path | None) -> str:
    if not (folder / "run.yaml").is_file():
        return (
            f"{folder} is no longer there: it was moved, renamed or removed while this run "
            "trained. If it is elsewhere, resume it there: flowrl train --resume NEW_PLACE"
        )
    state = f"Checkpoint {newest.name} is intact" if newest else "Nothing was trained yet"
    return (
        f"{state}. Once the cause is fixed (settings: {folder / 'run.yaml'}), resume with: "
        f"flowrl train --resume {quote(str(folder))}"
    )


def _trace(folder: Path, error: Exception) -> str:
    if isinstance(error, UserError):
        return ""
    with suppress(OSError):  # the disk may be full
        (folder / TRACE).write_text("".join(traceback.format_exception(error)))
        return f"; the traceback is in {folder / TRACE}"
    return ""


def _sentence(error: Exception) -> str | None:
    """Describe an expected error in one sentence; None for an unexpected one."""
    if isinstance(error, Stopped | Mistake | BrokenPipeError) or of_callback(error):
        return None
    if (of_reward := blamed(error)) is not None:
        return of_reward
    if isinstance(error, UserError):
        return str(error).rstrip(".")
    if isinstance(error, OSError):
        return f"a file could not be written or read: {reason(error)}"
    if lost(error):
        return f"another process of this run has ended ({reason(error)[:200]})"
    return None
