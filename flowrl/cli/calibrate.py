"""`flowrl calibrate`: calibrate the noise of each step for DenseGRPO, before a run."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flowrl.session.live import NOTHING_LIVE, Live
from flowrl.settings import RunSettings
from flowrl.settings.command_line.arguments import AtLeastOne, Word
from flowrl.settings.read import override


@dataclass
class Calibrate:
    """Find the noise of each step for dense_grpo from the gains of steps, in rounds of sampling
    without training. Every setting of a file is an option too."""

    config: Word[Path | None] = None
    """The file of a run."""
    rounds: AtLeastOne = 20
    """Number of rounds, each with the prompts of an iteration."""
    within: AtLeastOne = 2
    """A step gets more noise if the shares of its trajectories that gain and lose differ by less
    than this."""
    by: Annotated[float, Field(gt=0)] = 0.01
    """The change of a step's noise per round."""


def print_calibration(
    run: RunSettings, arguments: Calibrate, live: Live = NOTHING_LIVE
) -> tuple[float, ...]:
    """Print each round's table, and the last one as YAML. Returns the noise of each step. `live`:
    parts of the run that are Python objects."""
    from flowrl.run.calibrate import calibrate, check_calibrated
    from flowrl.run.watch.start_check import check_start
    from flowrl.session.session import open_accelerator, open_session
    from flowrl.session.smaller_calls import explained

    run = override(run, ["--track.trackers", "[]"])
    check_calibrated(run.algorithm())
    check_start(run, live.rewards)
    last: tuple[float, ...] = ()
    with tempfile.TemporaryDirectory() as scratch, explained(run, trains=False):
        session = open_session(run, Path(scratch), open_accelerator(run, Path(scratch)), live)
        print("a step's noise, trajectories that gained and lost:")
        for number, calibration in enumerate(
            calibrate(session, arguments.rounds, arguments.within, arguments.by)
        ):
            columns = zip(calibration.table, calibration.above, calibration.below, strict=True)
            row = "  ".join(f"{psi:.3f} +{up} -{down}" for psi, up, down in columns)
            print(f"round {number + 1:3d}: {row}", flush=True)
            last = calibration.then
    print(f"in the run's file: recipe: {{noise: [{', '.join(f'{psi:.4g}' for psi in last)}]}}")
    return last
