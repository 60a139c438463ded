"""Starts a run in a new folder, or resumes one from its newest checkpoint."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from flowrl.errors import Stopped, UserError
from flowrl.paths import numbered
from flowrl.processes.meeting import meet
from flowrl.run.atomic import appear, held, reason, sweep
from flowrl.run.save import checkpoint
from flowrl.run.save.failures import resumable, starting
from flowrl.run.show.track import open_trackers
from flowrl.run.state import start_record
from flowrl.run.state.live import NOTHING_LIVE, Live, of_callback
from flowrl.run.state.session import check_reward_sources, on_cpu, open_accelerator, open_session
from flowrl.run.state.smaller_calls import explained
from flowrl.run.train import Result, train_session
from flowrl.run.watch import record
from flowrl.settings import Run
from flowrl.settings.read import dump, with_full_paths
from flowrl.settings.trust import remember

T = TypeVar("T")


def start(
    run: Run, name: str, folder: Path | None, cache: bool = True, live: Live = NOTHING_LIVE
) -> Result:
    """Start a new run in a new folder. UserError if the folder exists."""
    state, run = meet(on_cpu(run)), with_full_paths(run)
    chosen = Path(agreed(state, lambda: str(reserve(run, folder, name, live))))
    run = live.placed(run, chosen)
    with held_together(chosen, state):
        try:
            with explained(run):
                accelerator = open_accelerator(run, chosen)
                agreed(state, lambda: open_trackers(run, chosen, accelerator, 0))
                session = open_session(run, chosen, accelerator, live)
            return train_session(session, cache=cache)
        except UserError as error:
            ours = not isinstance(error, Stopped) and not of_callback(error)
            if state.is_main_process and ours:
                shutil.rmtree(chosen)  # nothing was trained in it
            raise


def reserve(run: Run, folder: Path | None, name: str, live: Live = NOTHING_LIVE) -> Path:
    """Make the run's folder: the given one, or the next free one in `runs`.

    It appears with its run.yaml inside, so that a run can be resumed whenever it was killed.
    """
    check_reward_sources((*run.rewards, *run.judges, *run.intermediate_rewards), live)
    chosen = folder or numbered(Path("runs"), name)
    settings = yaml.safe_dump(dump(live.placed(run, chosen)), sort_keys=False)

    def write(new: Path) -> None:
        live.write(new)
        record.replace(new / "run.yaml", settings)

    try:
        appear(chosen, write)
        remember(chosen)
    except FileExistsError as error:
        if folder is None:
            return reserve(run, None, name, live)  # another run took the number in between
        raise UserError(f"{chosen} exists; give another --folder, or --resume {chosen}") from error
    except OSError as error:
        raise UserError(f"{chosen} cannot be made: {reason(error)}") from error
    return chosen


def resume(run: Run, folder: Path, cache: bool = True, live: Live = NOTHING_LIVE) -> Result:
    """Resume from the newest whole checkpoint of a run's folder, or from the start without one.

    UserError if `run` differs from what the run was begun with in a setting that cannot change; one
    line names other changes.
    """
    state = meet(on_cpu(run))
    terminal = record.Terminal(state.is_main_process)
    with held_together(folder, state) as before:
        if before:
            terminal.say(f"{before} held this run's lock and is gone; continuing")
        newest = checkpoint.newest(folder, terminal.warn)
        if newest is not None:
            saved = newest
            count = state.num_processes
            for line in agreed(state, lambda: start_record.changes(run, folder, saved, count)):
                terminal.say(line)
        with resumable(folder):
            if state.is_main_process:
                for parent in (folder, folder / "checkpoints", folder / "best"):
                    sweep(parent)
            with starting(folder):
                accelerator = open_accelerator(run, folder)
                first = 0 if newest is None else int(newest.name) + 1
                agreed(state, lambda: open_trackers(run, folder, accelerator, first))
                session = open_session(run, folder, accelerator, live)
            return train_session(session, newest, cache)


@contextmanager
def held_together(folder: Path, state: PartialState) -> Iterator[str | None]:
    """Hold the folder's lock on the main process; yields the owner of a stale lock, if any."""
    warn = record.Terminal(state.is_main_process).warn
    with ExitStack() as stack:
        yield agreed(state, lambda: stack.enter_context(held(folder, warn)))


def agreed(state: PartialState, do: Callable[[], T]) -> T:
    """Run `do` on the main process; broadcast its result or its UserError to all."""
    box: list[Any] = [None, ""]
    if state.is_main_process:
        try:
            box[0] = do()
        except UserError as error:
            box[1] = str(error)
    broadcast_object_list(box)
    if box[1]:
        raise UserError(box[1])
    return box[0]
