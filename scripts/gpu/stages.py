"""The stages of a visit to a machine with one GPU, in the order in which they run.

A stage is a process of its own, since an error of CUDA poisons the process that meets it. Its
module has `measure(trial)`. It may take its start and three times its predicted seconds, at most
`most`; predictions are in predicted.json, which scripts/gpu/predict.py writes before a visit.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import UserError

PREDICTED = Path(__file__).with_name("predicted.json")
START = 30.0  # seconds of a process until it measures: imports, and a context of CUDA
Predicted = dict[str, float]


@dataclass(frozen=True)
class Stage:
    """A stage of a visit.

    most    seconds that it may take at most
    call    the call of the machine that it belongs to: 1 or 2
    needed  whether the visit ends if it fails
    words   of the interpreter that runs it; by default scripts/gpu/trial.py does
    """

    name: str
    about: str
    most: float
    call: int = 1
    needed: bool = False
    words: tuple[str, ...] = ()

    def limit(self, predicted: Predicted) -> float:
        """Seconds after which the stage is ended."""
        return min(self.most, START + 3 * predicted["seconds"])


STAGES = (
    Stage("start", "imports, a tiny update, what the device can do, its ceilings", 75, needed=True),
    Stage("attention", "gradients of attention by backend, dtype, width, length and mask", 100),
    Stage(
        "beside", "SD3.5-medium's size: beside plain loops of its calls, and other trainers", 240
    ),
    Stage("flux", "FLUX.1-dev's size: an iteration, its peak, its densities", 150),
    Stage("wan", "Wan 2.1 14B's size: an iteration, its peak", 200, call=2),
    Stage("savings", "rows per call, merged adapters, CUDA graphs at SD3.5-medium's size", 150, 2),
    Stage("compile", "blocks compiled, cold and warm, at SD3.5-medium's size", 120, call=2),
)


def predictions(file: Path = PREDICTED) -> dict[str, Predicted]:
    """The predicted figures of each stage. UserError unless every stage has predicted seconds."""
    if not file.is_file():
        raise UserError(f"{file}: there are no predictions: python scripts/gpu/predict.py")
    found = json.loads(file.read_text())
    lacking = [stage.name for stage in STAGES if "seconds" not in found.get(stage.name, {})]
    if lacking:
        raise UserError(
            f"{file}: no predicted seconds of {', '.join(lacking)}: python scripts/gpu/predict.py"
        )
    return found
