"""Mutants made by machine: operators of the syntax tree, chosen by a seed, judged by the tests that run their lines.

    python scripts/mutants/machine.py record WORK --tests tests/samplers tests/credit
    python scripts/mutants/machine.py judge WORK [--count 300] [--seed 0] [--jobs 2]
    python scripts/mutants/machine.py report WORK

`record` runs tests under coverage.py, which must be installed, and notes which test runs which line;
called again with other tests, it adds to WORK/coverage.json. `judge` draws mutants at random, the same
number in every room of ROOMS, and runs those of the tests that run the mutant's line which run the
fewest lines in all. A mutant that a test fails on, or that takes longer than a minute, is caught.
Results are appended to WORK/results.jsonl, so that a judge that was ended goes on. `report` prints the
share that survives by room and by operator, with a 95 % interval (Wilson).
"""

import argparse
import ast
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from scripts.mutants.run import copied, preload, tested  # noqa: E402

ROOMS = (
    "samplers", "flowrl/credit", "flowrl/likelihoods", "flowrl/losses", "flowrl/iteration",
    "flowrl/models", "rewards",
)  # fmt: skip
MOST_TESTS = 12  # of those that run a mutant's line
SECONDS = 60.0
Z = 1.96

NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
}  # fmt: skip
BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
OTHER: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A mutant: lines and columns (in bytes, as `ast` counts) that are replaced by `put`."""

    file: str
    operator: str
    line: int
    column: int
    end_line: int
    end_column: int
    put: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.operator} {self.put}"

    def applied(self, text: str) -> str:
        lines = text.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        end = sum(map(len, lines[: self.end_line - 1])) + self.end_column
        whole = b"".join(lines)
        return (whole[:start] + self.put.encode() + whole[end:]).decode()


def variants(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Operators that apply to a node, and what each puts in its place."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for name, table in (("comparison", NEGATED), ("boundary", BOUNDARY)):
            if (op := table.get(type(node.ops[0]))) is not None:
                yield name, _changed(node, ops=[op()])
    elif isinstance(node, ast.BinOp) and type(node.op) in OTHER:
        yield "arithmetic", _changed(node, op=OTHER[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield "sign", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BoolOp):
        yield "boolean", _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.IfExp):
        yield "branch", _changed(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Raise):
        yield "dropped raise", "pass"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "dropped call", "pass"
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        a, b, *more = node.args
        if not isinstance(a, ast.Starred) and ast.dump(a) != ast.dump(b):
            yield "swapped arguments", _changed(node, args=[b, a, *more])


def _changed(node: ast.expr, **fields: object) -> str:
    """The source of a node with other fields."""
    other = deepcopy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return f"({ast.unparse(other)})"


def _constants(node: ast.Constant) -> Iterator[tuple[str, str]]:
    if isinstance(node.value, bool):
        yield "constant", str(not node.value)
    elif isinstance(node.value, int):
        yield "constant", repr(node.value + 1)
    elif isinstance(node.value, float):
        yield "constant", repr(2 * node.value or 1.0)


def mutated_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that have a place of their own and a meaning at run time: no annotations, assertions,
    messages of errors, or parts of formatted strings."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr | ast.Assert):
                continue
            yield node
            if not isinstance(node, ast.Raise):
                yield from mutated_nodes(node)


def mutants_of(file: str) -> list[Made]:
    """All mutants of a file."""
    tree = ast.parse((PROJECT / file).read_text(encoding="utf-8"))
    made = list[Made]()
    for node in mutated_nodes(tree):
        for operator, put in variants(node):
            if isinstance(node, ast.expr | ast.stmt) and node.end_lineno is not None:
                end = node.end_col_offset or 0
                place = (node.lineno, node.col_offset, node.end_lineno, end)
                made.append(Made(file, operator, *place, put))
    return made


def chosen_mutants(count: int, seed: int, rooms: Sequence[str] = ROOMS) -> list[Made]:
    """`count` mutants, the same number in every room; in a room all operators are as likely."""
    found = list[Made]()
    for place, room in enumerate(rooms):
        files = sorted(p.relative_to(PROJECT).as_posix() for p in (PROJECT / room).rglob("*.py"))
        every = [mutant for file in files for mutant in mutants_of(file)]
        share = count * (place + 1) // len(rooms) - count * place // len(rooms)
        chance = random.Random(f"{seed} {room}")
        chance.shuffle(every)
        kinds = {each.operator: [m for m in every if m.operator == each.operator] for each in every}
        for _ in range(share):
            kind = chance.choice(sorted(name for name, left in kinds.items() if left))
            found.append(kinds[kind].pop())
    random.Random(seed).shuffle(found)  # so that an ended judge has all rooms
    return found


Recorded = dict[str, dict[str, list[str]]]  # file -> line -> tests


def record(work: Path, tests: Iterable[str]) -> None:
    """Run tests under coverage.py, and add which of them run which lines."""
    config = work / "coverage.ini"
    config.write_text(
        f"[run]\ndata_file = {work / 'coverage.data'}\ndynamic_context = test_function\n"
        f"source = {','.join(sorted({room.partition('/')[0] for room in ROOMS}))}\n"
    )
    begin = [sys.executable, "-m", "coverage"]
    with_config = f"--rcfile={config}"
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *tests]
    subprocess.run([*begin, "run", with_config, *pytest], cwd=PROJECT, check=False)
    out = work / "now.json"
    subprocess.run(
        [*begin, "json", with_config, "--show-contexts", "-q", "-o", str(out)],
        cwd=PROJECT,
        check=True,
    )
    known: Recorded = (
        json.loads(path.read_text()) if (path := work / "coverage.json").exists() else {}
    )
    for file, one in json.loads(out.read_text())["files"].items():
        lines = known.setdefault(file, {})
        for line, contexts in one["contexts"].items():
            names = {test for context in contexts if (test := test_of(context)) is not None}
            lines[line] = sorted({*lines.get(line, []), *names})
    path.write_text(json.dumps(known))


def test_of(context: str) -> str | None:
    """`credit/test_trees.py::test_name` of coverage's `tests.credit.test_trees.test_name`; None for
    what is run outside of tests."""
    module, _, function = context.rpartition(".")
    parts = module.split(".")
    if parts[:1] != ["tests"] or not function.startswith("test_"):
        return None
    return f"{'/'.join(parts[1:])}.py::{function}"


def tests_for(mutant: Made, recorded: Recorded, sizes: Mapping[str, int]) -> list[str]:
    """The tests that run a mutant's lines, and of them those that run the fewest lines in all."""
    lines = recorded.get(mutant.file, {})
    span = range(mutant.line, mutant.end_line + 1)
    found = {test for line in span for test in lines.get(str(line), [])}
    return sorted(found, key=lambda test: (sizes[test], test))[:MOST_TESTS]


def judge(work: Path, count: int, seed: int, jobs: int) -> None:
    """Judge the mutants that have no result yet."""
    recorded: Recorded = json.loads((work / "coverage.json").read_text())
    sizes = defaultdict[str, int](int)
    for lines in recorded.values():
        for tests in lines.values():
            for test in tests:
                sizes[test] += 1
    results = work / "results.jsonl"
    done = (
        {json.loads(line)["key"] for line in results.read_text().splitlines()}
        if results.exists()
        else set()
    )
    left = [mutant for mutant in chosen_mutants(count, seed) if mutant.key not in done]
    preload()
    folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="machine-") as parent:
        for job in range(jobs):
            copied(Path(parent) / str(job))
            folders.put(Path(parent) / str(job))

        def one(mutant: Made) -> dict[str, object]:
            folder = folders.get()
            try:
                return {
                    "key": mutant.key,
                    **asdict(mutant),
                    **verdict(mutant, folder, recorded, sizes),
                }
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(jobs) as pool, results.open("a") as file:
            for result in pool.map(one, left):
                file.write(json.dumps(result) + "\n")
                file.flush()
                print(f"{result['verdict']:<9} {result['key']}", flush=True)


def verdict(
    mutant: Made, folder: Path, recorded: Recorded, sizes: Mapping[str, int]
) -> dict[str, object]:
    """caught, survives, or not run by any recorded test. One that is no Python is left out."""
    tests = tests_for(mutant, recorded, sizes)
    if not tests:
        return {"verdict": "unrun", "tests": []}
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    changed = mutant.applied(text)
    try:
        ast.parse(changed)
    except SyntaxError:
        return {"verdict": "invalid", "tests": []}
    path.write_text(changed, encoding="utf-8")
    try:
        code, _ = tested(folder, tests, SECONDS)
    finally:
        path.write_text(text, encoding="utf-8")
    return {"verdict": "survives" if code == 0 else "caught", "tests": tests}


def interval(alive: int, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson)."""
    if not count:
        return 0.0, 1.0
    share, spread = alive / count, Z * Z / count
    middle = (share + spread / 2) / (1 + spread)
    half = Z * ((share * (1 - share) + spread / 4) / count) ** 0.5 / (1 + spread)
    return middle - half, middle + half


def report(work: Path) -> None:
    results = [json.loads(line) for line in (work / "results.jsonl").read_text().splitlines()]
    judged = [each for each in results if each["verdict"] in ("caught", "survives")]
    unrun = sum(each["verdict"] == "unrun" for each in results)
    print(f"{len(results)} mutants, {unrun} on lines that no recorded test runs")
    groups = defaultdict[str, list[bool]](list)
    for each in judged:
        room = next(room for room in ROOMS if each["file"].startswith(f"{room}/"))
        for group in ("all", room, each["operator"]):
            groups[group].append(each["verdict"] == "survives")
    for group, alive in groups.items():
        low, high = interval(sum(alive), len(alive))
        share = sum(alive) / len(alive)
        print(
            f"{group:<20} {sum(alive):4} of {len(alive):4} survive  {share:.3f} [{low:.3f}, {high:.3f}]"
        )
    for each in judged:
        if each["verdict"] == "survives":
            print(each["key"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("record", "judge", "report"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--tests", nargs="+", default=["tests"])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.command == "record":
        record(given.work, given.tests)
    elif given.command == "judge":
        judge(given.work, given.count, given.seed, given.jobs)
    else:
        report(given.work)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
