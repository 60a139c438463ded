"""`flowrl drill RUN`: kills, hangs, fills and cuts on copies of a run, and a page of them."""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import yaml

from flowrl.cli.other_python import interpreter
from flowrl.drill.faults import EVERY, Drill, FaultKind, FaultOutcome, faults_of
from flowrl.drill.proxy import Proxy
from flowrl.drill.same_end import numbered_in, saved
from flowrl.drill.training import DrilledProgram, Overdue
from flowrl.errors import UserError
from flowrl.evaluation.outputs import make_output_folder
from flowrl.json_text import json_text
from flowrl.pages.stack import duration_text, from_template
from flowrl.paths import new_numbered
from flowrl.session.atomic import LOCK
from flowrl.settings.command_line.arguments import Word
from flowrl.settings.read import open_folder, rights_of
from flowrl.settings.trust import Trust
from flowrl.whole_file import write_whole
from rewards.rights import Right

FAULT_KINDS: tuple[FaultKind, ...] = ("kills", "ends", "hangs", "fills", "cuts", "records")
COPIES = 4  # of the run, that lie on the disk at the same time at most
PAGE, NUMBERS = "drill.html", "drill.json"


@dataclass
class DrillArguments:
    """Kill, hang, fill and cut copies of a run on this machine, and write a page: what was lost,
    seconds without progress, and whether the end has the same bits. The run itself is only read.
    Exit code 1 if something was not as the documentation promises. `--trust` and `--trust=RIGHTS`
    are as in `train --resume`."""

    folder: Word[Path]
    """A run's folder, with a checkpoint. It should not be training now."""
    only: tuple[FaultKind, ...] = FAULT_KINDS
    """Kinds of faults to try."""
    iterations: int = 4
    """Iterations that each copy trains beyond the run's newest checkpoint."""
    limit: float = 600.0
    """Seconds within which a training must go on or end."""
    processes: int = 1
    """Processes of torchrun; 1: without a launcher."""
    seed: int = 0
    """Draws the moments of the faults."""
    out: Path | None = None
    """Folder of the page; by default runs/drill-0001 or the next number."""
    program: str | None = None
    """The Python of another environment, whose flowrl is drilled."""
    yes: bool = False
    """Begin without asking."""


def drill_run(arguments: DrillArguments, trust: Trust) -> int:
    """Run the drill. Returns 1 if something was not as promised. UserError for a run that cannot be
    drilled."""
    if arguments.iterations < 2 * EVERY or arguments.processes < 1 or arguments.limit <= 0:
        raise UserError(
            f"drill: --iterations must be at least {2 * EVERY}, --processes and --limit positive"
        )
    run = arguments.folder
    opened = open_folder(run, trust)
    first = saved(run)
    if not first:
        raise UserError(f"drill: {run} has no checkpoint to begin from: train it first")
    needs, _ = rights_of(run)
    words = ["--trust"] if opened.limits is None else _granted(opened.limits.granted)
    addresses = sorted({need.value for need in needs if need.right == Right.NETWORK})
    program = sys.executable if arguments.program is None else interpreter(arguments.program)
    faults = faults_of(arguments.only, DrilledProgram(program, True, run, arguments.processes))
    last = first + arguments.iterations
    _say_first(arguments, faults, last, addresses)
    if not arguments.yes:
        _ask()
    drill_folder = arguments.out or new_numbered(Path("runs"), "drill")
    make_output_folder(drill_folder)
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_interrupted_by_sigterm())
        copies = Path(enter(tempfile.TemporaryDirectory(prefix="copies-", dir=drill_folder)))
        _check_space(run, copies)
        proxies = {url: enter(proxy) for url, proxy in _proxies(addresses)}
        drill = Drill(
            program=DrilledProgram(
                program, arguments.program is None, copies / "state", arguments.processes
            ),
            run=run,
            copies=copies,
            words=words,
            last=last,
            limit=arguments.limit,
            rng=random.Random(arguments.seed),
            make=lambda folder: _copy(run, folder, last, proxies, opened.limits is not None),
            proxies=[*proxies.values()],
        )
        return _drilled(drill, faults, drill_folder)


def _granted(rights: Any) -> list[str]:
    """The words that give copies the rights which the user's own folder has."""
    return [f"--trust={','.join(sorted(rights))}"] if rights else []


def _drilled(
    drill: Drill,
    faults: Sequence[tuple[str, Callable[[Drill], FaultOutcome]]],
    drill_folder: Path,
) -> int:
    """Try all faults, and write the page also if the user stops it."""
    began, outcomes, stopped = time.monotonic(), list[FaultOutcome](), False
    try:
        print("training an unbroken copy, with which all others are compared", flush=True)
        try:
            drill.train_unbroken()
        except RuntimeError as error:
            raise UserError(f"drill: {error}") from error
        for question, fault in faults:
            print(f"{question}: ", end="", flush=True)
            try:
                outcome = fault(drill)
            except Overdue as error:
                outcome = FaultOutcome(question)
                outcome.wrong(f"before the fault: {error}")
            outcomes.append(outcome)
            shutil.copyfile(drill.output, drill_folder / _output_name(len(outcomes)))
            print(_line(outcome), flush=True)
    except KeyboardInterrupt:
        stopped = True
        print("\nstopped; everything that was started has ended", flush=True)
    seconds = time.monotonic() - began
    numbers = [asdict(outcome) for outcome in outcomes]
    write_whole(drill_folder / NUMBERS, json_text(numbers, indent=1) + "\n")
    write_whole(drill_folder / PAGE, drill_page(drill, outcomes, seconds, stopped, len(faults)))
    print(f"page: {drill_folder / PAGE}")
    if stopped:
        return 128 + signal.SIGINT
    return int(not all(outcome.right for outcome in outcomes))


def drill_page(
    drill: Drill, outcomes: Sequence[FaultOutcome], seconds: float, stopped: bool, planned: int
) -> str:
    """The page as HTML."""
    tried = [outcome for outcome in outcomes if outcome.tried]
    right = [outcome for outcome in tried if outcome.right]
    equal = [outcome for outcome in tried if outcome.equal is not None]
    sentences = [
        f"{len(right)} of {len(tried)} faults ended as promised.",
        f"{sum(bool(outcome.equal) for outcome in equal)} of {len(equal)} ends have the bits of "
        "the unbroken run.",
    ]
    waits = [outcome.without for outcome in tried if outcome.without is not None]
    if waits:
        sentences.append(f"The longest time without progress was {duration_text(max(waits))}.")
    sentences += [f"Not as promised: {outcome.fault}." for outcome in tried if not outcome.right]
    if stopped:
        sentences.append(f"Stopped after {len(outcomes)} of {planned} faults.")
    about = (
        f"Copies of {drill.run}, from checkpoint {saved(drill.run)} to iteration {drill.last}, "
        f"{drill.program.processes} process{'es' if drill.program.processes > 1 else ''}, in "
        f"{duration_text(seconds)}. A training starts in {duration_text(drill.start)}. Trained by "
        f"{drill.program.python}."
    )
    rows = [
        [
            outcome.fault,
            "impossible here" if not outcome.tried else "yes" if outcome.right else "no",
            "" if outcome.lost is None else str(outcome.lost),
            "" if outcome.without is None else f"{outcome.without:.1f}",
            "" if outcome.equal is None else "yes" if outcome.equal else "no",
        ]
        for outcome in outcomes
    ]  # fmt: skip
    values = {
        "title": f"Drill of {drill.run.name}", "heading": f"Drill of {drill.run.name}",
        "chips": [f"{len(right)} of {len(tried)} as promised"], "sections": [],
        "interactive": False, "about": about, "sentences": sentences, "rows": rows,
        "seen": [
            (_output_name(number), outcome.fault, outcome.notes)
            for number, outcome in enumerate(outcomes, 1)
        ],
    }  # fmt: skip
    return str(from_template("drill.html", values))


def _output_name(number: int) -> str:
    """The file of what the copies of a fault wrote, counted from 1."""
    return f"output-{number:02d}.txt"


def _line(outcome: FaultOutcome) -> str:
    if not outcome.tried:
        return f"impossible here: {'; '.join(outcome.notes)}"
    words = ["as promised" if outcome.right else "NOT as promised"]
    if outcome.lost is not None:
        words.append(f"{outcome.lost} iterations lost")
    if outcome.without is not None:
        words.append(f"{outcome.without:.1f} s without progress")
    if outcome.equal is not None:
        words.append("bits equal" if outcome.equal else "bits differ")
    return ", ".join([*words, *outcome.notes])


def _say_first(
    arguments: DrillArguments,
    faults: Sequence[tuple[str, Any]],
    last: int,
    addresses: Sequence[str],
) -> None:
    print(f"The drill will copy {arguments.folder} and train the copies to iteration {last}:")
    for name, _ in faults:
        print(f"  {name}")
    print(
        "It signals only what it starts, fills at most a small tmpfs of its own, and cuts only its "
        "own proxies. Trackers are off. The run itself is only read."
    )
    if addresses:
        print(f"The copies ask the run's servers: {', '.join(addresses)}")


def _ask() -> None:
    if not sys.stdin.isatty():
        raise UserError("drill: add --yes to begin without being asked")
    if input("Begin? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("drill: not begun")


def _check_space(run: Path, drill_folder: Path) -> None:
    size = sum(os.stat(path).st_blocks * 512 for path in run.rglob("*") if path.is_file())
    free = shutil.disk_usage(drill_folder).free
    if COPIES * size > free:
        raise UserError(
            f"drill: {COPIES} copies of {run} need {COPIES * size / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free in {drill_folder}: choose another --out"
        )


def _proxies(addresses: Sequence[str]) -> Iterator[tuple[str, Proxy]]:
    """A proxy for each http address. An https address stays, since its certificate names the
    server."""
    for address in addresses:
        parts = urlsplit(address)
        if parts.scheme == "http" and parts.hostname:
            yield address, Proxy(parts.hostname, parts.port or 80)


def _copy(
    run: Path, folder: Path, last: int, proxies: Mapping[str, Proxy], limited: bool = False
) -> None:
    """A copy of a run with its newest checkpoint alone, the drill's end and its proxies. A copy of
    a `limited` run names its own files where the run names files in its folder, which the copy
    would need a right for."""
    newest = numbered_in(run / "checkpoints")[-1].name

    def ignored(folder: str, names: list[str]) -> list[str]:
        older = Path(folder) == run / "checkpoints"
        return [n for n in names if n == LOCK or n.endswith(".tmp") or (older and n != newest)]

    shutil.copytree(run, folder, ignore=ignored)
    file = folder / "run.yaml"
    tree = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    tree["train"] = {**tree.get("train", {}), "iterations": last}
    tree["checkpoint"] = {**tree.get("checkpoint", {}), "every": EVERY}
    if "track" in tree:
        tree["track"] = {k: v for k, v in tree["track"].items() if k != "with"}
    urls = {address: _through(address, proxy) for address, proxy in proxies.items()}
    inside = f"{run.resolve()}{os.sep}"  # files of the run itself, which the copy has too

    def of_copy(text: str) -> str:
        moved = f"{folder.resolve()}{os.sep}{text.removeprefix(inside)}"
        return moved if limited and text.startswith(inside) else urls.get(text, text)

    text = yaml.safe_dump(_replaced(tree, of_copy), sort_keys=False, allow_unicode=True)
    file.write_text(text, encoding="utf-8")


def _through(address: str, proxy: Proxy) -> str:
    return urlunsplit(urlsplit(address)._replace(netloc=f"127.0.0.1:{proxy.port}"))


def _replaced(value: Any, replaced: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, replaced) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, replaced) for item in value]
    return replaced(value) if isinstance(value, str) else value


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM and a closed terminal end the drill as Ctrl-C does: it cleans up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handlers = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
