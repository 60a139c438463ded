"""Print the measures of the code's structure beside those of an earlier tree and the goals.

python scripts/house.py            counts of files, imports, lines and words
python scripts/house.py --traced   also what a plain Flow-GRPO iteration enters (a minute)
python scripts/house.py --sample 7 100 texts to read: docstrings, messages and paragraphs
"""

import argparse
import ast
import os
import random
import re
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from flowrl.paths import PROJECT

PACKAGES = ("samplers", "rewards", "flowrl")
ROOMS = ("flowrl/run", "flowrl/models/diffusers", "rewards")
WRITTEN = re.compile(r"^<!-- (?!end)[^>]*-->$.*?^<!-- end of [^>]*-->$", re.DOTALL | re.MULTILINE)
GENERATED = ("recipes.md", "files.md", "pipelines.md", "models.md")
TOP = ("README.md", "CHANGELOG.md", "LOG.md", "CONTRIBUTING.md")
OTHERS_CODE = ("rewards/answers", "rewards/judging", "rewards/sandbox")
OTHERS_CODE += ("rewards/catalogue/unigenbench.py", "rewards/user_function.py")
MESSAGES = ("UserError", "ValueError", "warn", "say")  # called with a sentence
TRACED = 3  # the iteration: by then everything is loaded, and no page or tree is due

# by measure: the tree f96ccc9, and the goal
BEFORE = {
    "entries at one level: run, models/diffusers, rewards": ("52, 34, 62", "14, 14, 12"),
    "arrows between rooms: run / models/diffusers": ("147 / 115", "43 / 20"),
    "modules of run under an import contract": ("31 of 52", "all"),
    "files / functions that an iteration enters": ("84 / 528", "60 / 380"),
    "times collect is entered; node_values computed": ("8; 3", "1; 1"),
    "places that parse flowrl's own source": ("6", "0"),
    "lines: product / scripts / tests": ("58,064 / 8,272 / 45,516", "54,500 / 7,000 / 41,500"),
    "words of docs: by hand / generated": ("54,700 / 36,700", "38,000 / recipes alone"),
    "words by hand, with the pages at the top": ("58,269", "40,000"),
}


def entries(folder: Path) -> list[str]:
    """Modules and folders with modules, without what marks a package."""
    found = [p for p in folder.iterdir() if p.suffix == ".py" or any(p.glob("*.py"))]
    return sorted(p.stem for p in found if p.stem != "__init__")


def arrows(room: str) -> int:
    """Pairs of entries of a room of which one imports the other."""
    folder, prefix = PROJECT / room, room.replace("/", ".")
    pairs = set[tuple[str, str]]()
    for path in folder.rglob("*.py"):
        own = path.relative_to(folder).parts[0].removesuffix(".py")
        for name in imported(path):
            if name.startswith(f"{prefix}."):
                there = name.removeprefix(f"{prefix}.").split(".")[0]
                pairs |= {(own, there)} if there in entries(folder) and there != own else set()
    return len({pair for pair in pairs if pair[0] != "__init__"})


def imported(path: Path) -> Iterator[str]:
    """Names that a file imports, with their modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under_contract() -> str:
    """Entries of flowrl.run that its layers name."""
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]
    named = set[str]()
    for contract in settings["contracts"]:
        if contract.get("containers") == ["flowrl.run"]:
            named = {part.strip() for layer in contract["layers"] for part in layer.split("|")}
    here = entries(PROJECT / "flowrl" / "run")
    return f"{len(named & {*here})} of {len(here)}"


def parsed_sources() -> int:
    """Calls of `ast.parse` in the product, but for code that others have written."""
    paths = (path for name in PACKAGES for path in (PROJECT / name).rglob("*.py"))
    own = [p for p in paths if not str(p.relative_to(PROJECT)).startswith(OTHERS_CODE)]
    return sum(path.read_text().count("ast.parse(") for path in own)


def lines(*folders: str) -> int:
    every = (path for name in folders for path in (PROJECT / name).rglob("*.py"))
    return sum(len(path.read_text().splitlines()) for path in every)


def words(generated: bool) -> int:
    """Words of docs/. Blocks that a script writes into a page, between two marks, are generated."""
    count = 0
    for path in (PROJECT / "docs").rglob("*.md"):
        whole = path.read_text()
        by_hand = "" if path.name in GENERATED else WRITTEN.sub("", whole)
        every, own = len(whole.split()), len(by_hand.split())
        count += every - own if generated else own
    return count


def texts(path: Path) -> Iterator[tuple[str, str, str]]:
    """Public docstrings and messages of a file: their kind, place and text."""
    place = path.relative_to(PROJECT)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            if text := ast.get_docstring(node):
                yield "docstring", f"{place}:{node.lineno} {node.name}", text
        elif isinstance(node, ast.Call) and node.args:
            called, first = ast.unparse(node.func).split(".")[-1], node.args[0]
            if called in MESSAGES and isinstance(first, ast.JoinedStr | ast.Constant):
                if len(re.sub(r"\{.*?\}", "", text := ast.unparse(first)).split()) > 2:
                    yield "message", f"{place}:{node.lineno}", text


def paragraphs() -> Iterator[tuple[str, str, str]]:
    """Paragraphs of at least 20 words on pages written by hand, without code, tables and titles."""
    for path in sorted((PROJECT / "docs").rglob("*.md")):
        page = re.sub("```.*?```", "", path.read_text(), flags=re.DOTALL)
        for part in page.split("\n\n") if path.name not in GENERATED else ():
            if len(part.split()) >= 20 and not part.startswith(("|", "#", "<")):
                yield "paragraph", str(path.relative_to(PROJECT)), part


def sample(seed: int) -> Iterator[str]:
    """40 docstrings, 40 messages and 20 paragraphs, chosen by the seed, as a person reads them."""
    files = sorted(path for name in PACKAGES for path in (PROJECT / name).rglob("*.py"))
    found = [*(text for path in files for text in texts(path)), *paragraphs()]
    chance = random.Random(seed)
    for kind, count in (("docstring", 40), ("message", 40), ("paragraph", 20)):
        for _, place, text in chance.sample([each for each in found if each[0] == kind], count):
            yield f"{kind} {place}\n{text}\n"


class Trace:
    """The functions of this project that are called, and how often a file is entered from another
    one."""

    def __init__(self) -> None:
        self.functions, self.entered = Counter[tuple[str, str]](), Counter[str]()
        self._roots = tuple(f"{PROJECT / name}{os.sep}" for name in PACKAGES)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(self._roots):
            self.functions[file, frame.f_code.co_qualname] += 1
            self.entered[file] += frame.f_back is None or frame.f_back.f_code.co_filename != file

    def on(self) -> None:
        threading.setprofile(self.note)
        sys.setprofile(self.note)

    def off(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}


class _Enough(Exception):
    """Ends the run once its iteration is traced."""


def traced() -> Trace:
    """Train configs/demo_flow_grpo.yaml, smaller, and trace one turn of its loop."""
    from flowrl.run import start, train
    from flowrl.settings.read import override, read_run

    trace, iterate, turn = Trace(), train.iterate, Counter[str]()

    def watched(*given: Any) -> Any:
        turn["begun"] += 1
        if turn["begun"] == TRACED:
            trace.on()
        if turn["begun"] > TRACED:
            trace.off()
            raise _Enough
        return iterate(*given)

    smaller = ["--prompts.per-iteration", "4", "--evaluate.samples", "4", "--track.panel", "false"]
    run = override(read_run(PROJECT / "configs" / "demo_flow_grpo.yaml"), smaller)
    train.iterate = watched
    try:
        with tempfile.TemporaryDirectory() as folder:
            start.start(run, "traced", Path(folder) / "run")
    except _Enough:
        pass
    finally:
        trace.off()
        train.iterate = iterate
    return trace


def measures(trace: Trace | None) -> Iterator[str]:
    """The measures in the order of BEFORE."""
    yield ", ".join(str(len(entries(PROJECT / room))) for room in ROOMS)
    yield " / ".join(str(arrows(room)) for room in ROOMS[:2])
    yield under_contract()
    if trace is None:
        yield from ("not traced", "not traced")
    else:
        named = sum(not name.endswith(">") for _, name in trace.functions)
        yield f"{len(trace.files)} / {len(trace.functions)} ({named} named)"
        collect = sum(n for file, n in trace.entered.items() if file.endswith("/collect.py"))
        values = sum(n for (_, name), n in trace.functions.items() if name == "node_values")
        yield f"{collect}; {values}"
    yield str(parsed_sources())
    yield " / ".join(f"{lines(*each):,}" for each in (PACKAGES, ("scripts",), ("tests",)))
    by_hand = words(False)
    yield f"{by_hand:,} / {words(True):,}"
    top = (WRITTEN.sub("", (PROJECT / name).read_text()) for name in TOP)
    yield f"{by_hand + sum(len(page.split()) for page in top):,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traced", action="store_true", help="trace an iteration, too")
    parser.add_argument("--functions", action="store_true", help="print each function entered")
    parser.add_argument("--sample", type=int, metavar="SEED", help="print 100 texts to read")
    chosen = parser.parse_args()
    if chosen.sample is not None:
        return print(*sample(chosen.sample), sep="\n")
    trace = traced() if chosen.traced or chosen.functions else None
    if chosen.functions and trace is not None:
        for (file, name), count in sorted(trace.functions.items()):
            print(f"{Path(file).relative_to(PROJECT)}  {name}  {count}")
    row: Callable[..., str] = "| {:<52} | {:>23} | {:>23} | {:>23} |".format
    print(row("measure", "f96ccc9", "now", "goal"))
    print(row("---", "---:", "---:", "---:"))
    for (name, (before, goal)), now in zip(BEFORE.items(), measures(trace), strict=True):
        print(row(name, before, now, goal))


if __name__ == "__main__":
    main()
