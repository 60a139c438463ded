"""Record by coverage.py, which must be installed, which test runs which line."""

import hashlib
import json
import multiprocessing
import os
import resource
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from scripts.mutants.run import copied, enter, preload  # noqa: E402

PACKAGES = ("flowrl", "rewards", "samplers")
FIXTURE = "fixture"


@dataclass
class Recorded:
    """A record of tests in a tree without a mutant.

    Attributes:
        lines: The tests that run a line, by file and line.
        seconds: A processor's time that a test takes, with its fixtures, under coverage.py.
        failed: Tests that failed: they can judge nothing.
    """

    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def sizes(self) -> dict[str, int]:
        """Count the lines that each test runs."""
        sizes = defaultdict[str, int](int)
        for lines in self.lines.values():
            for tests in lines.values():
                for test in tests:
                    sizes[test] += 1
        return sizes


@dataclass(frozen=True)
class Limits:
    """Limits of a recording, for tests that take long.

    Attributes:
        cases: Of a test with more cases so many are run, evenly over all; None: all.
        seconds: A processor's time after which a file's further tests are left out; None: never.
    """

    cases: int | None = None
    seconds: float | None = None


class Contexts:
    """A plugin of pytest that tells coverage.py which test runs, or which fixture is prepared.

    A fixture of a module is prepared within the first test that asks for it, and serves others too:
    its lines belong to all of them.
    """

    def __init__(self, switch, limits: Limits) -> None:
        self.switch = switch
        self.limits = limits
        self.scale = defaultdict[str, float](lambda: 1.0)  # cases of a test to those that are run
        self.file_seconds = defaultdict[Path, float](float)
        self.context = ""
        self.seconds = defaultdict[str, float](float)  # by context
        self.fixtures = defaultdict[str, set[str]](set)  # fixtures that a test asks for
        self.failed = set[str]()
        self.since = processor_seconds()

    def enter(self, context: str) -> str:
        """Begin a context; return the one that ends."""
        before, now = self.context, processor_seconds()
        self.seconds[before] += now - self.since
        self.context, self.since = context, now
        self.switch(context)
        return before

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out cases, after those that pytest's -m leaves out."""
        if self.limits.cases is None:
            return
        tests = defaultdict[str, list[pytest.Item]](list)
        for item in items:
            tests[test_of(item.nodeid)].append(item)
        kept = set[pytest.Item]()
        for test, cases in tests.items():
            few = min(self.limits.cases, len(cases))
            kept |= {cases[i * len(cases) // few] for i in range(few)}
            self.scale[test] = len(cases) / few
        items[:] = [item for item in items if item in kept]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.limits.seconds is not None and self.file_seconds[item.path] > self.limits.seconds:
            pytest.skip("the file's time is spent")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        test, start = test_of(item.nodeid), processor_seconds()
        names = item.fixturenames if isinstance(item, pytest.Function) else []
        self.fixtures[test] |= set(names)
        self.enter(test)
        result = yield
        self.enter("")
        self.file_seconds[item.path] += processor_seconds() - start
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function":
            return (yield)
        place = "" if fixturedef.scope == "session" else test_of(request.node.nodeid)
        before = self.enter(f"{FIXTURE} {place} {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self.enter(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(test_of(report.nodeid))

    def tests_of(self, context: str) -> Iterator[str]:
        """The tests that a context stands for: itself, or those that ask for the fixture."""
        if not context.startswith(f"{FIXTURE} "):
            if context:
                yield context
            return
        _, place, name = context.split(" ")
        for test, names in self.fixtures.items():
            if name in names and test.startswith(place):
                yield test


def test_of(node: str) -> str:
    """`credit/test_trees.py::test_name` of pytest's `tests/credit/test_trees.py::test_name[0]`: the
    cases of a test are one."""
    return node.removeprefix("tests/").partition("[")[0]


def processor_seconds() -> float:
    """A processor's time of this process and of its children that ended."""
    times = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(time.ru_utime + time.ru_stime for time in times)


def record(
    work: Path, tree: Path, tests: Sequence[str], options: Sequence[str], limits: Limits
) -> None:
    """Run tests in a copy of a tree, and note which of them run which lines, in WORK/recorded."""
    preload()
    with tempfile.TemporaryDirectory(prefix="machine-") as parent:
        folder, output = Path(parent) / "tree", Path(parent) / "output.txt"
        copied(folder, tree)
        child = multiprocessing.get_context("fork").Process(
            target=_recorded, args=(folder, tests, options, limits, output)
        )
        child.start()
        child.join()
        print(output.read_text()[-3000:])
        made = (folder / "recorded.json").read_text()
    (work / "recorded").mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(repr(tests).encode()).hexdigest()[:16]
    (work / "recorded" / f"{name}.json").write_text(made)


def _recorded(
    folder: Path, tests: Sequence[str], options: Sequence[str], limits: Limits, output: Path
) -> None:
    """In a child process: run tests, and write recorded.json."""
    enter(folder, output)
    import coverage

    watched = coverage.Coverage(
        data_file=None, config_file=False, source=[str(folder / name) for name in PACKAGES]
    )
    watched.start()
    contexts = Contexts(watched.switch_context, limits)
    pytest.main(["-q", "-p", "no:cacheprovider", *options, *tests], plugins=[contexts])
    watched.stop()
    seconds = dict.fromkeys(contexts.fixtures, 0.0)
    for context, spent in contexts.seconds.items():
        for test in contexts.tests_of(context):
            scale = 1.0 if context.startswith(f"{FIXTURE} ") else contexts.scale[test]
            seconds[test] += spent * scale
    names = list(seconds)
    number = {name: at for at, name in enumerate(names)}
    data = watched.get_data()
    lines = {
        str(Path(file).relative_to(folder)): {
            line: sorted({number[test] for each in known for test in contexts.tests_of(each)})
            for line, known in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    made = {
        "tests": [[name, round(seconds[name], 2), name in contexts.failed] for name in names],
        "lines": lines,
    }
    (folder / "recorded.json").write_text(json.dumps(made))
    sys.stdout.flush()
    os._exit(0)  # threads of tests may wait forever


def read_recorded(files: Iterable[Path]) -> Recorded:
    """Read the files of several calls of `record` as one."""
    recorded = Recorded()
    for path in files:
        one = json.loads(path.read_text())
        names = [name for name, _, _ in one["tests"]]
        for name, seconds, failed in one["tests"]:
            recorded.seconds[name] = seconds
            if failed:
                recorded.failed.add(name)
        for file, lines in one["lines"].items():
            known = recorded.lines.setdefault(file, {})
            for line, tests in lines.items():
                known[int(line)] = sorted({*known.get(int(line), []), *(names[i] for i in tests)})
    return recorded
