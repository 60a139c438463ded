"""Mutants made by machine: operators of the syntax tree, chosen by a seed, judged by the tests that run their lines.

    python scripts/mutants/machine.py record WORK --tests tests/samplers tests/credit
    python scripts/mutants/machine.py judge WORK [--count 300] [--seed 0] [--jobs 2]
    python scripts/mutants/machine.py report WORK [--before OTHER_WORK]

`record` runs tests under coverage.py, which must be installed, and notes which test runs which line;
called again with other tests, it adds to WORK/recorded. `judge` draws mutants by the seed, the same
number in every room and of every operator, and runs those of the tests that run the mutant's
statement which run the fewest lines in all. A mutant that a test fails on, or that takes three times
as long as the tests may (a minute of a processor's time), is caught. Results are appended to
WORK/results.jsonl, so that a judge that was ended goes on; called again with a larger `--most-tests`
and `--most-seconds`, or after more was recorded, it lets further tests judge what was not caught.
`report` prints the share that survives by room and by operator, with a 95 % interval (Wilson).

A whole recording takes half an hour of a processor. `--mark`, `--cases` and `--seconds` make it
shorter: pytest's -m, the most cases of a test, and a processor's time per file of tests. Mutants on
lines that only the others run are then reported as unrun, not as survivors.

Two trees are compared with a WORK each. `--tree FOLDER` is the tree that is recorded and judged, and
`--rooms FILE` says where its rooms stand, if not where they do here (rooms_26ca889.json). One seed
gives the same number to a mutant in both trees, and the smallest numbers of a room and an operator
are drawn: so each tree's mutants are a random sample of its own, and most of what both trees have is
judged in both. `report --before` compares the two samples, and these pairs one to one (McNemar).
A seed whose survivors got tests has served: its mutants say too little of the others, so the next
comparison takes a new seed.
"""

import argparse
import ast
import hashlib
import json
import os
import queue
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from scipy.stats import binomtest

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from scripts.mutants.operators import Made, mutants_of  # noqa: E402
from scripts.mutants.recording import Limits, Recorded, read_recorded, record  # noqa: E402
from scripts.mutants.run import copied, preload, tested  # noqa: E402

Rooms = Mapping[str, Sequence[str]]  # the folders and files of a room

# A contributed recipe's parts count to the room whose kind of part they are.
_CREDIT = ("dense_grpo", "potential_tree", "text_rebn", "text_riskpo", "turning_point", "vgpo")
ROOMS: Rooms = {
    "samplers": (
        "samplers",
        *(f"flowrl/contrib/{name}.py" for name in ("e_grpo", "g2rpo", "mix_grpo_flash")),
    ),
    "flowrl/credit": ("flowrl/credit", *(f"flowrl/contrib/{name}.py" for name in _CREDIT)),
    "flowrl/likelihoods": (
        "flowrl/likelihoods",
        *(f"flowrl/contrib/{name}.py" for name in ("draft_lv", "fdfo")),
    ),
    "flowrl/losses": ("flowrl/losses", "flowrl/contrib/text_gppo.py"),
    "flowrl/iteration": ("flowrl/iteration",),
    "flowrl/models": ("flowrl/models",),
    "rewards": ("rewards",),
}
PATIENCE = 300.0  # seconds beside a processor's time, for tests that wait
CAUGHT, SURVIVES, UNRUN = "caught", "survives", "unrun"
NO_TEST_RAN = 5  # an exit code of pytest


def mutants_in(tree: Path, places: Sequence[str]) -> list[Made]:
    """All mutants of a room."""
    files = set[Path]()
    for place in places:
        path = tree / place
        if not path.exists():
            raise SystemExit(f"{path} is not there: --rooms says where this tree's rooms stand")
        files |= set(path.rglob("*.py")) if path.is_dir() else {path}
    return [
        mutant
        for path in sorted(files)
        for mutant in mutants_of(path.relative_to(tree).as_posix(), path.read_text())
    ]


def identified(mutants: Sequence[Made]) -> dict[str, Made]:
    """Mutants by what tells them from all others of the tree: the file too where that is needed."""
    times = Counter(mutant.identity for mutant in mutants)
    return {m.identity if times[m.identity] == 1 else f"{m.identity} {m.file}": m for m in mutants}


def chosen_mutants(
    count: int, seed: int, rooms: Rooms = ROOMS, tree: Path = PROJECT
) -> dict[str, Made]:
    """`count` mutants by identity: of every room, and in it of every operator, as many."""
    known = {room: mutants_in(tree, places) for room, places in rooms.items()}
    names = identified([mutant for mutants in known.values() for mutant in mutants])
    name_of = {mutant.key: name for name, mutant in names.items()}
    found = dict[str, list[str]]()
    for place, (room, mutants) in enumerate(known.items()):
        kinds = defaultdict[str, list[str]](list)
        for mutant in mutants:
            kinds[mutant.operator].append(name_of[mutant.key])
        share = count * (place + 1) // len(known) - count * place // len(known)
        found[room] = _by_turns(kinds, share, f"{seed} {room}")
    longest = max(map(len, found.values()))
    # by turns, so that an ended judge has all rooms
    order = (
        drawn[turn] for turn in range(longest) for drawn in found.values() if turn < len(drawn)
    )
    return {name: names[name] for name in order}


def _by_turns(kinds: Mapping[str, list[str]], share: int, seed: str) -> list[str]:
    """`share` identities, one of each kind after the other, by numbers that depend on the seed and
    the identity alone."""

    def number(name: str) -> str:
        return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()

    left = {kind: sorted(names, key=number, reverse=True) for kind, names in kinds.items()}
    order = sorted(left)
    random.Random(seed).shuffle(order)
    drawn = list[str]()
    while len(drawn) < share and any(left.values()):
        drawn += [left[kind].pop() for kind in order if left[kind]]
    return drawn[:share]


@dataclass(frozen=True)
class Most:
    """Limits of what judges a mutant: a number of tests, and seconds of a processor that they take
    without one."""

    tests: int = 12
    seconds: float = 20.0


def tests_for(
    mutant: Made, recorded: Recorded, sizes: Mapping[str, int], most: Most = Most()
) -> list[str]:
    """Return those tests that run a mutant's statement and the fewest lines in all."""
    lines = recorded.lines.get(mutant.file, {})
    first, last = mutant.judged
    found = {test for line in range(first, last + 1) for test in lines.get(line, [])}
    chosen, seconds = list[str](), 0.0
    for test in sorted(found - recorded.failed, key=lambda test: (sizes[test], test)):
        if len(chosen) < most.tests and seconds + recorded.seconds[test] <= most.seconds:
            chosen.append(test)
            seconds += recorded.seconds[test]
    return chosen


def unjudged(
    mutants: Mapping[str, Made], known: Mapping[str, dict], recorded: Recorded, most: Most
) -> dict[str, list[str]]:
    """The tests that have to judge each mutant: of one without a result all within `most`; of one
    that was not caught those that have not judged it, since more is recorded or allowed now."""
    sizes = recorded.sizes()
    left = dict[str, list[str]]()
    for name, mutant in mutants.items():
        result = known.get(name)
        if result is not None and result["verdict"] not in (SURVIVES, UNRUN):
            continue
        tests = tests_for(mutant, recorded, sizes, most)
        more = tests if result is None else [test for test in tests if test not in result["tests"]]
        if result is None or more:
            left[name] = more
    return left


def judge(work: Path, tree: Path, mutants: Mapping[str, Made], most: Most, jobs: int) -> None:
    """Judge mutants, and append what is found to WORK/results.jsonl."""
    recorded = read_recorded(sorted((work / "recorded").glob("*.json")))
    known = read_results(work) if (work / "results.jsonl").exists() else {}
    left = unjudged(mutants, known, recorded, most)
    preload()
    folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="machine-") as parent:
        for job in range(jobs):
            copied(Path(parent) / str(job), tree)
            folders.put(Path(parent) / str(job))

        def one(name: str) -> dict[str, object]:
            folder, mutant, start = folders.get(), mutants[name], time.monotonic()
            try:
                judged = verdict(mutant, folder, left[name], 3 * most.seconds)
            finally:
                folders.put(folder)
            before = known[name]["tests"] if name in known else []
            return {
                **{"name": name, "key": mutant.key},
                **asdict(mutant),
                **judged,
                "tests": [*before, *left[name]],
                "seconds": round(time.monotonic() - start, 1),
            }

        with ThreadPoolExecutor(jobs) as pool, (work / "results.jsonl").open("a") as file:
            for result in pool.map(one, left):
                file.write(json.dumps(result) + "\n")
                file.flush()
                print(f"{result['verdict']:<9} {result['key']}", flush=True)


def verdict(mutant: Made, folder: Path, tests: Sequence[str], seconds: float) -> dict[str, object]:
    """caught, survives, or not run by any recorded test. One that is no Python is left out."""
    if not tests:
        return {"verdict": UNRUN}
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    changed = mutant.applied(text)
    try:
        ast.parse(changed)
    except SyntaxError:
        return {"verdict": "invalid"}
    path.write_text(changed, encoding="utf-8")
    try:
        code, output = tested(folder, tests, PATIENCE + seconds, seconds)
    finally:
        path.write_text(text, encoding="utf-8")
    if code == NO_TEST_RAN:
        raise SystemExit(f"{mutant.key}: no test ran\n{output}")
    said = output.strip().splitlines()[-3:]
    return {"verdict": CAUGHT if code else SURVIVES, "code": code, "said": said}


def read_results(work: Path) -> dict[str, dict]:
    """The last result of each mutant, by name."""
    path = work / "results.jsonl"
    if not path.exists():
        raise SystemExit(f"{path} is not there: `judge {work}` writes it")
    return {each["name"]: each for each in map(json.loads, path.read_text().splitlines())}


def interval(alive: int, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson)."""
    if not count:
        return 0.0, 1.0
    found = binomtest(alive, count).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def room_of(file: str, rooms: Rooms) -> str:
    for room, places in rooms.items():
        if any(file == place or file.startswith(f"{place}/") for place in places):
            return room
    raise SystemExit(f"{file} stands in no room: --rooms says where the rooms of its tree stand")


def report(work: Path, rooms: Rooms) -> None:
    """Print the shares that survive, and the survivors."""
    results = read_results(work).values()
    judged = [each for each in results if each["verdict"] in (CAUGHT, SURVIVES)]
    unrun = sum(each["verdict"] == UNRUN for each in results)
    print(f"{len(results)} mutants, {unrun} on lines that no recorded test runs")
    groups = defaultdict[str, list[bool]](list)
    for each in judged:
        for group in ("all", room_of(each["file"], rooms), each["operator"]):
            groups[group].append(each["verdict"] == SURVIVES)
    for group, alive in groups.items():
        print(f"{group:<20} {share_of(alive)}")
    for each in judged:
        if each["verdict"] == SURVIVES:
            print(each["key"])


def share_of(alive: Sequence[bool]) -> str:
    low, high = interval(sum(alive), len(alive))
    share = sum(alive) / len(alive)
    return f"{sum(alive):4} of {len(alive):4} survive  {share:.3f} [{low:.3f}, {high:.3f}]"


def report_pairs(before: Path, after: Path, rooms: Rooms) -> None:
    """Print the shares of the mutants that were judged in both trees, one to one."""
    was, now = read_results(before), read_results(after)
    both = [name for name in now if name in was]
    judged = [
        name
        for name in both
        if all(results[name]["verdict"] in (CAUGHT, SURVIVES) for results in (was, now))
    ]
    unrun = [sum(results[name]["verdict"] == UNRUN for name in both) for results in (was, now)]
    print(f"{len(both)} mutants in both trees, {unrun[0]} unrun before, {unrun[1]} after")
    groups = defaultdict[str, list[tuple[bool, bool]]](list)
    for name in judged:
        pair = was[name]["verdict"] == SURVIVES, now[name]["verdict"] == SURVIVES
        for group in ("all", room_of(now[name]["file"], rooms)):
            groups[group].append(pair)
    for group, pairs in groups.items():
        print(f"{group:<20} before {share_of([a for a, _ in pairs])}")
        print(f"{'':<20} after  {share_of([b for _, b in pairs])}  {mcnemar(pairs)}")
    for name in judged:
        if was[name]["verdict"] != now[name]["verdict"]:
            print(f"{was[name]['verdict']} -> {now[name]['verdict']}: {now[name]['key']}")


def mcnemar(pairs: Iterable[tuple[bool, bool]]) -> str:
    """Count the pairs that differ, by direction, with the chance of that (exact, two-sided)."""
    counts = Counter(pairs)
    only_before, only_after = counts[True, False], counts[False, True]
    differ = only_before + only_after
    chance = binomtest(only_after, differ).pvalue if differ else 1.0
    return f"survive only before {only_before}, only after {only_after}, p {chance:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("record", "judge", "report"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--tree", type=Path, default=PROJECT)
    parser.add_argument("--rooms", type=Path, help="JSON: the folders and files of each room")
    parser.add_argument("--tests", nargs="+", default=["tests"])
    parser.add_argument("--mark", help="tests to record, as pytest's -m")
    parser.add_argument("--cases", type=int, help="of a test with more cases, record so many")
    parser.add_argument(
        "--seconds", type=float, help="a processor's time for the tests of a file to record"
    )
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--most-tests", type=int, default=Most.tests)
    parser.add_argument("--most-seconds", type=float, default=Most.seconds)
    parser.add_argument("--before", type=Path, help="the WORK of another tree")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    rooms: Rooms = ROOMS if given.rooms is None else json.loads(given.rooms.read_text())
    tree = given.tree.resolve()
    if given.command == "record":
        options = [] if given.mark is None else ["-m", given.mark]
        limits = Limits(cases=given.cases, seconds=given.seconds)
        record(given.work, tree, given.tests, options, limits)
    elif given.command == "judge":
        mutants = chosen_mutants(given.count, given.seed, rooms, tree)
        most = Most(tests=given.most_tests, seconds=given.most_seconds)
        judge(given.work, tree, mutants, most, given.jobs)
    elif given.before is None:
        report(given.work, rooms)
    else:
        report_pairs(given.before, given.work, rooms)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
