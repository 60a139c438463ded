"""Checkpoints, exported and best weights: folders that are complete or absent."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from shlex import quote
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file

from flowrl.errors import UnusableCheckpoint, UserError
from flowrl.json_text import exact_text, read_exact
from flowrl.models.policy import Policy
from flowrl.models.rewritten import RewrittenPolicy
from flowrl.run.save.feature_state import FeatureState, read_features, taken_from
from flowrl.run.save.model_state import (
    check_saved_model,
    model_moments,
    model_numbers,
    model_weights,
    named_moments,
    optimizer_file,
    restore_model,
)
from flowrl.run.watch.alarms import Alarms
from flowrl.session import record
from flowrl.session.atomic import damage, numbered_folders, put_away, reason, write_folder
from flowrl.session.finite import first_not_finite, refuse
from flowrl.session.learner import Learner, evaluated
from flowrl.session.policies import NamedWeights
from flowrl.session.progress import Incomparable, Progress
from flowrl.session.session import Session
from flowrl.session.state_file import STATE_FILE, read_state
from flowrl.session.stored_tensors import stored_torch, stored_weights
from flowrl.session.writer import copied
from flowrl.settings import RunSettings
from flowrl.settings.sections.run import EVALUATION
from flowrl.settings.words.sentences import explain

POLICIES_FILE = "policies.safetensors"
# errors of a checkpoint with other contents than this run's; a missing key or a wrong type are too
MISFITS = (
    OSError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    RecursionError,
    SafetensorError,
    UnpicklingError,
)


class OlderCheckpoint(UnusableCheckpoint):
    """A checkpoint of a version that this one no longer reads."""


_PROGRESS, _ALARMS = TypeAdapter(Progress), TypeAdapter(Alarms)


def take_state(session: Session, iteration: int) -> "SavedState":
    """Copy what a checkpoint of this iteration holds besides progress and alarms; nothing where
    another process writes. NotFiniteError if a weight or the optimizer's state is not finite."""
    chain = session.learner.chain
    weights = {
        k: v for learner in chain for k, v in model_weights(learner).items()
    }  # by all processes
    moments = {learner.name: model_moments(learner) for learner in chain}
    saved = SavedState({}, {}, FeatureState({}, {}), "{}")
    with session.parallel.together():
        if session.parallel.main:
            pairs = [pair for of_model in moments.values() for pair in named_moments(of_model)]
            if (bad := first_not_finite([*weights.items(), *pairs])) is not None:
                refuse(f"{bad} of checkpoint {iteration}, which was not written,")
            features = taken_from(session, iteration)
            state = {
                **features.numbers,
                "origin": session.start_record.state() if session.start_record else None,
                **model_numbers(session.learner),
                **{learner.name: model_numbers(learner) for learner in chain[:-1]},
            }
            saved = SavedState(weights, copied(moments), features, exact_text(state))
    return saved


def save_checkpoint(
    session: Session, progress: Progress, alarms: Alarms, state: "SavedState | None" = None
) -> None:
    """Write `checkpoints/000010`: weights, averages, optimizer, progress. Keeps only the newest
    checkpoints.

    Weights that are no longer the best are deleted afterwards, because the previous checkpoint
    needs them until then. The state is copied first (or was, as `taken`), because the session's
    writer may write it during the next iteration. Raise a NotFiniteError if a weight or the
    optimizer's state is not finite; the previous checkpoint then stays the newest.
    """
    state = state or take_state(session, progress.iteration)
    with session.parallel.together():
        if session.parallel.main:
            counters = {"progress": asdict(progress), "alarms": alarms.state()}
            saved = replace(state, state=exact_text(counters | read_exact(state.state)))
            keep, reached = session.run.checkpoint.keep, replace(progress)
            session.writer.check()
            session.writer.write(lambda: saved.write(session.folder, reached, keep))


@dataclass(frozen=True)
class SavedState:
    """Contents of a checkpoint, as a copy that nothing else changes.

    moments   of the optimizers, by the name of their model
    features  files of features beside the state
    state     a JSON object, as text
    """

    weights: Mapping[str, torch.Tensor]
    moments: Mapping[str, Any]
    features: FeatureState
    state: str

    def write(self, run_folder: Path, progress: Progress, keep: int) -> None:
        """Write the checkpoint's folder, then remove files that no checkpoint needs any more."""
        if not run_folder.is_dir():  # writing would make another one in its place
            raise UserError(f"{run_folder} could not be written: it is no longer there")
        parent = run_folder / "checkpoints"
        write_folder(parent / f"{progress.iteration:06d}", self._fill, listed=True)
        folders = numbered_folders(parent)
        reached = [old for old in folders if int(old.name) <= progress.iteration]
        for old in {*folders} - {*reached[-keep:]}:
            put_away(old)  # older ones, and damaged later ones that the run came back from
        drop_other_best(run_folder, progress)

    def _fill(self, folder: Path) -> None:
        save_file(dict(self.weights), folder / POLICIES_FILE)
        for name, moments in self.moments.items():
            torch.save(moments, folder / optimizer_file(name))
        self.features.write(folder)
        (folder / STATE_FILE).write_text(self.state)


def newest(folder: Path, warn: Callable[[str], None] = print) -> Path | None:
    """Newest intact checkpoint of a run, or None without checkpoints. Warns about damaged ones.

    UnusableCheckpoint if all are damaged; UserError if all are gone although the record shows that
    there were some.
    """
    checkpoints = numbered_folders(folder / "checkpoints")
    wrong, damaged = "", list[tuple[Path, str]]()
    for checkpoint in reversed(checkpoints):
        wrong = damage(checkpoint)
        if wrong is None:
            for broken, fault in damaged:
                warn(
                    f"{broken} is damaged ({fault}); this run goes on from {checkpoint}, and the "
                    f"damaged one is kept as {aside(broken)}"
                )
            return checkpoint
        damaged.append((checkpoint, wrong))
    if checkpoints:
        raise UnusableCheckpoint(
            f"no intact checkpoint in {folder / 'checkpoints'} ({wrong}); {_anew(folder)}"
        )
    _refuse_lost(folder)
    return None


def aside(checkpoint: Path) -> Path:
    """The name under which a damaged checkpoint is kept, so that nothing takes its place before it
    was seen."""
    return checkpoint.with_name(f"damaged-{checkpoint.name}")


def set_aside(folder: Path, newest: Path) -> None:
    """Rename the damaged checkpoints behind the newest intact one."""
    for checkpoint in numbered_folders(folder / "checkpoints"):
        if int(checkpoint.name) > int(newest.name):
            if aside(checkpoint).exists():
                put_away(aside(checkpoint))
            checkpoint.rename(aside(checkpoint))


def _anew(folder: Path) -> str:
    return (
        f"to train from the start, begin a new run: flowrl train {quote(str(folder / 'run.yaml'))}"
    )


def _refuse_lost(folder: Path) -> None:
    """UserError if a run without checkpoints once had some: beginning again in its folder would
    remove its record and its weights. Checkpoint 0 is written before iteration 1 is recorded, or
    is left half written."""
    iterations = record.last_iteration(folder / record.METRICS)
    if iterations > 0 and not any((folder / "checkpoints").glob(".*.tmp")):
        raise UserError(
            f"{folder} has no checkpoint, but {record.METRICS} records {iterations} iterations: "
            f"if its folder checkpoints was moved away, put it back; {_anew(folder)}"
        )


def restore(session: Session, checkpoint: Path, alarms: Alarms) -> Progress:
    """Restore weights, optimizer and counters. Everything is read before anything changes.

    UnusableCheckpoint if it does not fit, or holds weights that are not finite.
    """
    try:
        state = read_state(checkpoint)
        weights = stored_weights(checkpoint / POLICIES_FILE)
        optimizers = {
            learner.name: stored_torch(checkpoint / optimizer_file(learner.name))
            for learner in session.learner.chain
        }
        _refuse_older(state, checkpoint)
        restore_features = read_features(session, checkpoint, state)
        progress, alarm_state = _checked(state, checkpoint)
        bad = first_not_finite(weights.items())
        if bad is not None:
            raise UnusableCheckpoint(
                f"{bad} of {checkpoint} is not finite (NaN or infinity); {_without(checkpoint)}"
            )
        for learner in session.learner.chain:
            check_saved_model(learner, weights, optimizers[learner.name])
        for learner in session.learner.chain:
            learner_state = state[learner.name] if learner.name else state
            restore_model(learner, learner_state, weights, optimizers[learner.name])
        if not alarms.restore(alarm_state):
            session.terminal.say("the checkpoint is from an older version; alarms start over")
        if old := session.parallel.every(Incomparable.of(session.run, checkpoint))[0]:
            session.terminal.say(str(old))
            progress.forget(old)
            alarms.forget(old.concerns)
        restore_features()
    except UnusableCheckpoint:
        raise
    except MISFITS as error:
        raise UnusableCheckpoint(
            f"{checkpoint} does not fit this run ({reason(error)}); {_without(checkpoint)}"
        ) from error
    return progress


def _without(checkpoint: Path) -> str:
    """The way on for a run without one of its checkpoints."""
    folder = checkpoint.parent.parent
    older = [one for one in numbered_folders(checkpoint.parent) if one < checkpoint]
    before = next((one for one in reversed(older) if damage(one) is None), None)
    if before is None:
        return f"no other checkpoint is whole: {_anew(folder)}"
    return (
        f"the whole one before it is {before}: to go on from it, `mv {quote(str(checkpoint))} "
        f"{quote(str(aside(checkpoint)))}`, then flowrl train --resume {quote(str(folder))}"
    )


def _refuse_older(state: Mapping[str, Any], checkpoint: Path) -> None:
    """OlderCheckpoint for one that was written before commit 26ca889: it has no sizes of calls, or
    still has what alarms once tested."""
    if "call_sizes" not in state or "evidence" in state["alarms"]:
        raise OlderCheckpoint(
            f"{checkpoint} was written before commit 26ca889, which still reads it: resume the run "
            "there until it has written a checkpoint of its own, and then here"
        )


def progress_of(checkpoint: Path) -> Progress:
    """Counters of a checkpoint. UserError if they cannot be read."""
    try:
        state = read_state(checkpoint)
        return _PROGRESS.validate_python(state["progress"])
    except MISFITS as error:
        raise UserError(f"{checkpoint}: state.json cannot be read ({reason(error)})") from error


def _checked(state: Mapping[str, Any], checkpoint: Path) -> tuple[Progress, Mapping[str, Any]]:
    """Check the types and plausibility of a state's numbers. Returns the progress and the alarms'
    state, which may come from an older version. ValueError, in a sentence."""
    # older versions counted no iterations outside of healthy ranges
    alarms: dict[str, Any] = {"outside": {}, **state["alarms"]}
    try:
        progress = _PROGRESS.validate_python(state["progress"])
        if alarms.keys() == Alarms().state().keys():
            valid = _ALARMS.validate_python(alarms)
            valid.check(progress.iteration)
            alarms = valid.state()  # its numbers are floats now, also those that JSON reads as int
    except ValidationError as error:
        raise ValueError(f"state.json: {explain(error)}") from error
    if progress.iteration != int(checkpoint.name) or not 0 <= progress.seconds < math.inf:
        raise ValueError(f"state.json: {progress.iteration} iterations, {progress.seconds} seconds")
    return progress, alarms


def check_best(folder: Path, progress: Progress, warn: Callable[[str], None]) -> None:
    """Forget the best score, with a message, if its weights are missing or damaged."""
    if progress.best_iteration is None:
        return
    best = folder / "best" / f"{progress.best_iteration:06d}"
    wrong = damage(best) if best.is_dir() else "it is missing"
    if wrong is not None:
        warn(f"{best} is damaged ({wrong}); the next evaluation counts as the best")
        progress.best = progress.best_iteration = None


def drop_other_best(folder: Path, progress: Progress) -> None:
    """Remove all weights from `best/` except those of the best evaluation."""
    if progress.best_iteration is not None:
        for old in numbered_folders(folder / "best"):
            if int(old.name) != progress.best_iteration:
                put_away(old)


def bring(policy: Policy | RewrittenPolicy, run: RunSettings, checkpoint: Path) -> None:
    """Load the weights that evaluations use into a newly opened policy."""
    name = "current" if run.evaluate.average is None else EVALUATION
    try:
        state = stored_weights(checkpoint / POLICIES_FILE)
        with torch.no_grad():
            for key, parameter in policy.trainable().items():
                parameter.copy_(state[f"{name}/{key}"])
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{checkpoint} does not fit this run ({reason(error)})") from error


def export(learner: Learner, folder: Path, which: str | None = None, listed: bool = False) -> None:
    """Write files that plain diffusers loads: the adapter, or the whole pipeline if all weights are
    trained.

    `which`: the policy's name; by default the policy that evaluations use. `listed` adds a list of
    checksums. NotFiniteError on all processes, and no file, for weights that are not finite.
    """
    parallel = learner.parallel
    with learner.using(which or evaluated(learner.run)):
        with parallel.together():
            models = [learner.policies for learner in learner.chain]
            bad = first_not_finite(
                pair for model in models for pair in model.local(model.network).items()
            )
            if bad is not None:
                refuse(f"the weight {bad} of {folder.name}, which was not written,")
        with parallel.gathered(), parallel.together():
            if parallel.main:
                write_folder(folder, learner.save, listed)


def export_last(learner: Learner, run_folder: Path) -> Path:
    """Export the final weights. If these are an average, also export the raw weights to
    `adapter_raw`."""
    folder = run_folder / learner.run.exported
    export(learner, folder)
    if evaluated(learner.run) != "current":
        export(learner, folder.with_name(f"{folder.name}_raw"), "current")
    return folder


def keep_best(
    learner: Learner,
    run_folder: Path,
    progress: Progress,
    score: float,
    earlier: NamedWeights | None = None,
) -> bool:
    """Export into `best/000010` if the score is the highest so far. `earlier`: the weights that
    were evaluated, if they have changed since.

    The older best weights stay until a checkpoint records the new ones: see `save_checkpoint`.
    """
    if progress.best is not None and not math.isnan(progress.best) and not score > progress.best:
        return False
    progress.best, progress.best_iteration = score, progress.iteration
    folder = run_folder / "best" / f"{progress.iteration:06d}"
    with learner.policies.earlier(evaluated(learner.run), earlier) as which:
        export(learner, folder, which, listed=True)
    return True
