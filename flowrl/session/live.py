"""Parts of a run that come from Python instead of its file: rewards, callbacks, prompts, weights.

Prompts and weights are files that move into the run's folder, so its run.yaml names them. A reward
that no file can name has a name in run.yaml that says so: see
`flowrl.settings.sections.data.IN_PYTHON`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from flowrl.settings import RunSettings
from flowrl.settings.read import dump, run_from
from flowrl.whole_file import copy_folder
from rewards import Reward
from rewards.guard import kept_settings

GIVEN_FOLDER = "given"  # the folder of a run that holds such files
Moment = Literal["iteration", "evaluation", "checkpoint"]
Wish = Literal["stop", "save", "evaluate"]
CALLBACK = "in a callback of the run"  # the note of an error, which then propagates unchanged


@dataclass(frozen=True)
class Event:
    """An event of a run, for its callbacks.

    kind       iteration: its metrics, without the evaluation's
               evaluation: `held_out/...` metrics; iteration 0 is the base model
               checkpoint: no metrics
    iteration  iterations done
    metrics    as in the line of `metrics.jsonl`, which is written before
    folder     the run's folder; for a checkpoint, the checkpoint's own
    wishes     what callbacks have asked for, by the methods; the run does it before its next
               iteration, on all processes
    """

    kind: Moment
    iteration: int
    metrics: Mapping[str, float]
    folder: Path
    wishes: set[Wish] = field(default_factory=set[Wish], repr=False, compare=False)

    def stop(self) -> None:
        """End the run here as if this were its last iteration: it is evaluated and saved, and its
        weights are exported. A later resume goes on."""
        self.wishes.add("stop")

    def save(self) -> None:
        """Save a checkpoint."""
        self.wishes.add("save")

    def evaluate(self) -> None:
        """Evaluate the weights on the held-out prompts, unless this iteration has been evaluated;
        the scores join its line of metrics.jsonl."""
        self.wishes.add("evaluate")


@runtime_checkable
class Callback(Protocol):
    """A function that a run calls at every `Event`, on the main process. Its result is ignored; it
    asks for something by the event's methods. An early stop:

        def enough(event):
            if event.metrics.get("held_out/pickscore", 0.0) > 0.9:
                event.stop()

        flowrl.train(..., callbacks=enough)

    An exception ends the run with its own traceback, and the run can be resumed.
    """

    def __call__(self, event: Event, /) -> object: ...


@dataclass(frozen=True)
class Live:
    """Parts of a run that were passed from Python.

    rewards    by label
    files      a folder whose contents move into the run's folder; until then the settings name them
               there
    """

    rewards: Mapping[str, Reward] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    files: Path | None = None

    def call(self, event: Event) -> None:
        """Call all callbacks, mark their errors as such, and restore torch's settings that they
        change."""
        for callback in self.callbacks:
            try:
                with kept_settings():
                    callback(event)
            except Exception as error:
                error.add_note(CALLBACK)
                raise

    def placed(self, run: RunSettings, folder: Path) -> RunSettings:
        """The run with its files placed in the run's folder."""
        if self.files is None:
            return run
        place = str(folder.absolute() / GIVEN_FOLDER)
        return run_from(_moved(dump(run), str(self.files), place), "the run")

    def write(self, folder: Path) -> None:
        """Copy the files into the run's folder."""
        if self.files is not None and any(self.files.iterdir()):
            copy_folder(self.files, folder / GIVEN_FOLDER)


NOTHING_LIVE = Live()


def of_callback(error: BaseException) -> bool:
    """Whether an error was raised by a callback."""
    return CALLBACK in getattr(error, "__notes__", ())


def _moved(value: Any, old: str, new: str) -> Any:
    """The tree with all paths below `old` moved below `new`."""
    if isinstance(value, dict):
        return {key: _moved(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, old, new) for item in value]
    if isinstance(value, str) and value.startswith(f"{old}/"):
        return new + value.removeprefix(old)
    return value
