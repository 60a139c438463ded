"""What ends a run before its time, in one sentence with the way on. What was saved stays whole."""

import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch.distributed

from flowrl.errors import Stopped, UserError
from flowrl.run.atomic import reason

TRACE = "error.txt"
REWARD = "in reward "  # how `rewards.score_all` notes whose error it is


class Told:
    """`with Told(folder):` turns what is raised inside into `Stopped`, with the trace in a file.

    Errors that nobody foresaw pass as they are: they are ours, and keep their trace. So do a
    user's mistakes before there is anything to go on from.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception):
            return
        begun = max((self.folder / "checkpoints").glob("[0-9]*"), default=None)
        sentence = _sentence(error)
        if sentence is None or (isinstance(error, UserError) and begun is None):
            return
        said = f"{sentence}{self._keep(error)}. "
        said += f"Checkpoint {begun.name} is whole. " if begun else "Nothing was trained yet. "
        said += f"Once this is mended (settings: {self.folder / 'run.yaml'}), go on with: "
        said += f"flowrl train --resume {self.folder}"
        raise Stopped(said) from error

    def _keep(self, error: Exception) -> str:
        if isinstance(error, UserError):
            return ""
        with suppress(OSError):  # the disk may be full
            (self.folder / TRACE).write_text("".join(traceback.format_exception(error)))
            return f"; the trace is in {self.folder / TRACE}"
        return ""


def _sentence(error: Exception) -> str | None:
    """None for what is to be passed on."""
    if isinstance(error, Stopped | BrokenPipeError):
        return None
    notes: list[str] = getattr(error, "__notes__", [])
    whose = next((n.removeprefix(REWARD).strip("'") for n in notes if n.startswith(REWARD)), None)
    if whose is not None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return f"the reward {whose} raised {what} ({Path(place.filename).name}, {place.lineno})"
    if isinstance(error, UserError):
        return str(error).rstrip(".")
    if isinstance(error, OSError):
        return f"a file could not be written or read: {reason(error)}"
    if _lost(error):
        return f"another process of this run is gone ({reason(error)[:200]})"
    return None


def _lost(error: Exception) -> bool:
    """Did a collective fail because its other end died? gloo says so in words only."""
    text = str(error).lower()
    by_name = isinstance(error, torch.distributed.DistError)
    words = ("connection closed by peer", "connection reset by peer", "connection refused")
    return by_name or (isinstance(error, RuntimeError) and any(word in text for word in words))
