"""Save and go on: folders written beside and renamed, so that a half-written one is never read."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from flowrl.errors import UserError
from flowrl.evaluate import evaluated
from flowrl.session import Session
from flowrl.statistics import Alarms


@dataclass
class Progress:
    """What a run knows beside its weights; all of it is in every checkpoint."""

    iteration: int = 0  # iterations done
    optimizer_steps: int = 0
    skipped_in_a_row: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_iteration: int | None = None
    first: dict[str, float] | None = None  # the base's evaluation
    last: dict[str, float] | None = None


def whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder, then put it in place under its name at once."""
    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write(beside)
    for path in beside.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    beside.rename(folder)


def save(session: Session, progress: Progress, alarms: Alarms) -> None:
    """`checkpoints/000010`: weights, averages, optimizer, progress. Keeps the newest few."""
    if session.accelerator.is_main_process:
        parent = session.folder / "checkpoints"

        def write(folder: Path) -> None:
            save_file(session.policies.state(), folder / "policies.safetensors")
            torch.save(session.optimizer.state_dict(), folder / "optimizer.pt")
            state = {
                "progress": asdict(progress),
                "alarms": alarms.state(),
                "tracker": session.tracker.state(),
            }
            (folder / "state.json").write_text(json.dumps(state))

        whole(parent / f"{progress.iteration:06d}", write)
        for old in sorted(parent.glob("[0-9]*"))[: -session.run.checkpoint.keep]:
            shutil.rmtree(old)
    session.accelerator.wait_for_everyone()


def newest(folder: Path) -> Path | None:
    return max((folder / "checkpoints").glob("[0-9]*"), default=None)


def restore(session: Session, checkpoint: Path, alarms: Alarms) -> Progress:
    try:
        state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
        session.policies.restore(load_file(checkpoint / "policies.safetensors"))
        session.optimizer.load_state_dict(
            torch.load(checkpoint / "optimizer.pt", weights_only=True)
        )
    except (OSError, KeyError, ValueError) as error:
        raise UserError(
            f"{checkpoint} cannot be read ({error}); delete it to go on from the one before"
        ) from error
    alarms.restore(state["alarms"])
    session.tracker.restore(state["tracker"])
    return Progress(**state["progress"])


def export(session: Session, folder: Path) -> None:
    """What plain diffusers loads: the adapter, or the whole pipeline after full training."""
    if session.accelerator.is_main_process:
        with session.policies.using(evaluated(session)):
            whole(folder, session.policy.save)
    session.accelerator.wait_for_everyone()


def keep_best(session: Session, progress: Progress, score: float) -> bool:
    """Export into `best/000010` if the score is the highest so far, then drop the older best."""
    if progress.best is not None and not score > progress.best:
        return False
    progress.best, progress.best_iteration = score, progress.iteration
    parent = session.folder / "best"
    export(session, parent / f"{progress.iteration:06d}")
    if session.accelerator.is_main_process:
        for old in parent.glob("[0-9]*"):
            if old.name != f"{progress.iteration:06d}":
                shutil.rmtree(old)
    return True
