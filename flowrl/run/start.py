"""Start a run in a new folder, or resume one from its newest checkpoint."""

import errno
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Literal

import yaml
from accelerate import PartialState

from flowrl.errors import FolderInUse, Stopped, UserError, after, write_fault
from flowrl.iteration.open import timed_units
from flowrl.models.open import with_guider
from flowrl.pages.records import EndRecord
from flowrl.paths import folder_taken, numbered
from flowrl.processes.meeting import agreed, meet, meeting, not_alone, watched_processes
from flowrl.processes.watch import before_end
from flowrl.run.save import checkpoint
from flowrl.run.save.ends import keep_end
from flowrl.run.save.failures import resumable, starting
from flowrl.run.show.track import open_trackers
from flowrl.run.train import Result, train_session
from flowrl.run.watch.start_check import check_shares
from flowrl.run.watch.until import early_end
from flowrl.session import record, start_record
from flowrl.session.atomic import appear, held, sweep
from flowrl.session.live import NOTHING_LIVE, Live, of_callback
from flowrl.session.notices import Notices, NoticeState, closing_notices, open_notices
from flowrl.session.row_checks import with_rows_checked
from flowrl.session.session import (
    SOURCE,
    SampleSource,
    Session,
    check_reward_sources,
    on_cpu,
    open_accelerator,
    open_session,
)
from flowrl.session.smaller_calls import explained
from flowrl.settings import RunSettings
from flowrl.settings.read import run_yaml_text, with_full_paths
from flowrl.settings.trust import remember
from flowrl.votes.asking import with_asking
from flowrl.whole_file import write_whole
from rewards import Reward

FolderState = Literal["absent", "begun", "finished"]
PAGE_SECONDS = 10.0  # that a process which the watch ends waits for its page

if TYPE_CHECKING:
    from flowrl.run.workers.cluster import Cluster  # Ray is an extra


def start(
    run: RunSettings, name: str, folder: Path | None, cache: bool = True, live: Live = NOTHING_LIVE
) -> Result:
    """Start a new run in a new folder. UserError if the folder exists."""
    state, run = meet(on_cpu(run)), with_guider(with_full_paths(run))
    with watched_processes(state):
        return _start(run, name, folder, cache, live, state)


def _start(
    run: RunSettings, name: str, folder: Path | None, cache: bool, live: Live, state: PartialState
) -> Result:
    check_shares(run, state.num_processes)
    reserved = agreed(state, lambda: str(claim(run, folder, name, live)), shutil.rmtree)
    place = Path(reserved)
    run = live.placed(run, place)
    with held_together(place, state, lambda _: shutil.rmtree(place)):
        try:
            with (
                ends_noticed(place, state, False) as notices,
                explained(run),
                on_cluster(run, state) as cluster,
            ):
                with not_alone():
                    accelerator = open_accelerator(run, place)
                    agreed(state, lambda: open_trackers(run, place, accelerator, 0))
                    session = open_session(run, place, accelerator, live, rewards_of(cluster))
                    session = with_asking(with_rows_checked(session, begun=False))
                    session = replace(session, notices=notices.sender)
                with with_workers(session, cluster) as session:
                    return notices.ended(train_session(session, cache=cache))
        except UserError as error:
            ours = not isinstance(error, Stopped) and not of_callback(error)
            if state.is_main_process and ours:  # nothing was trained in it
                after(error, lambda: shutil.rmtree(place), None)
            raise


def begun_before(run: RunSettings, folder: Path) -> bool:
    """Whether a launcher starts these processes again after it has begun this run in this folder.
    The main process decides for all: other nodes may count other restarts, or lag behind in what
    they see of the folder."""
    return agreed(meet(on_cpu(run)), lambda: meeting().launch.has_begun(folder))


def folder_state(run: RunSettings, folder: Path) -> FolderState:
    """Whether a folder has this run, and its end; the main process decides for all. UserError for a
    folder that has no run."""
    return agreed(meet(on_cpu(run)), lambda: _folder_state(run, folder))


def _folder_state(run: RunSettings, folder: Path) -> FolderState:
    if not folder.exists():
        return "absent"
    if not (folder / "run.yaml").is_file():
        raise UserError(f"{folder} exists, but has no run.yaml: choose another --folder")
    newest = checkpoint.newest(folder, lambda _: None)
    return "finished" if _finished(run, folder, newest) else "begun"


def _finished(run: RunSettings, folder: Path, newest: Path | None) -> bool:
    """Whether a run has ended with this checkpoint, its newest, and left its weights."""
    done = newest is not None and (
        int(newest.name) >= run.train.iterations
        or bool(early_end(run, checkpoint.progress_of(newest)))
    )
    return done and (folder / run.exported).is_dir()


def finished_words(run: RunSettings, folder: Path) -> str:
    """A sentence that says how a finished run ended."""
    newest = checkpoint.newest(folder, lambda _: None)
    done, asked = (0 if newest is None else int(newest.name)), run.train.iterations
    if newest is not None and done < asked:
        reason = early_end(run, checkpoint.progress_of(newest))
        return f"{folder} has finished after {done} of {asked} iterations: {reason}"
    more = "" if done == asked else f", {done - asked} more than asked for"
    return f"{folder} has finished its {done} iterations{more}"


def claim(run: RunSettings, folder: Path | None, name: str, live: Live = NOTHING_LIVE) -> Path:
    """Reserve the run's folder, and let the launcher's later attempts know that this launch has
    begun it. Not that of a run which stands there already: a restart must not resume that."""
    launch = meeting().launch
    if folder is None or folder.exists():
        return reserve(run, folder, name, live)
    launch.begin(folder)  # before: a kill may follow the folder's appearance
    try:
        return reserve(run, folder, name, live)
    except UserError as error:
        after(error, lambda: launch.forget(folder), None)
        raise


def _check_link(place: Path) -> None:
    """UserError for a link to itself, which leads nowhere."""
    try:
        place.stat()
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            raise UserError(
                f"{place} cannot be created: {write_fault(error)} (--folder)"
            ) from error


def reserve(run: RunSettings, folder: Path | None, name: str, live: Live = NOTHING_LIVE) -> Path:
    """Create the run's folder: the given one, or the next free one in `runs`.

    It appears with its run.yaml inside, so that a run can be resumed at whatever time it was
    killed.
    """
    check_reward_sources((*run.rewards, *run.judges, *run.intermediate_rewards), live)
    place = folder or numbered(Path("runs"), name)
    _check_link(place)
    settings = run_yaml_text(live.placed(run, place))

    def write(new: Path) -> None:
        live.write(new)
        write_whole(new / "run.yaml", settings, synced=True)
        remember(place, yaml.safe_load(settings), new)  # a kill may follow its appearance

    try:
        appear(place, write)
    except FileExistsError as error:
        if folder is None:
            return reserve(run, None, name, live)  # another run took the number in between
        taken = folder_taken(place)
        begun, mark, remedy = taken.partition(";")
        raise FolderInUse(begun, mark + remedy) from error
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with NUL
        raise UserError(f"{place} cannot be created: {write_fault(error)} (--folder)") from error
    return place


def resume(run: RunSettings, folder: Path, cache: bool = True, live: Live = NOTHING_LIVE) -> Result:
    """Resume from the newest intact checkpoint in a run's folder, or from the start if there is
    none.

    UserError if `run` changes a setting that cannot change within a run; one line names other
    changes.
    """
    state = meet(on_cpu(run))
    with watched_processes(state):
        return _resume(run, folder, cache, live, state)


def _resume(run: RunSettings, folder: Path, cache: bool, live: Live, state: PartialState) -> Result:
    check_shares(run, state.num_processes)
    terminal = record.Terminal(state.is_main_process)
    with held_together(folder, state) as before:
        if before:
            terminal.say(f"removed the stale lock of {before}, which has ended; continuing")
        newest = checkpoint.newest(folder, terminal.warn)
        if newest is None:
            terminal.say(f"{folder} has no checkpoint yet; training begins at iteration 0")
        else:
            saved = newest
            count = state.num_processes
            for line in agreed(state, lambda: start_record.changes(run, folder, saved, count)):
                terminal.say(line)
        done = _finished(run, folder, newest)
        with ends_noticed(folder, state, done) as notices, resumable(folder), explained(run):
            if state.is_main_process:
                for parent in (folder, folder / "checkpoints", folder / "best"):
                    sweep(parent)
                if newest is not None:
                    checkpoint.set_aside(folder, newest)
            with on_cluster(run, state) as cluster:
                with starting(folder):
                    accelerator = open_accelerator(run, folder)
                    first = 0 if newest is None else int(newest.name) + 1
                    agreed(state, lambda: open_trackers(run, folder, accelerator, first))
                    session = open_session(run, folder, accelerator, live, rewards_of(cluster))
                    session = with_rows_checked(session, begun=newest is not None)
                    session = replace(with_asking(session), notices=notices.sender)
                with with_workers(session, cluster) as session:
                    return notices.ended(train_session(session, newest, cache))


@dataclass(frozen=True)
class EndNotices:
    """Sends the user how a start ends, once: by its result, or by an error.

    sender       None: the user wants no notices, or this is not the main process
    done_before  whether the run had finished before this start, so that its end is no news
    folder       the run's, whose page then says how it ended; None: not the main process
    """

    sender: Notices | None
    done_before: bool
    folder: Path | None = None

    def ended(self, result: Result) -> Result:
        """Return the result of a training, once its notice is on its way."""
        if result.done and not self.done_before:
            self._send("finished", "the run is done")
        elif result.signal is not None:
            name = signal.Signals(result.signal).name
            self._send("stopped", f"the run was stopped by {name}, and is saved")
            if self.folder is not None:
                keep_end(self.folder, EndRecord("stopped", f"{name} ended it, and it is saved"))
        return result

    def failed(self, error: BaseException) -> None:
        """Send and keep the reason of an error that ends the start."""
        name = type(error).__name__
        kind: Literal["failed", "stopped"] = "failed"
        if isinstance(error, UserError):
            text = short = str(error)
        elif isinstance(error, Exception):
            text = short = f"{name}: {error}"
        else:  # a second Ctrl-C
            kind, text = "stopped", f"the run was stopped at once ({name})"
            short = f"{name} ended it at once; it goes on from its newest checkpoint"
        self._send(kind, text)
        if self.folder is not None:
            keep_end(self.folder, EndRecord(kind, short))

    def cut_off(self, sentence: str) -> None:
        """Send a last notice, and wait for it: this process ends after it. Its page is written in
        bounded time, since the disk may be what hangs."""
        self._send("failed", sentence)
        if self.folder is not None:
            end = EndRecord("failed", sentence)
            page = Thread(target=keep_end, args=(self.folder, end), daemon=True)
            page.start()
            page.join(PAGE_SECONDS)
        if self.sender is not None:
            self.sender.close()

    def _send(self, kind: NoticeState, text: str) -> None:
        if self.sender is not None:
            self.sender.send(kind, text)


@contextmanager
def ends_noticed(folder: Path, state: PartialState, done_before: bool) -> Iterator[EndNotices]:
    """Open the notices of a start, and send and keep how it ends. The folder's lock is held, so
    that of two starts only the one that trains sends anything."""
    terminal = record.Terminal(state.is_main_process)
    sender = open_notices(folder, terminal.warn) if state.is_main_process else None
    notices = EndNotices(sender, done_before, folder if state.is_main_process else None)
    with closing_notices(sender), before_end(notices.cut_off):
        try:
            yield notices
        except BaseException as error:
            after(error, lambda: notices.failed(error), None)
            raise


@contextmanager
def on_cluster(run: RunSettings, state: PartialState) -> Iterator["Cluster | None"]:
    """Ray for a run with workers, otherwise None; it ends with the run."""
    if not run.workers.any:
        yield None
        return
    from flowrl.run.workers.cluster import Cluster  # Ray is an extra

    with closing(Cluster(run, state)) as cluster:
        yield cluster


def rewards_of(cluster: "Cluster | None") -> Mapping[str, Reward]:
    """Rewards that are scored in separate processes."""
    return {} if cluster is None else cluster.rewards


@contextmanager
def with_workers(session: Session, cluster: "Cluster | None") -> Iterator[Session]:
    """The session with its sampling workers, which end with it; a lag without them is made here."""
    workers = session.run.workers
    if cluster is None or workers.sampling == 0:
        yield with_source(session, sampled_ahead(session)) if workers.lag else session
        return
    from flowrl.run.workers.pool import SamplingPool

    with closing(SamplingPool(session, cluster)) as pool:
        pool.crew.begin()
        yield with_source(session, pool)
    with session.parallel.together():  # the main process's Ray is the others' too
        pass


def with_source(session: Session, source: SampleSource) -> Session:
    return replace(session, table=session.table.with_value(SOURCE, source))


def sampled_ahead(session: Session) -> SampleSource:
    """A lag that this process makes alone."""
    from flowrl.iteration.features.ahead import IterationsAhead  # a run without a lag needs none

    return IterationsAhead(session, timed_units(session))


@contextmanager
def held_together(
    folder: Path, state: PartialState, undo: Callable[[str | None], object] = lambda _: None
) -> Iterator[str | None]:
    """Hold the folder's lock on the main process; yields the owner of a stale lock or None.

    `undo` runs on the main process, with that result, if another process has ended.
    """
    warn = record.Terminal(state.is_main_process).warn
    with ExitStack() as stack:
        yield agreed(state, lambda: stack.enter_context(held(folder, warn)), undo)
