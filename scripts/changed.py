"""Run the tests that a diff touches.

    python scripts/changed.py [--since main] [--list]

A changed module is tested by the files that import it, or a name that its package passes on; where
there is none, by those that import a user of it in its room, else by the room's own. A module that
a command's function imports is tested by the files that run the command, too. A changed file of
tests/support stands for the tests that import it, a page for the tests of pages, a configuration
for those of settings. Every diff is held against the house and its prose; the whole suite is
`make test`.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("flowrl", "rewards", "samplers", "scripts")
TABLE = "flowrl/cli/command_table.py"
API, COMMANDS, OBJECT = "flowrl.api.", "flowrl.api.commands", "flowrl.api.run"
ALWAYS = ("tests/test_house.py", "tests/test_prose.py")
OTHERS = {  # the beginning of a path -> tests
    "docs/": ("tests/test_docs.py", "tests/test_site.py", "tests/pages/test_page_commands.py"),
    "README.md": ("tests/test_docs.py", "tests/pages/test_page_commands.py"),
    "configs/": ("tests/settings", "tests/recipes", "tests/test_anywhere.py"),
    "flowrl/demo/": ("tests/demo",),
    "flowrl/": ("tests/pages",),  # styles and scripts of pages
    "tests/golden": ("tests/credit", "tests/losses", "tests/likelihoods", "tests/samplers"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--since", default="main", help="the commit to compare with")
    parser.add_argument("--list", action="store_true", help="print the tests, and run none")
    given = parser.parse_args()
    found = list(tests_of(changed_files(given.since)))
    print("\n".join(found), flush=True)
    if found and not given.list:
        sys.exit(subprocess.run([sys.executable, "-m", "pytest", *found], cwd=PROJECT).returncode)


def changed_files(since: str) -> list[str]:
    """Files that differ from the last commit shared with `since`, new ones too."""
    base = git("merge-base", since, "HEAD").strip()
    new = git("ls-files", "--others", "--exclude-standard")
    return sorted({*git("diff", "--name-only", base).splitlines(), *new.splitlines()})


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=PROJECT, capture_output=True, text=True, check=True)
    return done.stdout


def tests_of(files: Iterable[str]) -> Iterator[str]:
    """The test files and folders for these files; none twice, and none that a folder has."""
    files = list(files)
    found = {test for file in files for test in _tests_of(file)} | ({*ALWAYS} if files else set())
    there = {test for test in found if (PROJECT / test).exists()}
    yield from sorted(t for t in there if not any(t.startswith(f"{other}/") for other in there))


def _tests_of(file: str) -> Iterator[str]:
    path = Path(file)
    if path.suffix != ".py":
        yield from next((tests for begin, tests in OTHERS.items() if file.startswith(begin)), ())
    elif path.name.startswith("test_"):
        yield file
    elif path.name == "conftest.py":
        yield path.parent.as_posix()
    else:
        module = name_of(path)
        written = ".".join(path.with_suffix("").parts)  # tests may import scripts as a package
        tests = importers({module, written, *passed_on(module)})
        if not tests:
            users = {other for other, names in imports().items() if module in names}
            tests = importers({user for user in users if room(user) == room(module)})
        tests = [*tests, *runners(module)]
        yield from tests or [f"tests/{room(module).rpartition('.')[2]}"]


def importers(modules: set[str]) -> list[str]:
    """The test files that import one of these."""
    found = [test for test, names in imports("tests").items() if names & modules]
    return [f"{t.replace('.', '/')}.py" for t in found if t.rpartition(".")[2].startswith("test_")]


def runners(module: str) -> list[str]:
    """The test files that run a command whose function imports this module."""
    names = {command for command, modules in commands().items() if module in modules}
    return [test for test, run in commands_run().items() if run & names]


@cache
def commands() -> dict[str, set[str]]:
    """The modules that each command's function imports or takes a name from, also through other
    functions of its file."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(_parsed(TABLE)):
        if not (isinstance(node, ast.Dict) and node.keys):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Call):
                call, *_ = (a.value for a in value.args if isinstance(a, ast.Constant))
                module, _, function = str(call).partition(":")
                found[str(key.value)] = {module, *_taken(module, function)}
    return found


@cache
def _taken(module: str, function: str) -> frozenset[str]:
    """The modules that the names of a function or method come from. A command is written on a call
    of the API, or on a method of its object: then also those of the call."""
    tree = _parsed(f"{module.replace('.', '/')}.py")
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    defined = [*tree.body, *(node for each in classes for node in each.body)]
    own = {node.name: node for node in defined if isinstance(node, ast.FunctionDef)}
    above = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    origin = {a.asname or a.name: node.module or "" for node in above for a in node.names}
    left, seen, modules, attributes = [function], set[str](), set[str](), set[str]()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        if name not in own:
            modules |= {origin[name]} if name in origin else set()
            continue
        for node in ast.walk(own[name]):
            if isinstance(node, ast.ImportFrom) and node.module:
                modules |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
            elif isinstance(node, ast.Name):
                left.append(node.id)
            elif isinstance(node, ast.Attribute):
                attributes.add(node.attr)
                left += [node.attr] if node.attr in own else []
    calls = [name for name in modules if name.startswith(API) and module == COMMANDS]
    for call in calls:
        inside, _, name = call.rpartition(".")
        if inside == OBJECT:
            modules = modules.union(*(_taken(inside, each) for each in {*attributes, name}))
        elif inside != API.rstrip("."):
            modules |= _taken(inside, name)
    return frozenset(modules)


@cache
def commands_run() -> dict[str, set[str]]:
    """The commands that each test file runs: the first word of a call such as `flowrl("plan", ...)`
    or `main(["plan", ...])`, and the word behind "flowrl" in a list of words."""
    found: dict[str, set[str]] = {}
    for path in sorted((PROJECT / "tests").rglob("test_*.py")):
        words = found.setdefault(path.relative_to(PROJECT).as_posix(), set())
        for node in ast.walk(_parsed(path.relative_to(PROJECT).as_posix())):
            if isinstance(node, ast.Call):
                words |= set(_constants(node.args[:1]))
            elif isinstance(node, ast.List | ast.Tuple):
                listed = _constants(node.elts)
                words |= {b for a, b in pairwise(listed) if a == "flowrl"} | {*listed[:1]}
    return found


def _constants(nodes: Iterable[ast.expr]) -> list[str]:
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse((PROJECT / file).read_text(encoding="utf-8"))


def passed_on(module: str) -> set[str]:
    """`samplers.FlowSDE` and the other names of a module that its package imports for others."""
    package = module.rpartition(".")[0]
    names = imports().get(package, set())
    return {f"{package}.{n.rpartition('.')[2]}" for n in names if n.startswith(f"{module}.")}


def name_of(path: Path) -> str:
    """A file's module: scripts are imported by their own names."""
    parts = path.with_suffix("").parts
    parts = parts[-1:] if parts[0] == "scripts" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """`flowrl.run` of `flowrl.run.watch.alarms`; a package beside flowrl is a room."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "flowrl" else 1])


@cache
def imports(*packages: str) -> dict[str, set[str]]:
    """The modules that each module of these packages imports, anywhere in its file."""
    found: dict[str, set[str]] = {}
    for package in packages or PACKAGES:
        for path in sorted((PROJECT / package).rglob("*.py")):
            names = found.setdefault(name_of(path.relative_to(PROJECT)), set())
            for node in ast.walk(_parsed(path.relative_to(PROJECT).as_posix())):
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
                elif isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
    return found


if __name__ == "__main__":
    main()
