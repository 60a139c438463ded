"""Save and go on: folders written beside and renamed, so that a half-written one is never read."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flowrl.errors import UserError
from flowrl.media.statistics import Alarms
from flowrl.models.policy import Policy
from flowrl.processes.sharding import load_state, whole_state
from flowrl.run.atomic import damage, put_away, reason, write_folder
from flowrl.run.evaluate import evaluated
from flowrl.run.session import EVALUATION, Session
from flowrl.settings import Run

POLICIES_FILE = "policies.safetensors"


@dataclass
class Progress:
    """What a run knows beside its weights; all of it is in every checkpoint."""

    iteration: int = 0  # iterations done
    optimizer_steps: int = 0
    skipped_in_a_row: int = 0  # optimizer steps without a finite gradient
    seconds: float = 0.0
    best: float | None = None
    best_iteration: int | None = None
    first: dict[str, float] | None = None  # the base's evaluation
    last: dict[str, float] | None = None


def save_checkpoint(session: Session, progress: Progress, alarms: Alarms) -> None:
    """`checkpoints/000010`: weights, averages, optimizer, progress. Keeps the newest few."""
    weights = session.policies.state()  # pieces of it are gathered, by all
    moments = whole_state(session.optimizer, session.policies.parameters.values())
    with session.parallel.together():
        if session.parallel.main:
            parent = session.folder / "checkpoints"

            def write(folder: Path) -> None:
                save_file(weights, folder / POLICIES_FILE)
                torch.save(moments, folder / "optimizer.pt")
                torch.save(session.spending.state(), folder / "budget.pt")
                state = {
                    "progress": asdict(progress),
                    "alarms": alarms.state(),
                    "tracker": session.tracker.state(),
                    "scaler": session.scaler.state_dict(),
                }
                (folder / "state.json").write_text(json.dumps(state))

            write_folder(parent / f"{progress.iteration:06d}", write, listed=True)
            kept = [old for old in _sorted(session.folder) if int(old.name) <= progress.iteration]
            for old in {*_sorted(session.folder)} - {*kept[-session.run.checkpoint.keep :]}:
                put_away(old)  # a later one was damaged: this run came back from before it


def _sorted(folder: Path) -> list[Path]:
    found = (folder / "checkpoints").glob("[0-9]*")
    return sorted(path for path in found if path.name.isdigit())


def newest(folder: Path, warn: Callable[[str], None] = print) -> Path | None:
    """The newest whole checkpoint of a run; `warn` hears of damaged ones. None if there is none.

    UserError if there are some, and all of them are damaged.
    """
    found = _sorted(folder)
    wrong = ""
    for checkpoint in reversed(found):
        wrong = damage(checkpoint)
        if wrong is None:
            return checkpoint
        warn(f"{checkpoint} is damaged ({wrong}); going back to the one before")
    if found:
        raise UserError(
            f"no whole checkpoint in {folder / 'checkpoints'} ({wrong}); "
            "remove that folder to train from the start"
        )
    return None


def restore(session: Session, checkpoint: Path, alarms: Alarms) -> Progress:
    """Everything is read before anything is changed."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
        weights = load_file(checkpoint / POLICIES_FILE)
        optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        spent = torch.load(checkpoint / "budget.pt", weights_only=True)
        parameters = session.policies.parameters.values()
        session.policies.restore(weights)
        load_state(session.optimizer, parameters, optimizer)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise UserError(
            f"{checkpoint} does not fit this run ({reason(error)}); "
            "delete it to go on from the one before"
        ) from error
    alarms.restore(state["alarms"])
    session.tracker.restore(state["tracker"])
    session.spending.restore(spent)
    session.scaler.load_state_dict(state["scaler"])
    return Progress(**state["progress"])


def bring(policy: Policy, run: Run, checkpoint: Path) -> None:
    """Into a policy that was just loaded: the weights that evaluations look at."""
    name = "current" if run.evaluate.average is None else EVALUATION
    try:
        state = load_file(checkpoint / POLICIES_FILE)
        with torch.no_grad():
            for key, parameter in policy.trainable().items():
                parameter.copy_(state[f"{name}/{key}"])
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{checkpoint} does not fit this run ({reason(error)})") from error


def export(session: Session, folder: Path, which: str | None = None) -> None:
    """What plain diffusers loads: the adapter, or the whole pipeline after full training.

    `which` of the policies; by default the one that evaluations look at.
    """
    parallel, policy = session.parallel, which or evaluated(session)
    with session.policies.using(policy), parallel.gathered(), parallel.together():
        if parallel.main:
            write_folder(folder, session.policy.save)


def export_last(session: Session) -> Path:
    """The last weights. Where those are an average, the raw ones too, in `adapter_raw`."""
    folder = session.folder / session.run.exported
    export(session, folder)
    if evaluated(session) != "current":
        export(session, folder.with_name(f"{folder.name}_raw"), "current")
    return folder


def keep_best(session: Session, progress: Progress, score: float) -> bool:
    """Export into `best/000010` if the score is the highest so far, then drop the older best."""
    if progress.best is not None and not math.isnan(progress.best) and not score > progress.best:
        return False
    progress.best, progress.best_iteration = score, progress.iteration
    parent = session.folder / "best"
    export(session, parent / f"{progress.iteration:06d}")
    if session.accelerator.is_main_process:
        for old in parent.glob("[0-9]*"):
            if old.name != f"{progress.iteration:06d}":
                put_away(old)
    return True
