"""Mutants made by machine: what is drawn, what is put, which tests judge it, and the interval."""

import ast
import json
from collections import Counter

import pytest

from flowrl.paths import PROJECT
from scripts.mutants.machine import (
    ROOMS,
    Made,
    chosen_mutants,
    interval,
    report,
    test_of,
    tests_for,
    variants,
)

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


@pytest.mark.parametrize(
    "rooms", [("flowrl/losses", "flowrl/likelihoods"), pytest.param(ROOMS, marks=pytest.mark.slow)]
)
def test_the_seed_decides_and_every_mutant_is_another_program(rooms):
    mutants = chosen_mutants(5 * len(rooms), 7, rooms)
    again, other = (chosen_mutants(5 * len(rooms), seed, rooms) for seed in (7, 8))
    assert mutants == again != other
    assert Counter(
        next(room for room in rooms if m.file.startswith(f"{room}/")) for m in mutants
    ) == dict.fromkeys(rooms, 5)
    for mutant in mutants:
        text = (PROJECT / mutant.file).read_text()
        assert ast.dump(ast.parse(mutant.applied(text))) != ast.dump(ast.parse(text))


def test_a_mutant_replaces_its_place_alone_also_behind_other_letters():
    mutant = Made("f.py", "constant", 1, len("é = ".encode()), 1, len("é = 1".encode()), "2")
    assert mutant.applied("é = 1  # é\nb = 1\n") == "é = 2  # é\nb = 1\n"


def test_the_tests_that_run_the_line_and_little_else_judge_it():
    recorded = {"f.py": {"3": ["a.py::test_a", "b.py::test_b"], "4": ["c.py::test_c"]}}
    sizes = {"a.py::test_a": 9, "b.py::test_b": 2, "c.py::test_c": 5}
    mutant = Made("f.py", "constant", 3, 0, 4, 1, "2")
    assert tests_for(mutant, recorded, sizes) == ["b.py::test_b", "c.py::test_c", "a.py::test_a"]
    assert tests_for(Made("f.py", "constant", 9, 0, 9, 1, "2"), recorded, sizes) == []
    assert test_of("tests.credit.test_trees.test_one") == "credit/test_trees.py::test_one"
    assert test_of("") is None and test_of("tests.support.runs.tree") is None


def test_the_interval_is_wilsons():
    """For 0 of 10 and 5 of 10: Wilson (1927), as statsmodels has it."""
    assert interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_a_report_counts_by_room_and_operator(tmp_path, capsys):
    rows = [("samplers/a.py", "sign", "caught"), ("samplers/a.py", "sign", "survives")]
    rows += [("rewards/b.py", "constant", "unrun")]
    lines = [
        json.dumps({"key": f"{file} {verdict}", "file": file, "operator": op, "verdict": verdict})
        for file, op, verdict in rows
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    report(tmp_path)
    said = capsys.readouterr().out
    assert "3 mutants, 1 on lines that no recorded test runs" in said
    assert "1 of    2 survive  0.500" in said and said.endswith("samplers/a.py survives\n")
