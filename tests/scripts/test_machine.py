"""Mutants made by machine: what is drawn, what is put, which tests judge it, and the interval."""

import ast
import json
import subprocess
from collections import Counter
from dataclasses import replace

import pytest

from flowrl.paths import PROJECT
from scripts.mutants.machine import (
    ROOMS,
    Most,
    chosen_mutants,
    interval,
    report,
    report_pairs,
    room_of,
    tests_for,
    unjudged,
)
from scripts.mutants.operators import Made, mutants_of, variants
from scripts.mutants.recording import Limits, Recorded, read_recorded, record, test_of

for each in (test_of, tests_for):  # they begin with the word by chance
    each.__test__ = False


@pytest.mark.parametrize(
    ("source", "puts"),
    [
        ("a < b", {("comparison", "(a >= b)"), ("boundary", "(a <= b)")}),
        ("a is None", {("comparison", "(a is not None)")}),
        ("a - b", {("arithmetic", "(a + b)")}),
        ("-a", {("sign", "(a)")}),
        ("not a", {("sign", "(a)")}),
        ("a and b", {("boolean", "(a or b)")}),
        ("3", {("constant", "4")}),
        ("0.0", {("constant", "1.0")}),
        ("True", {("constant", "False")}),
        ("'text'", set()),
        ("a if b else c", {("branch", "(c if b else a)")}),
        ("f(a, b, c)", {("swapped arguments", "(f(b, a, c))")}),
        ("f(a, a)", set()),
        ("f(*a, b)", set()),
    ],
)
def test_an_operator_changes_one_thing(source, puts):
    assert set(variants(ast.parse(source, mode="eval").body)) == puts


def test_statements_are_dropped():
    call, error = ast.parse("f(a)\nraise E").body
    assert set(variants(call)) == {("dropped call", "pass")}
    assert set(variants(error)) == {("dropped raise", "pass")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rooms", [("flowrl/losses", "flowrl/likelihoods"), pytest.param(ROOMS, marks=pytest.mark.slow)]
)
def test_the_seed_decides_and_every_mutant_is_another_program(rooms):
    rooms = {room: ROOMS[room] for room in rooms}
    mutants = chosen_mutants(5 * len(rooms), 7, rooms)
    again, other = (chosen_mutants(5 * len(rooms), seed, rooms) for seed in (7, 8))
    assert list(mutants.items()) == list(again.items()) != list(other.items())
    assert Counter(room_of(m.file, rooms) for m in mutants.values()) == dict.fromkeys(rooms, 5)
    for mutant in mutants.values():
        text = (PROJECT / mutant.file).read_text()
        assert ast.dump(ast.parse(mutant.applied(text))) != ast.dump(ast.parse(text))


CODE = """\
STEPS = 3

class Kernel:
    noise: float = 0.5

    def scaled(self, x, by=2):
        if x > 0:
            return x * by
        return (
            x
            + self.noise
        )
"""


def made(text: str, operator: str, put: str) -> Made:
    return next(m for m in mutants_of("f.py", text) if (m.operator, m.put) == (operator, put))


def test_a_mutant_replaces_its_place_alone_also_behind_other_letters():
    text = "é = 1  # é\nb = 1\n"
    assert made(text, "constant", "2").applied(text) == "é = 2  # é\nb = 1\n"


def test_a_mutant_is_the_same_where_its_statement_is_whatever_stands_around_it():
    moved = CODE.replace("        if", "        x = -x\n        if").replace(
        "STEPS", "MORE = 1\nSTEPS"
    )
    moved = moved.replace(
        "            x\n            + self.noise\n", "            x + self.noise\n"
    )
    for operator, put in (
        ("constant", "1.0"),
        ("constant", "1"),
        ("boundary", "(x >= 0)"),
        ("arithmetic", "(x / by)"),
        ("arithmetic", "(x - self.noise)"),
    ):
        one, other = made(CODE, operator, put), made(moved, operator, put)
        assert one.identity == other.identity and one.line != other.line
        renamed = CODE.replace("scaled", "smaller").replace("noise:", "spread:")
        assert made(renamed, operator, put).identity != one.identity
    assert len({m.identity for m in mutants_of("f.py", "a = f(1, 1, 1)\na = f(1, 1, 1)\n")}) == 6


def test_tests_that_run_the_statement_judge_it_or_what_is_around_it_when_it_runs_at_import():
    assert made(CODE, "boundary", "(x >= 0)").judged == (7, 7)
    assert made(CODE, "arithmetic", "(x - self.noise)").judged == (9, 11)
    assert made(CODE, "constant", "3").judged == (6, 12)  # a default value: the function
    assert made(CODE, "constant", "1.0").judged == (3, 12)  # a field: the class
    assert made(CODE, "constant", "4").judged == (1, 13)  # the file


@pytest.fixture
def two_trees(tmp_path):
    """The trees before and after: one function changed, another moved to a file of its own."""
    same = "def scaled(x):\n    return 2 * x + 1\n\n"
    files = {
        "before": {"one.py": same + "def less(x):\n    return x - 1 if x > 3 else x\n"},
        "after": {
            "a/two.py": same,
            "a/one.py": "def less(x):\n    return x - 1 if x > 4 else 7 * x\n",
        },
    }
    for tree, texts in files.items():
        for name, text in texts.items():
            (tmp_path / tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / tree / name).write_text(text)
    return tmp_path / "before", tmp_path / "after"


def test_the_same_mutants_are_drawn_in_two_trees(two_trees):
    before, after = two_trees
    was = chosen_mutants(100, 0, {"room": ["one.py"]}, before)
    now = chosen_mutants(100, 0, {"room": ["a"]}, after)
    assert {was[name].put for name in was.keys() & now} == {"3", "2", "(2 / x)", "(2 * x - 1)"}
    for operator in ("arithmetic", "constant"):  # the smallest numbers come first in both
        order = [name for name in was if name in now and was[name].operator == operator]
        assert order == [name for name in now if name in order] and len(order) == 2


def test_the_tests_that_run_the_line_and_little_else_judge_it():
    a, b, c, d, e = (f"{letter}.py::test_{letter}" for letter in "abcde")
    recorded = Recorded(
        lines={"f.py": {3: [a, b, e], 4: [c, d]}},
        seconds={a: 3.0, b: 4.0, c: 1.0, d: 1.0, e: 14.0},
        failed={d},
    )
    sizes = {a: 9, b: 2, c: 5, d: 1, e: 8}
    mutant = Made("f.py", "constant", 3, 0, 4, 1, "2", (3, 4), "")
    assert tests_for(mutant, recorded, sizes) == [b, c, e]  # within 20 seconds
    assert tests_for(replace(mutant, judged=(9, 9)), recorded, sizes) == []
    assert test_of("tests/credit/test_trees.py::test_one[a/b]") == "credit/test_trees.py::test_one"


def test_what_was_not_caught_is_judged_by_the_tests_that_have_not_judged_it():
    one, two = "a.py::test_a", "b.py::test_b"
    recorded = Recorded(lines={"f.py": {3: [one, two]}}, seconds={one: 1.0, two: 1.0})
    mutant = Made("f.py", "constant", 3, 0, 3, 1, "2", (3, 3), "")
    mutants = dict.fromkeys(("new", "caught", "survives", "unrun", "judged"), mutant)
    known = {
        "caught": {"verdict": "caught", "tests": [one]},
        "survives": {"verdict": "survives", "tests": [one]},
        "unrun": {"verdict": "unrun", "tests": []},
        "judged": {"verdict": "survives", "tests": [one, two]},
    }
    left = unjudged(mutants, known, recorded, Most())
    assert left == {"new": [one, two], "survives": [two], "unrun": [one, two]}
    left = unjudged(mutants, known, recorded, Most(tests=1))
    assert left == {"new": [one], "unrun": [one]}


def test_the_interval_is_wilsons():
    """For 0 of 10 and 5 of 10: Wilson (1927), as statsmodels has it."""
    assert interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def written(work, rows):
    lines = [
        json.dumps(
            {
                "name": name,
                "key": f"{file} {verdict}",
                "file": file,
                "operator": op,
                "verdict": verdict,
            }
        )
        for name, file, op, verdict in rows
    ]
    work.mkdir()
    (work / "results.jsonl").write_text("\n".join(lines) + "\n")


def test_a_report_counts_by_room_and_operator(tmp_path, capsys):
    rows = [("a", "samplers/a.py", "sign", "caught"), ("b", "samplers/a.py", "sign", "survives")]
    rows += [("c", "rewards/b.py", "constant", "unrun")]
    written(tmp_path / "work", rows)
    report(tmp_path / "work", ROOMS)
    said = capsys.readouterr().out
    assert "3 mutants, 1 on lines that no recorded test runs" in said
    assert "1 of    2 survive  0.500" in said and said.endswith("samplers/a.py survives\n")


def test_a_report_of_two_trees_counts_pairs(tmp_path, capsys):
    """5 pairs that differ, all in one direction: two-sided 2 / 2**5."""
    rows = [(f"{i}", "samplers/a.py", "sign", "survives" if i < 5 else "caught") for i in range(9)]
    written(tmp_path / "before", rows)
    after = [(name, "samplers/b.py", op, "caught") for name, _, op, _ in rows]
    written(tmp_path / "after", [*after, ("new", "samplers/b.py", "sign", "survives")])
    report_pairs(tmp_path / "before", tmp_path / "after", ROOMS)
    said = capsys.readouterr().out
    assert "9 mutants in both trees, 0 unrun before, 0 after" in said
    assert "0 of    9 survive" in said and "only before 5, only after 0, p 0.06" in said
    assert said.count("survives -> caught") == 5 and "new" not in said


STEPS = """
def doubled(x):
    return 2 * x

def halved(x):
    return x / 2
"""
TESTS = """
import pytest
from samplers.steps import doubled, halved

@pytest.fixture(scope="module")
def four():
    return doubled(2)

def test_first(four):
    assert four == 4

def test_second(four):
    assert halved(four) == 2

@pytest.mark.parametrize("x", [1, 2])
def test_wrong(x):
    assert halved(x) == x
"""


@pytest.mark.slow
def test_lines_of_a_modules_fixture_belong_to_all_its_tests(tmp_path):
    pytest.importorskip("coverage")
    tree = tmp_path / "tree"
    for name, text in {
        "samplers/__init__.py": "",
        "samplers/steps.py": STEPS,
        "tests/__init__.py": "",
        "tests/test_steps.py": TESTS,
        "pyproject.toml": "",
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    record(tmp_path / "work", tree, ["tests"], [], Limits())
    recorded = read_recorded((tmp_path / "work" / "recorded").glob("*.json"))
    tests = [f"test_steps.py::test_{name}" for name in ("first", "second", "wrong")]
    assert recorded.lines["samplers/steps.py"][3] == tests[:2]
    assert recorded.lines["samplers/steps.py"][6] == tests[1:]
    assert recorded.failed == {tests[2]} and set(recorded.seconds) == set(tests)
