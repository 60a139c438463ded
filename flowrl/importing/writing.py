"""The files of an import: run.yaml with its comments, and import.md, the table."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from flowrl.errors import UserError, write_fault
from flowrl.importing.draft import TO_READ, LeafKind, LeafLine
from flowrl.importing.leaves import shown_leaf
from flowrl.importing.result import ImportedRun
from flowrl.paths import removed_on_error

RUN_FILE, TABLE_FILE = "run.yaml", "import.md"
_SECTIONS = {
    LeafKind.EFFECT: "Dropped with effect", LeafKind.UNKNOWN: "Not understood",
    LeafKind.CONVERTED: "Converted", LeafKind.SAME: "Same",
    LeafKind.DEFAULT: "Defaults of the library that differ from flowrl's",
    LeafKind.NO_EFFECT: "Dropped without effect",
}  # fmt: skip


class _Flow(dict[str, Any]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Flow,
    lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True),
)


def write_import(run: ImportedRun, folder: Path) -> list[Path]:
    """Write the files into a new or empty folder. UserError if it has files."""
    files = {RUN_FILE: run_text(run), TABLE_FILE: table_text(run), **run.files}
    taken = [name for name in files if (folder / name).exists()]
    if taken:
        raise UserError(f"--out: {folder / taken[0]} already exists: choose a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with removed_on_error(*(folder / name for name in files)):
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a name with NUL
        raise UserError(f"--out: {folder} cannot be written: {write_fault(error)}") from error
    return [folder / name for name in files]


def run_text(run: ImportedRun) -> str:
    """The run file; leaves that change the run, and those not understood, are comments."""
    lines = [
        f"# {_one_line(run.what)}, of {run.peer}, for {run.devices} "
        f"{_processes(run)}: {TABLE_FILE} has each leaf."
    ]
    lines += [f"# {sentence}" for sentence in run.batches]
    for kind in TO_READ:
        of_kind = [line for line in run.lines if line.kind is kind]
        lines += [f"# {kind.value}:"] if of_kind else []
        lines += [f"#   {_sentence(line)}" for line in of_kind]
    if run.refusal is not None:
        lines.append(f"# flowrl plan refuses this file: {_one_line(run.refusal)}")
    body = yaml.dump(
        {name: _flat(value) for name, value in run.tree.items()},
        Dumper=_Dumper,
        sort_keys=False,
        width=100,
        allow_unicode=True,
    )
    return "\n".join(lines) + "\n" + body


def _flat(value: Any, depth: int = 0) -> Any:
    """Mappings below the sections on one line each."""
    if isinstance(value, Mapping):
        inner = {key: _flat(item, depth + 1) for key, item in value.items()}
        return inner if depth == 0 else _Flow(inner)
    if isinstance(value, list | tuple):
        return [_flat(item, 1) for item in value]
    return value


def table_text(run: ImportedRun) -> str:
    """The page: what changes the run first, then each leaf by kind."""
    parts = [f"# {_one_line(run.what)}", ""]
    parts += [
        f"Read with the defaults of {run.peer}, for {run.devices} "
        f"{_processes(run)}. Nothing of it was executed.",
        "",
    ]
    if run.refusal is not None:
        parts += [f"`flowrl plan` refuses the result: {_one_line(run.refusal)}.", ""]
    parts += ["| kind | leaves |", "|---|---|"]
    parts += [f"| {kind} | {count} |" for kind, count in run.counts.items()]
    for kind in TO_READ:
        parts += _section(run, kind)
    parts += ["", "## Batches", "", *(f"* {line}" for line in run.batches)]
    if run.notes:
        parts += ["", "## Notes", "", *(f"* {_escaped(note)}" for note in run.notes)]
    parts += ["", "## Code, networks and files", "", *_needs(run)]
    for kind in _SECTIONS:
        if kind not in TO_READ:
            parts += _section(run, kind)
    return "\n".join(parts) + "\n"


def _needs(run: ImportedRun) -> Iterator[str]:
    yield "The run asks for these, with the rights of any run file (SECURITY.md):"
    yield ""
    lines = [f"* {need.right}: `{_escaped(need.value)}` ({need.at})" for need in run.needs]
    lines += [f"* code: `{_escaped(code)}`, which is not copied" for code in run.code]
    yield from lines or ["* none"]


def _section(run: ImportedRun, kind: LeafKind) -> list[str]:
    of_kind = [line for line in run.lines if line.kind is kind]
    if not of_kind:
        return []
    rows = ["", f"## {_SECTIONS[kind]}", "", "| leaf | value | flowrl | why |", "|---|---|---|---|"]
    return [*rows, *(_row(line) for line in of_kind)]


def _row(line: LeafLine) -> str:
    settings = ", ".join(
        f"`{name}: {_escaped(shown_leaf(value))}`" for name, value in line.settings.items()
    )
    value = _escaped(shown_leaf(line.value))
    return f"| `{_escaped(line.name)}` | `{value}` | {settings} | {_escaped(line.why)} |"


def _sentence(line: LeafLine) -> str:
    return _one_line(f"{line.name}: {shown_leaf(line.value)}: {line.why}")


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:400]


def _escaped(text: str) -> str:
    return _one_line(text).replace("|", "\\|").replace("`", "'")


def _processes(run: ImportedRun) -> str:
    return "process" if run.devices == 1 else "processes"
