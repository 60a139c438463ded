"""The loop: collect, update, follow, look. No algorithm is named in this file."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from flowrl import checkpoint, record, selfcheck
from flowrl.checkpoint import Progress
from flowrl.collect import collect
from flowrl.config import dump
from flowrl.errors import UserError
from flowrl.interrupt import Interrupt
from flowrl.paths import numbered
from flowrl.session import Session, on_cpu, open_accelerator, open_session
from flowrl.settings import Run
from flowrl.statistics import Alarms
from flowrl.update import update
from flowrl.watch import guard, look, prove


@dataclass
class Result:
    """How a run ended: evaluations of the base and of the last weights, or where it stopped."""

    folder: Path
    signal: int | None = None  # that interrupted it
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    weights: Path | None = None  # exported, once done
    main: bool = True  # whether this process is the one that speaks

    @property
    def done(self) -> bool:
        return self.weights is not None


def train(session: Session, resume: Path | None = None) -> Result:
    """Run to the end, or to an interruption, which saves. `resume` is a checkpoint's folder."""
    run, terminal = session.run, session.terminal
    alarms, progress = Alarms(), Progress()
    if resume is not None:
        progress = checkpoint.restore(session, resume, alarms)
    if session.accelerator.is_main_process:
        record.cut_back(session.folder, progress.iteration)
    after = f", going on after iteration {progress.iteration}" if progress.iteration else ""
    terminal.say(f"run folder: {session.folder}{after}")
    prove(session)
    if resume is None:
        base = look(session, progress, alarms, "before")
        session.accelerator.log(base, step=0)
        checkpoint.save(session, progress, alarms)
    with Interrupt() as interrupt:
        began, start = time.perf_counter(), progress.seconds
        while progress.iteration < run.train.iterations:
            metrics = iterate(session, progress, alarms)
            progress.seconds = start + time.perf_counter() - began
            left = (
                progress.seconds / progress.iteration * (run.train.iterations - progress.iteration)
            )
            terminal.iteration(progress.iteration, metrics, left)
            last = progress.iteration == run.train.iterations
            if last or progress.iteration % run.evaluate.every == 0:
                metrics |= look(session, progress, alarms, "after" if last else None)
            session.accelerator.log(metrics, step=progress.iteration)
            stop = interrupt.asked(session.accelerator)
            if last or stop or progress.iteration % run.checkpoint.every == 0:
                checkpoint.save(session, progress, alarms)
            if stop and not last:
                return Result(session.folder, stop, main=session.accelerator.is_main_process)
    weights = session.folder / run.exported
    checkpoint.export(session, weights)
    session.accelerator.end_training()
    ends = (progress.first or {}, progress.last or {})
    return Result(session.folder, None, *ends, weights, session.accelerator.is_main_process)


def iterate(session: Session, progress: Progress, alarms: Alarms) -> dict[str, float]:
    """One iteration; gives its metrics and leaves `progress` one further."""
    for group in session.optimizer.param_groups:
        group["lr"] = learning_rate(session.run, progress.iteration)
    t0, cpu = time.perf_counter(), time.process_time()
    experience = collect(session, progress.iteration)
    if progress.optimizer_steps == 0:
        selfcheck.check(session, experience)
    t1 = time.perf_counter()
    metrics = experience.metrics | update(session, experience, progress.iteration)
    t2 = time.perf_counter()
    progress.iteration += 1
    progress.optimizer_steps += session.run.train.updates
    session.policies.follow(progress.optimizer_steps)
    guard(session, progress, metrics, alarms)
    return metrics | {
        "lr": session.optimizer.param_groups[0]["lr"],
        "seconds": t2 - t0,
        "seconds/update": t2 - t1,
        "seconds/cpu": time.process_time() - cpu,  # of this process, all its threads
    }


def learning_rate(run: Run, iteration: int) -> float:
    """A pure function of the iteration, so that nothing needs to be saved."""
    t = run.train
    warm = min(1.0, (iteration + 1) / (t.schedule.warmup + 1))
    share = iteration / t.iterations
    decay = {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share))}
    return t.lr * warm * decay[t.schedule.name]


def start(run: Run, name: str, folder: Path | None) -> Result:
    """A new run in a new folder. Errors: UserError if the folder exists."""
    state = PartialState(cpu=on_cpu(run))
    box: list[Any] = [str(reserve(folder, name)) if state.is_main_process else ""]
    broadcast_object_list(box)  # numbers could race: all processes use the main one's
    chosen = Path(box[0])
    try:
        session = open_session(run, chosen, open_accelerator(run, chosen))
    except UserError:
        if state.is_main_process:
            chosen.rmdir()  # still empty
        raise
    if state.is_main_process:
        record.replace(chosen / "run.yaml", yaml.safe_dump(dump(run), sort_keys=False))
    session.accelerator.init_trackers("flowrl", config=_flat(dump(run)))
    return train(session)


def reserve(folder: Path | None, name: str) -> Path:
    """Make the run's folder: the given one, or the next free number below `runs`."""
    chosen = folder or numbered(Path("runs"), name)
    try:
        chosen.mkdir(parents=True)
    except FileExistsError as error:
        if folder is None:
            return reserve(None, name)  # another run took the number in between
        raise UserError(f"{chosen} exists; give another --folder, or --resume {chosen}") from error
    return chosen


def resume(run: Run, folder: Path) -> Result:
    """Go on from the newest whole checkpoint of a run's folder; from the start if there is none."""
    session = open_session(run, folder, open_accelerator(run, folder))
    session.accelerator.init_trackers("flowrl", config=_flat(dump(run)))
    return train(session, checkpoint.newest(folder))


def _flat(tree: dict[str, Any], at: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{at}.{key}" if at else key
        flat |= _flat(value, name) if isinstance(value, dict) else {name: str(value)}
    return flat
