"""The training loop: collect, update, average, evaluate. It names no algorithm."""

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

from flowrl.models.call_sizes import bounded_call
from flowrl.run.call_search import search_sizes
from flowrl.run.experience.collect import Experience
from flowrl.run.experience.experience import experience_of
from flowrl.run.model_proof import StartProof
from flowrl.run.save import checkpoint
from flowrl.run.save.checkpoint import Progress
from flowrl.run.save.failures import resumable, starting
from flowrl.run.show.monitor import (
    evaluate_and_keep,
    guard,
    guard_held_out,
    panel_facts,
    prove_pipeline,
)
from flowrl.run.show.page_records import record_start, record_tree, renew_page
from flowrl.run.show.track import SHOW_HISTOGRAMS, finishing, show_histograms
from flowrl.run.show.training_samples import save_training_samples
from flowrl.run.state.finite import check_iteration
from flowrl.run.state.live import Event, Moment
from flowrl.run.state.session import Session
from flowrl.run.state.signals import Interrupt
from flowrl.run.state.smaller_calls import explained, with_smaller_calls
from flowrl.run.update import ratio_check
from flowrl.run.update.update import update
from flowrl.run.watch import record
from flowrl.run.watch.alarms import Alarms
from flowrl.run.watch.histograms import IterationValues
from flowrl.settings import Run
from flowrl.settings.read import dump, read_run


@dataclass
class Result:
    """The result of a run: evaluations of the base and of the last weights, or the signal."""

    folder: Path
    signal: int | None = None  # that interrupted it
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    weights: Path | None = None  # exported, once done
    main: bool = True  # whether this process prints

    @property
    def done(self) -> bool:
        return self.weights is not None


def train_session(session: Session, resume: Path | None = None, cache: bool = True) -> Result:
    """Run to the end, or to an interruption, which saves. `resume` is a checkpoint's folder.

    Without `cache` the model is proven again even if a proof is kept.
    """
    main = session.accelerator.is_main_process
    failures = resumable(session.folder)
    explaining = explained(session.run, session.learner.policy)
    with failures, explaining, closing(session.learner.policy), Interrupt() as interrupt:
        with finishing(session.accelerator), session.writer.beside():
            with starting(session.folder):
                progress, alarms = begin(session, resume, cache)
            stop = interrupt.pending(session.accelerator)
            if not stop:
                with following(session, progress):
                    stop = training_loop(session, progress, alarms, interrupt)
            with session.parallel.together():
                session.writer.wait()
        if stop:
            renew_page(session)
            return Result(session.folder, stop, main=main)
        weights = checkpoint.export_last(session.learner, session.folder)
        renew_page(session)
    ends = (progress.first or {}, progress.last or {})
    return Result(session.folder, None, *ends, weights, main)


def begin(session: Session, resume: Path | None, cache: bool) -> tuple[Progress, Alarms]:
    """Check the model and the rewards, then evaluate the base or restore a checkpoint."""
    terminal, alarms, progress = session.terminal, Alarms(), Progress()
    if resume is not None:
        progress = checkpoint.restore(session, resume, alarms)
        checkpoint.check_best(session.folder, progress, terminal.warn)
    with session.parallel.together():
        if session.parallel.main:
            last = -1 if resume is None else progress.iteration
            record.cut_back(session.folder, last, terminal.warn)
            checkpoint.drop_other_best(session.folder, progress)
    after = f", going on after iteration {progress.iteration}" if progress.iteration else ""
    terminal.say(f"run folder: {session.folder}{after}\n{session.parallel}\n{session.learner}")
    proof = StartProof(session, cache)
    with session.parallel.together():
        prove_pipeline(session, proof)
    if resume is None:  # a checkpoint has the sizes that were found
        search_sizes(session)
    terminal.say(f"rows per call: {session.learner.policy.sizes}")
    record_start(session, progress.iteration, resume is not None)
    with session.parallel.together():
        if session.parallel.main:
            keep_settings(session)
    if resume is None:
        base = evaluate_and_keep(session, progress, "before")
        alarms.compare(base, progress.iteration)
        session.accelerator.log(base, step=0)
        renew_page(session)
        announce(session, progress, {"evaluation": base} if base else {})
        save(session, progress, alarms)
    proof.keep()
    return progress, alarms


def keep_settings(session: Session) -> None:
    """Bring run.yaml up to date with settings that this start has accepted."""
    path = session.folder / "run.yaml"
    if not path.exists() or dump(read_run(path)) != dump(session.run):
        record.replace(path, yaml.safe_dump(dump(session.run), sort_keys=False))


def following(session: Session, progress: Progress) -> AbstractContextManager[None]:
    """Draw the panel inside, unless `track.panel` turns it off."""
    if not session.run.track.panel:
        return nullcontext()
    return session.terminal.panel(panel_facts(session, progress), session.parallel.device)


def training_loop(
    session: Session, progress: Progress, alarms: Alarms, interrupt: Interrupt
) -> int | None:
    """Iterate to the end, or to a signal, which is returned."""
    run, began, start = session.run, time.perf_counter(), progress.seconds
    while progress.iteration < run.train.iterations:
        metrics = iterate(session, progress, alarms)
        moments: dict[Moment, dict[str, float]] = {"iteration": dict(metrics)}
        progress.seconds = start + time.perf_counter() - began
        session.terminal.iteration(progress.iteration, metrics, progress.seconds)
        last = progress.iteration == run.train.iterations
        evaluates = last or progress.iteration % run.evaluate.every == 0
        if evaluates:
            held_out = evaluate_and_keep(session, progress, "after" if last else None)
            moments |= {"evaluation": held_out} if held_out else {}
            metrics |= held_out
            guard_held_out(session, progress, metrics, alarms)
        session.accelerator.log(metrics, step=progress.iteration)
        if evaluates and not last:  # after the last one it is written with the weights
            renew_page(session)
        announce(session, progress, moments)
        stop = interrupt.pending(session.accelerator)
        if last or stop or progress.iteration % run.checkpoint.every == 0:
            save(session, progress, alarms)
        if stop and not last:
            return stop
    return None


def save(session: Session, progress: Progress, alarms: Alarms) -> None:
    checkpoint.save_checkpoint(session, progress, alarms)
    announce(session, progress, {"checkpoint": {}})


def announce(
    session: Session, progress: Progress, moments: Mapping[Moment, Mapping[str, float]]
) -> None:
    """Call the callbacks with these moments and their metrics, on the main process."""
    if not session.live.callbacks:
        return
    saved = session.folder / "checkpoints" / f"{progress.iteration:06d}"
    with session.parallel.together():
        session.writer.wait()  # a callback may read the files of its moment
        for kind, metrics in moments.items() if session.parallel.main else ():
            folder = saved if kind == "checkpoint" else session.folder
            session.live.call(Event(kind, progress.iteration, dict(metrics), folder))


def iterate(session: Session, progress: Progress, alarms: Alarms) -> dict[str, float]:
    """Do one iteration, advance `progress` and return the metrics.

    NotFiniteError, on all processes, if weights, averages, rewards or the loss are not finite.
    """
    for group in session.learner.optimizer.param_groups:
        group["lr"] = learning_rate(session.run, progress.iteration)
    t0, cpu = time.perf_counter(), time.process_time()
    experience = experience_of(session, progress.iteration)
    if progress.optimizer_steps == 0:
        compare = partial(_check_ratio, session, experience)
        with_smaller_calls(session.learner, session.terminal, compare)
    t1 = time.perf_counter()
    updated, seen = with_smaller_calls(
        session.learner, session.terminal, partial(_updated, session, experience, progress)
    )
    metrics = experience.metrics | updated
    t2 = time.perf_counter()
    progress.iteration += 1
    progress.optimizer_steps += session.run.train.updates
    session.learner.policies.follow(progress.optimizer_steps)
    check_iteration(experience.rows, session.learner.policies.named(), metrics, progress.iteration)
    metrics |= {
        "lr": session.learner.optimizer.param_groups[0]["lr"],
        "seconds": t2 - t0,
        "seconds/update": t2 - t1,
        "seconds/cpu": time.process_time() - cpu,  # of this process, all its threads
    }
    guard(session, progress, metrics, alarms, experience.unscored)
    save_training_samples(session, experience, progress.iteration)
    record_tree(session, experience, progress.iteration)
    if seen is not None:
        histograms = seen.histograms(session.parallel.every)
        show_histograms(session.accelerator, histograms, progress.iteration)
    return metrics


def _check_ratio(session: Session, experience: Experience) -> None:
    with session.parallel.together(), bounded_call("training"):
        ratio_check.check_ratio(session.learner, experience, session.terminal)


def _updated(
    session: Session, experience: Experience, progress: Progress
) -> tuple[dict[str, float], IterationValues | None]:
    """Take the optimizer steps; may be repeated while the first one is not taken."""
    shown = {*session.run.track.trackers} & {*SHOW_HISTOGRAMS}
    seen = IterationValues() if shown else None
    session.learner.optimizer.zero_grad(set_to_none=True)
    return update(session.learner, experience, progress, seen), seen


def learning_rate(run: Run, iteration: int) -> float:
    """Return the learning rate: a pure function of the iteration, so that nothing is saved."""
    t = run.train
    warm = min(1.0, (iteration + 1) / (t.schedule.warmup + 1))
    share = iteration / t.iterations
    decay = {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share))}
    return t.lr * warm * decay[t.schedule.name]
