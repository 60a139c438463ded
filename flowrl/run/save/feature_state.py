"""State of features in a checkpoint: where a session holds it, and the file that it goes to.

    tracker  statistics of credit: numbers in state.json
    budget   success rates and kept successes: budget.pt
    ahead    iterations that are sampled before they are learned from: numbers in state.json, and
             the weights that sample them in sampling.safetensors
    votes    of a run that asks people: votes.pt

A run without one of them writes an empty tracker and budget, and nothing of the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flowrl.credit.trackers import TRACKER
from flowrl.session.session import ASKING, SOURCE, SPENDING, Session
from flowrl.session.stored_tensors import stored_torch, stored_weights
from flowrl.session.writer import copied

BUDGET_FILE = "budget.pt"
SAMPLING_FILE = "sampling.safetensors"
VOTES_FILE = "votes.pt"


@dataclass(frozen=True)
class FeatureState:
    """The state of a run's features, as a copy that nothing else changes.

    numbers  entries of state.json
    files    contents of the files beside it, by name: a mapping of tensors for safetensors, or what
             torch.save takes
    """

    numbers: Mapping[str, Any]
    files: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        for name, contents in self.files.items():
            if name.endswith(".safetensors"):
                save_file(contents, folder / name)
            else:
                torch.save(contents, folder / name)


def taken_from(session: Session, iteration: int) -> FeatureState:
    """The state of a session's features after this many iterations."""
    table = session.table
    spent = table[SPENDING].state() if SPENDING in table else {}
    numbers: dict[str, Any] = {"tracker": table[TRACKER].state() if TRACKER in table else {}}
    files: dict[str, Any] = {BUDGET_FILE: copied(spent)}
    if SOURCE in table:
        numbers["ahead"], sampling = table[SOURCE].state(iteration)
        if sampling:  # none without `workers.lag`
            files[SAMPLING_FILE] = dict(sampling)
    if ASKING in table:
        files[VOTES_FILE] = dict(table[ASKING].state())
    return FeatureState(numbers, files)


def read_features(
    session: Session, checkpoint: Path, state: Mapping[str, Any]
) -> Callable[[], None]:
    """Read what a checkpoint has of the session's features. Nothing changes until the result is
    called. Errors of the files, and a KeyError for numbers that `state` lacks."""
    table, spent = session.table, stored_torch(checkpoint / BUDGET_FILE)
    asks = ASKING in table and (checkpoint / VOTES_FILE).is_file()
    votes = stored_torch(checkpoint / VOTES_FILE) if asks else None
    ahead: Mapping[str, Any] = state.get("ahead", {})  # without workers there is none
    sampling = stored_weights(checkpoint / SAMPLING_FILE) if ahead else {}
    tracked = state["tracker"] if TRACKER in table else {}

    def restore() -> None:
        if TRACKER in table:
            table[TRACKER].restore(tracked)
        # a run that was begun without a budget has nothing to remember
        if spent and SPENDING in table:
            table[SPENDING].restore(spent)
        if votes is not None:
            table[ASKING].restore(votes)
        if ahead and SOURCE in table:
            table[SOURCE].restore(ahead, sampling)

    return restore
