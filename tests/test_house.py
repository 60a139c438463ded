"""The structure of the code: rooms without a cycle, and one meaning for each public name."""

import ast
import functools
import random
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flowrl.cli.doctor import OPTIONAL
from flowrl.iteration.open import FEATURES
from flowrl.paths import PROJECT

PACKAGES = ("samplers", "rewards", "flowrl")
ROOT_FOLDERS = {
    ".ci",
    ".github",
    "configs",
    "docs",
    "examples",
    "scripts",
    "tests",
    "typings",
    *PACKAGES,
}
ROOT_FILES = {
    *{"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "LICENSE", "CITATION.cff"},
    *{"LOG.md", "pyproject.toml", "setup.py", "constraints.txt", "Makefile", "Dockerfile"},
    *{"mkdocs.yml", ".dockerignore", ".gitignore", ".pre-commit-config.yaml"},
    ".git-blame-ignore-revs",
}
# what the files of rewards and of features offer; what a script starts with
# what each file of a room has by the same name
PROTOCOL = {"load", "judge", "main", "wrap", "wrap_unit", "SCORED_KINDS", "NEEDED_COLUMNS"}


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((PROJECT / package).rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a file, anywhere in it. They stand among statements, so no expression is
    looked into."""
    statements, imported = [*parsed(path).body], list[ast.Import | ast.ImportFrom]()
    for node in statements:  # grows as it is read
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported.append(node)
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements += getattr(node, part, [])
    return imported


def test_imports_are_found_in_every_block() -> None:
    """Against a walk of whole trees, over files with imports in functions and branches."""
    for path in sorted((PROJECT / "flowrl" / "cli").glob("*.py")):
        walked = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.Import | ast.ImportFrom)]
        assert {id(node) for node in import_statements(path)} == {id(node) for node in walked}


def public_names(path: Path) -> Iterator[str]:
    """Classes, functions and constants that a module defines at its top."""
    for node in parsed(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and not type_variable(node.value):
                    yield target.id


def type_variable(value: ast.expr | None) -> bool:
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in {"TypeVar", "ParamSpec"}


def test_a_public_name_is_defined_once() -> None:
    places = defaultdict(set)
    for path in modules():
        for name in public_names(path):
            if not name.startswith("_") and name not in {*PROTOCOL, "TYPE_CHECKING"}:
                places[name].add(str(path.relative_to(PROJECT)))
    assert not {name: sorted(found) for name, found in places.items() if len(found) > 1}


def member(module: str) -> str:
    """The member of flowrl that a module is, or is in."""
    return module.split(".")[1] if "." in module else module


def folder_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = defaultdict(set)
    for path in sorted((PROJECT / "flowrl").rglob("*.py")):
        own = member(".".join(path.relative_to(PROJECT).with_suffix("").parts))
        for node in import_statements(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flowrl":
                into = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                into = [alias.name for alias in node.names if alias.name.startswith("flowrl.")]
            else:
                continue
            graph[own] |= {member(each) for each in into} - {own}
    return graph


def exceptions_named(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"BaseException"}
    return {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}


def refuses(statements: list[ast.stmt]) -> bool:
    """Whether a UserError is raised here, a function of its own aside."""
    kept: list[ast.AST] = [*statements]
    for node in kept:  # grows as it is read
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            if isinstance(node.exc.func, ast.Name) and node.exc.func.id == "UserError":
                return True
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            kept += ast.iter_child_nodes(node)
    return False


def rewritten(tree: ast.AST) -> Iterator[int]:
    """Lines of `try` blocks whose refusals one of their handlers makes into another sentence: a
    UserError is a ValueError. A handler that names UserError does so on purpose."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and refuses(node.body):
            for handler in node.handlers:
                names = exceptions_named(handler)
                if "UserError" in names:
                    break
                if names & {"ValueError", "Exception", "BaseException"} and refuses(handler.body):
                    yield node.lineno


def test_a_refusal_is_not_rewritten_by_the_handler_of_its_own_block() -> None:
    refusal = "    if x:\n        raise UserError('a: choose another')\n"
    rewrites = "except (OSError, ValueError) as error:\n    raise UserError(f'a: {error}')\n"
    assert [*rewritten(ast.parse(f"try:\n{refusal}{rewrites}"))] == [1]
    assert not [*rewritten(ast.parse(f"try:\n{refusal}except UserError:\n    raise\n{rewrites}"))]
    for path in modules():
        for line in rewritten(parsed(path)):
            raise AssertionError(
                f"{path.relative_to(PROJECT)}:{line}: a refusal raised here is rewritten by the "
                "handler below: put `except UserError: raise` before it, or raise behind the block"
            )


def test_the_members_of_flowrl_import_each_other_without_a_cycle() -> None:
    graph = folder_graph()
    for own, into in graph.items():
        print(f"{own:<12} -> {' '.join(sorted(into))}")
    left = dict(graph)
    while free := [name for name, into in left.items() if not into & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other: {sorted(left)}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


def file_graph() -> dict[str, set[str]]:
    """The files that each file imports, anywhere in it. A package that is entered on the way to
    one of its files is not among them, unless a name is taken from it. Files of the sandbox import
    one another without their package's name."""
    files = {module_name(path): path for path in modules()}
    graph: dict[str, set[str]] = {}
    for own, path in files.items():
        begin = "rewards.sandbox." if own.startswith("rewards.sandbox.") else ""
        names = list[str]()
        for node in import_statements(path):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level and node.module, f"{own}: write imports in full"
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                names += [name if name in files else node.module for name in whole]
        names += [f"{begin}{name}" for name in names]
        graph[own] = files.keys() & set(names) - {own}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The largest groups of files of which each reaches every other."""
    reached = dict[str, set[str]]()
    for start in graph:
        left, found = [*graph[start]], set[str]()
        while left:
            if (name := left.pop()) not in found:
                found.add(name)
                left += graph[name]
        reached[start] = found
    groups = {
        frozenset(b for b in found if a in reached[b]) for a, found in reached.items() if a in found
    }
    return sorted(sorted(group) for group in groups)


def test_a_circle_of_files_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set[str](), "e": {"f"}, "f": {"e", "a"}}
    assert circles(graph) == [["a", "b", "c"], ["e", "f"]]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and under TYPE_CHECKING count too: whoever reads one file of a
    circle has to read them all, and a type that closes one belongs in a file below both. Features
    count as imported by the file that opens them by name."""
    graph = file_graph()
    features = {name for name in graph if name.startswith(f"{FEATURES}.")}
    assert len(features) > 15
    graph["flowrl.iteration.open"] |= features
    assert not circles(graph)


PRONOUNS = {
    *{"each", "found", "given", "here", "kept", "known", "made", "own", "some", "there", "both"},
    *{"every", "others", "that", "them", "these", "those", "told", "what", "who", "whose", "why"},
}
PUBLIC_ARGUMENTS = {  # keys of YAML files, and arguments of calls that users write
    "flowrl/recipes/text.py: each",  # of the transform Penalize
    *{f"flowrl/recipes/{file}.py: every" for file in ("grpo", "grpo_trees")},
    "flowrl/contrib/mix_grpo_flash.py: every",
    *{f"rewards/catalogue/{file}.py: every" for file in ("motion", "ocr")},
    *{f"flowrl/api/{file}.py: given" for file in ("run", "training")},
    "flowrl/api/importing_runs.py: what",
}


def variables(tree: ast.Module) -> Iterator[str]:
    """Names that functions give to values: variables, arguments, caught errors and functions
    inside functions; not the fields of classes and their methods."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                if isinstance(node, ast.arg):
                    yield node.arg
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id
                elif isinstance(node, ast.ExceptHandler | ast.FunctionDef) and node is not function:
                    yield node.name or ""


def test_variables_are_nouns() -> None:
    """What is `kept` may be a mask, a count or a decay: a reader must not guess."""
    pronouns = {
        f"{path.relative_to(PROJECT).as_posix()}: {name}"
        for path in modules()
        for name in variables(parsed(path))
        if name in PRONOUNS
    }
    assert pronouns == PUBLIC_ARGUMENTS, "name the thing"


def test_no_product_file_reads_the_code_of_flowrl() -> None:
    """Where code is read it is another's: a program to judge, an author's file, a class of the
    user whose source is part of a digest."""
    of_others = (
        "rewards/answers/",
        "rewards/sandbox/",
        "rewards/judging/",
        "rewards/catalogue/unigenbench.py",
    )
    of_others += ("flowrl/importing/readers/",)
    of_others += ("flowrl/models/diffusers/whole/proof_cache.py", "rewards/user_function.py")
    readers = ("import ast", "inspect.getsource", "inspect.findsource")
    found = [
        name
        for path in modules()
        if not (name := path.relative_to(PROJECT).as_posix()).startswith(of_others)
        and any(reader in path.read_text() for reader in readers)
    ]
    assert not found


def imports() -> dict[str, set[str]]:
    """Packages of others that the product imports, anywhere in a file, and where."""
    of_sandbox = {path.stem for path in (PROJECT / "rewards" / "sandbox").glob("*.py")}
    ours = {*PACKAGES, *sys.stdlib_module_names, *of_sandbox}
    found: dict[str, set[str]] = defaultdict(set)
    for path in modules():
        for node in import_statements(path):
            names = []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                found[name.partition(".")[0]].add(str(path.relative_to(PROJECT)))
    return {name: places for name, places in found.items() if name not in ours}


def test_what_is_imported_is_declared_and_what_is_declared_is_used() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    also = {canonicalize_name(Requirement(x).name) for e in extras if e != "dev" for x in extras[e]}
    packages = {
        name: {canonicalize_name(d) for d in found}
        for name, found in packages_distributions().items()
    }
    imported = {name: packages.get(name, {canonicalize_name(name)}) for name in imports()}
    unknown = {
        n: imports()[n] for n, made in imported.items() if not made & (needed | also | {*OPTIONAL})
    }
    assert not unknown, f"not in pyproject.toml: {unknown}"
    used = set[str]().union(*imported.values())
    assert needed - used == {"ftfy"}, "no product file imports these"  # ftfy: diffusers does


def test_the_root_holds_what_it_should() -> None:
    """A file that a slip of a command leaves in the root would be committed with the rest."""
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    there = {name.partition("/")[0] for name in done.stdout.split("\0") if name}
    assert there == {*ROOT_FILES, *ROOT_FOLDERS}


def test_no_file_holds_the_marks_of_a_merge() -> None:
    done = subprocess.run(
        ["git", "grep", "-lE", "^(<{7}|>{7}) "], cwd=PROJECT, capture_output=True, text=True
    )
    assert done.stdout == ""


@pytest.fixture(scope="module")
def drawn_for_a_module() -> float:
    return float(torch.rand(())) + random.random() + float(np.random.rand())


@pytest.mark.parametrize("time", [1, 2])
def test_random_numbers_of_a_test_do_not_depend_on_the_tests_before_it(
    time: int, drawn_for_a_module: float
) -> None:
    """In another order, and in another worker, a bound is tried on the same numbers, whether the
    test is the first to need what others share or not."""
    known = torch.Generator().manual_seed(0)
    assert torch.rand(()) == torch.rand((), generator=known)
    assert random.random() == random.Random(0).random()
    assert np.random.rand() == np.random.RandomState(0).rand()
