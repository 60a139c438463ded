"""The numbers of a checkpoint, `state.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.bounded_files import bounded_json
from flowrl.json_text import restored_number

STATE_FILE = "state.json"
MOST_STATE = 2**27  # bytes: statistics of a million prompts have fewer


def read_state(checkpoint: Path) -> Mapping[str, Any]:
    """Read the numbers of a checkpoint. OSError, and ValueError for anything but an object."""
    state = bounded_json(checkpoint / STATE_FILE, MOST_STATE, restored_number)
    if not isinstance(state, Mapping):
        raise ValueError(f"{STATE_FILE} does not hold an object")
    return state
