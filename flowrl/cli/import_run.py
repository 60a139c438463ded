"""`flowrl import WHAT`: another library's run as run.yaml, and the outcome of each leaf."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from flowrl.errors import terminal_text
from flowrl.importing.draft import TO_READ
from flowrl.importing.leaves import shown_leaf
from flowrl.importing.result import ImportedRun
from flowrl.importing.writing import RUN_FILE, TABLE_FILE, table_text
from flowrl.settings.command_line.arguments import Word


@dataclass
class Import:
    """Write a run of flow_grpo, Flow-Factory, TRL, verl or SimpleTuner as a run file. Nothing of it
    is executed, and no environment variable is read. A table has a line for each of its leaves."""

    what: Word[str]
    """FILE.py:FUNCTION of flow_grpo, a YAML or JSON file, a Python or shell script, or a whole
    command line in quotes."""
    of: str | None = None
    """The library and its release, such as trl==1.16.0; by default what the input shows, and the
    newest release that flowrl knows."""
    devices: int | None = None
    """Number of processes that the input is meant for; by default 1."""
    out: Path | None = None
    """A folder for run.yaml and import.md; without it the table is printed."""


def print_import(run: ImportedRun, out: Path | None) -> None:
    """Print what a reader must know of the files in `out`; without them, the table."""
    if out is None:
        print(terminal_text(table_text(run)), end="")
        return
    print(f"{run.peer}: wrote {', '.join([RUN_FILE, TABLE_FILE, *run.files])} in {out}")
    print(", ".join(f"{count} {kind}" for kind, count in run.counts.items()))
    for kind in TO_READ:
        for line in run.lines:
            if line.kind is kind:
                print(terminal_text(f"{kind}: {line.name}: {shown_leaf(line.value)}: {line.why}"))
    for sentence in (*run.batches, *run.notes):
        print(terminal_text(sentence))
    for need in run.needs:
        print(terminal_text(f"it needs {need.right}: {need.value} ({need.at})"))
    for code in run.code:
        print(terminal_text(f"it needs code that is not copied: {code}"))
    if run.refusal is not None:
        print(terminal_text(f"refused: {run.refusal}"))
    else:
        print(f"next: flowrl plan {quote(str(out / RUN_FILE))}")
