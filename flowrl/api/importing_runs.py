"""Runs of other libraries, from Python."""

from pathlib import Path

from flowrl.api.calls import public_call
from flowrl.importing.result import ImportedRun, imported
from flowrl.importing.writing import write_import


@public_call
def import_run(
    what: str | Path,
    *,
    of: str | None = None,
    devices: int | None = None,
    out: str | Path | None = None,
) -> ImportedRun:
    """Read a run of another library, as `flowrl import` does. Nothing of it is executed.

    what     FILE.py:FUNCTION of flow_grpo, a YAML or JSON file, a script, or a command line
    of       the library and its release, such as "trl==1.16.0"; None: as the input shows
    devices  processes that the input is meant for; None: 1
    out      a new folder for run.yaml and the table import.md; None: nothing is written

    `tree` of the result has the settings of run.yaml, `lines` the outcome of each leaf, `refusal`
    the sentence with which `flowrl plan` would refuse it. UserError, in one sentence, for an input
    that has no counterpart.
    """
    run = imported(str(what), of, devices)
    if out is not None:
        write_import(run, Path(out))
    return run
