"""The page of the stages: docs/architecture.md shows them as the code has them."""

import ast
import inspect
import re
from dataclasses import fields
from typing import get_type_hints

from flowrl.iteration import stages
from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.open import FEATURES, OF_ITERATIONS, OF_UNITS
from flowrl.iteration.stages import Stages
from flowrl.paths import PROJECT

PAGE = (PROJECT / "docs/architecture.md").read_text()


def drawn() -> list[str]:
    """A line for each stage, from the types of its protocol."""
    lines = []
    for field in fields(Stages):
        kind = get_type_hints(Stages)[field.name]
        if kind is PhaseClock:
            continue
        hints = get_type_hints(kind.__call__)
        result = hints.pop("return").__name__
        given = ", ".join(each.__name__ for each in hints.values())
        lines.append(
            f"{field.name:<7} {given:<27} -> {result:<13} flowrl/iteration/{field.name}.py"
        )
    return lines


def test_the_drawing_is_the_code_s() -> None:
    assert "\n".join(drawn()) in PAGE


def test_the_loop_calls_the_stages_in_the_order_of_the_drawing() -> None:
    body = inspect.getsource(stages.Stages.iterate)
    called = re.findall(r"self\.(\w+)\(", body)
    assert called[:6] == [line.split()[0] for line in drawn()]


def test_every_stage_has_its_file_and_every_record_its_line() -> None:
    for line in drawn():
        assert (PROJECT / line.split()[-1]).is_file()
        assert f"| {line.partition('->')[2].split()[0]} |" in PAGE


def changed_by(feature: str) -> set[str]:
    """The stages that a feature's `wrap` and `wrap_unit` replace, read from their source."""
    names = {field.name for field in fields(Stages)}
    path = PROJECT / FEATURES.replace(".", "/") / f"{feature}.py"
    changed: set[str] = set()
    for function in ast.parse(path.read_text()).body:
        if not isinstance(function, ast.FunctionDef) or "wrap" not in function.name:
            continue
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            if called == "estimating":
                changed.add("credit")
            elif called == "UnitStages":
                changed |= {"sample", "score"}
            elif called == "stages._replace" or [*map(ast.unparse, call.args[:1])] == ["stages"]:
                changed |= {each.arg for each in call.keywords if each.arg in names}
    return changed


def test_the_table_says_which_stages_a_feature_changes() -> None:
    table = PAGE.partition("| feature | a run needs it if |")[2].partition("\n\n")[0]
    row = r"^\| ([a-z_, ]+) \| [^|]+ \| ([a-z, ]+)(?::[^|]+)? \|$"
    rows = re.findall(row, table, re.MULTILINE)
    assert len(rows) > 15
    for features, said in rows:
        wrapped = set[str]().union(*map(changed_by, features.split(", ")))
        assert {*said.split(", ")} == wrapped, features


def test_every_feature_has_its_row() -> None:
    rows = re.findall(r"^\| ([a-z_, ]+) \|", PAGE, re.MULTILINE)
    named = {name for row in rows for name in row.split(", ")}
    folder = PROJECT / FEATURES.replace(".", "/")
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert files <= named
    assert {each.name for each in (*OF_UNITS, *OF_ITERATIONS)} <= files
