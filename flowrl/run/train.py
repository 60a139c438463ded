"""The training loop: iterate, watch, evaluate, record, save. It names no algorithm."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from flowrl.errors import UserError
from flowrl.iteration.open import open_stages
from flowrl.iteration.records import Iteration
from flowrl.iteration.stages import Stages
from flowrl.run.call_search import search_sizes
from flowrl.run.evaluate.evaluate import ask_workers, evaluate_and_keep
from flowrl.run.evaluate.guard import (
    Raised,
    audible_falls,
    raised_by_evaluation,
    raised_by_training,
)
from flowrl.run.evaluate.start_checks import prove_pipeline
from flowrl.run.evaluate.trial import AskedTrial
from flowrl.run.model_proof import StartProof
from flowrl.run.save import checkpoint
from flowrl.run.save.failures import resumable, starting
from flowrl.run.show.observer import Observer
from flowrl.run.show.observers import open_observers
from flowrl.run.show.track import finishing
from flowrl.run.watch.alarms import Alarms
from flowrl.run.watch.until import early_end, note_goal
from flowrl.session import record
from flowrl.session.live import Event, Moment, Wish
from flowrl.session.progress import Progress
from flowrl.session.session import ASKING, Session
from flowrl.session.signals import Interrupt
from flowrl.session.smaller_calls import explained
from flowrl.settings.read import dump, read_run
from flowrl.settings.trust import record_again
from flowrl.whole_file import write_whole


@dataclass
class Result:
    """Result of a run: evaluations of the base and of the final weights, or the signal."""

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
    """Train to the end, or until an interruption, which saves. `resume` is a checkpoint's folder.

    Without `cache` the model is proven again even if a proof is cached.
    """
    main = session.accelerator.is_main_process
    failures = resumable(session.folder)
    explaining = explained(session.run, session.learner.policy)
    trackers = finishing(session.accelerator)  # they end last: a tracker costs no weights
    asking = closing(session.table[ASKING]) if ASKING in session.table else nullcontext()
    with failures, trackers, explaining, asking, closing(session.learner), Interrupt() as interrupt:
        with session.writer.beside():
            with starting(session.folder):
                loop = begin(session, resume, cache)
            stop = interrupt.pending(session.accelerator) or loop.run(interrupt)
            with session.parallel.together():
                session.writer.wait()
        if stop:
            loop.recorded()
            return Result(session.folder, stop, main=main)
        weights = checkpoint.export_last(session.learner, session.folder)
        loop.recorded()
    progress = loop.progress
    return Result(
        session.folder,
        first=progress.first or {},
        last=progress.last or {},
        weights=weights,
        main=main,
    )


def begin(session: Session, resume: Path | None, cache: bool) -> "TrainingLoop":
    """Check the model and the rewards, then evaluate the base or restore a checkpoint."""
    terminal, alarms, progress = session.terminal, Alarms(), Progress()
    if resume is not None:
        progress = checkpoint.restore(session, resume, alarms)
        progress.stopped = False
        checkpoint.check_best(session.folder, progress, terminal.warn)
    with session.parallel.together():
        if session.parallel.main:
            last = -1 if resume is None else progress.iteration
            record.cut_back(session.folder, last, terminal.warn)
            checkpoint.drop_other_best(session.folder, progress)
    after = f", resuming after iteration {progress.iteration}" if progress.iteration else ""
    terminal.say(f"run folder: {session.folder}{after}\n{session.parallel}\n{session.learner}")
    proof = StartProof(session, cache)
    with session.parallel.together():
        prove_pipeline(session, proof)
    if resume is None:  # a checkpoint has the sizes that were found
        search_sizes(session)
    terminal.say(f"rows per call: {session.learner.policy.sizes}")
    observers = open_observers(session, progress)
    values = any(observer.reads_values for observer in observers)
    stages = open_stages(session, progress, values)
    loop = TrainingLoop(session, progress, alarms, stages, observers)
    for observer in loop.observers:
        observer.on_start(resume is not None)
    with session.parallel.together():
        if session.parallel.main:
            keep_settings(session)
    if resume is None:
        loop.record_base()
    for sentence in audible_falls(session.run, alarms, progress.base_scores or {}):
        terminal.say(sentence)
    proof.keep()
    return loop


def keep_settings(session: Session) -> None:
    """Update run.yaml with settings that this start has accepted."""
    path = session.folder / "run.yaml"
    if not path.exists() or dump(read_run(path)) != dump(session.run):
        write_whole(path, yaml.safe_dump(dump(session.run), sort_keys=False), synced=True)
        record_again(session.folder, dump(session.run))


@dataclass(frozen=True)
class HeldLine:
    """An iteration whose line waits for an evaluation by workers, with its progress, and with its
    state if a checkpoint is due."""

    progress: Progress
    metrics: dict[str, float]
    asked: AskedTrial
    taken: checkpoint.SavedState | None


@dataclass(frozen=True)
class TrainingLoop:
    """The loop of a run, with its session, stages, progress, alarms and observers. `held` has at
    most one iteration, `wishes` what callbacks have asked for since the last one."""

    session: Session
    progress: Progress
    alarms: Alarms
    stages: Stages
    observers: Sequence[Observer] = ()
    held: list[HeldLine] = field(default_factory=list)
    wishes: set[Wish] = field(default_factory=set[Wish])

    def record_base(self) -> None:
        """Evaluate the model before any training, and save it as checkpoint 0."""
        base = self.evaluate()
        self.alarms.compare(base, self.progress.iteration)
        self.session.accelerator.log(base, step=0)
        self.recorded()
        self.announce({"evaluation": base} if base else {})
        self.fulfilled(base, evaluated=True)
        self.save()

    def run(self, interrupt: Interrupt) -> int | None:
        """Iterate to the end, or until a signal, which is returned."""
        began, start = time.perf_counter(), self.progress.seconds
        with ExitStack() as contexts:
            for observer in self.observers:
                contexts.enter_context(observer.during())
            while not self.over:
                iteration = iterate(self.stages, self.progress)
                self.progress.seconds = self.of_main(start + time.perf_counter() - began)
                if stop := self.finish(iteration, interrupt):
                    return stop
                del iteration  # its states would fill a GPU beside those of the next one
        if reason := early_end(self.session.run, self.progress):
            self.session.terminal.say(f"done after iteration {self.progress.iteration}: {reason}")
        return None

    @property
    def over(self) -> bool:
        """Whether the run's last iteration is done."""
        run, progress = self.session.run, self.progress
        return progress.iteration >= run.train.iterations or bool(early_end(run, progress))

    def of_main(self, seconds: float) -> float:
        """The main process's seconds, by which all decide together whether a run is done."""
        if self.session.run.train.until is None:
            return seconds
        return self.session.parallel.every(seconds)[0]

    def finish(self, iteration: Iteration, interrupt: Interrupt) -> int | None:
        """Observe, evaluate, record and save whatever is due after an iteration. Returns a signal
        that arrived before the last iteration."""
        session, run, metrics = self.session, self.session.run, iteration.metrics
        self.settle()
        self.alarm(raised_by_training(session, self.alarms, metrics, iteration.number), metrics)
        for observer in self.observers:
            observer.on_iteration(iteration)
        self.progress.samples += metrics.get("count/scored", 0.0)
        last = self.over
        evaluates = last or iteration.number % run.evaluate.every == 0
        waits = run.train.alarms != "stop" and not self.wishes  # both need the scores at once
        if evaluates and not last and waits:
            trial = ask_workers(session, iteration.number)
            if trial is not None:
                return self.hold(metrics, trial, interrupt)
        self.record(metrics, evaluates, last)
        saves = self.fulfilled(metrics, evaluated=evaluates)
        last = self.over  # a held-out score or a callback may have ended it
        stop = interrupt.pending(session.accelerator)
        if last or stop or saves or iteration.number % run.checkpoint.every == 0:
            self.save()
        return None if last else stop

    def record(
        self,
        metrics: dict[str, float],
        evaluates: bool,
        last: bool = False,
        request: AskedTrial | None = None,
    ) -> None:
        """Evaluate if it is due, and record the iteration's line."""
        session, number = self.session, self.progress.iteration
        moments: dict[Moment, dict[str, float]] = {"iteration": dict(metrics)}
        if evaluates:
            held_out = self.evaluate(request)
            moments |= {"evaluation": held_out} if held_out else {}
            metrics |= held_out
            note_goal(session.run, self.progress, held_out)
            if request is not None:
                metrics["seconds/waiting/evaluation"] = request.waited
            raised = raised_by_evaluation(session, self.alarms, metrics, number)
            self.alarm(raised, metrics)
        if request is None and early_end(session.run, self.progress):
            metrics["ended"] = 1.0
        session.accelerator.log(metrics, step=number)
        if evaluates and not last:  # after the last one it is written with the weights
            self.recorded()
        self.announce(moments)

    def fulfilled(self, metrics: dict[str, float], *, evaluated: bool) -> bool:
        """Do what callbacks have asked for, after an iteration whose line is `metrics`. Returns
        whether a checkpoint is among it."""
        session, progress, saves = self.session, self.progress, False
        while self.wishes:
            wishes = set(self.wishes)
            self.wishes.clear()
            saves |= "save" in wishes
            if "stop" in wishes:
                progress.stopped, metrics["ended"] = True, 1.0
            held_out = {} if evaluated or wishes == {"save"} else self.evaluate()
            evaluated = evaluated or wishes != {"save"}
            if held_out:
                metrics |= held_out
                note_goal(session.run, progress, held_out)
                raised = raised_by_evaluation(session, self.alarms, metrics, progress.iteration)
                self.alarm(raised, metrics)
            if held_out or "stop" in wishes:  # in the place of the iteration's line
                session.accelerator.log(metrics, step=progress.iteration)
                self.recorded()
            self.announce({"evaluation": held_out} if held_out else {})
        return saves

    def hold(
        self, metrics: dict[str, float], request: AskedTrial, interrupt: Interrupt
    ) -> int | None:
        """Hold an iteration's line, and its checkpoint if one is due, until the end of the next
        iteration, while workers evaluate. Returns a signal, which ends the wait."""
        session, progress = self.session, self.progress
        stop = interrupt.pending(session.accelerator)
        due = stop or progress.iteration % session.run.checkpoint.every == 0
        state = checkpoint.take_state(session, progress.iteration) if due else None
        self.held.append(HeldLine(progress.copy(), metrics, request, state))
        if stop:
            self.settle()
        return stop

    def settle(self) -> None:
        """Record what was held, as of its iteration."""
        for line in self.held:
            with self.progress.as_of(line.progress):
                self.record(line.metrics, True, request=line.asked)
                if line.taken is not None:
                    self.save(line.taken)
        self.held.clear()

    def evaluate(self, request: AskedTrial | None = None) -> dict[str, float]:
        """Evaluate and return the metrics; none without held-out prompts."""
        evaluation = evaluate_and_keep(self.session, self.progress, request)
        if evaluation is None:
            return {}
        for observer in self.observers:
            observer.on_evaluation(evaluation)
        return evaluation.metrics

    def alarm(self, raised: Raised, metrics: dict[str, float]) -> None:
        """Warn about signs of trouble, or stop before the next iteration (`train.alarms: stop`)."""
        session, progress = self.session, self.progress
        if not raised.texts:
            return
        for text in raised.texts:
            session.terminal.warn(text)
        for observer in self.observers:
            observer.on_alarms(raised.texts)
        if raised.signs and session.run.train.alarms == "stop" and not self.over:
            session.accelerator.log(metrics, step=progress.iteration)
            checkpoint.save_checkpoint(session, progress, self.alarms)
            self.recorded()
            raise UserError(f"stopped by train.alarms: stop; {' '.join(raised.signs)}")

    def recorded(self) -> None:
        for observer in self.observers:
            observer.on_record()

    def save(self, state: checkpoint.SavedState | None = None) -> None:
        checkpoint.save_checkpoint(self.session, self.progress, self.alarms, state)
        self.announce({"checkpoint": {}})

    def announce(self, moments: Mapping[Moment, Mapping[str, float]]) -> None:
        """Call the callbacks with these events and their metrics, on the main process."""
        session, number = self.session, self.progress.iteration
        if not session.live.callbacks or not moments:
            return
        wishes: set[Wish] = set()
        saved = session.folder / "checkpoints" / f"{number:06d}"
        with session.parallel.together():
            session.writer.wait()  # a callback may read the files of its moment
            for kind, metrics in moments.items() if session.parallel.main else ():
                folder = saved if kind == "checkpoint" else session.folder
                session.live.call(Event(kind, number, dict(metrics), folder, wishes))
        self.wishes.update(session.parallel.every(wishes)[0])  # the main process's


def iterate(stages: Stages, progress: Progress) -> Iteration:
    """Run one iteration and advance `progress`."""
    began, cpu_began = time.perf_counter(), time.process_time()
    iteration = stages.iterate(progress.iteration)
    progress.iteration += 1
    progress.optimizer_steps += iteration.updated.steps
    seconds = {
        "seconds": time.perf_counter() - began,
        "seconds/cpu": time.process_time() - cpu_began,  # of this process, all its threads
    }
    return replace(iteration, metrics={**iteration.metrics, **seconds})
