"""Each command has a call in Python, with its options as keywords, and is written on it."""

import importlib
import inspect
import shlex
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

import flowrl
import flowrl.api
from flowrl.cli import main
from flowrl.cli.command_table import COMMANDS
from flowrl.paths import PROJECT
from flowrl.settings.command_line.arguments import word_fields

# the call of each command, as a place that a test can replace
CALLS = {
    "new": "flowrl.api.around:new_run",
    "import": "flowrl.api.importing_runs:import_run",
    "train": "flowrl.api.run:Run.train",
    "runs": "flowrl.api.around:list_runs",
    "launch": "flowrl.api.run:Run.launch",
    "sample": "flowrl.api.run:Run.sample",
    "evaluate": "flowrl.api.run:Run.evaluate",
    "report": "flowrl.api.run:Run.report",
    "compare": "flowrl.api.run:compare",
    "export": "flowrl.api.run:Run.export",
    "plan": "flowrl.api.run:Run.plan",
    "calibrate": "flowrl.api.run:Run.calibrate",
    "prove": "flowrl.api.run:Run.prove",
    "convert": "flowrl.api.around:convert",
    "recipes": "flowrl.api.around:list_recipes",
    "rewards": "flowrl.api.around:list_rewards",
    "serve-reward": "flowrl.api.scoring:serve_reward",
    "vote": "flowrl.api.voting:vote",
    "fit-reward": "flowrl.api.voting:fit_reward",
    "score": "flowrl.api.scoring:score",
    "evaluate-rewards": "flowrl.api.scoring:evaluate_rewards",
    "suites": "flowrl.api.around:suites",
    "doctor": "flowrl.api.around:doctor",
    "drill": "flowrl.api.run:Run.drill",
    "path": "flowrl.paths:shipped_path",
    "completion": "flowrl.api.around:completion_script",
    "schema": "flowrl.api.around:schema",
}
# fields of a command that name the run of a method: they are given where the run is made
OF_RUN = {"run", "config", "configs", "folder", "model", "adapter", "trust"}
OTHER_NAMES = {("evaluate-rewards", "dataset"): "data"}
NO_KEYWORD = {("runs", "json"): "the call returns data, which a program reads as it is"}
OTHER_DEFAULTS = {("sample", "count"): "one sample per prompt was the method's before"}
# commands with code of their own: they answer a Tab, or print a path, without importing torch
ALONE = {"path", "completion"}


def found(place: str) -> Any:
    module, _, name = place.partition(":")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def arguments(name: str) -> type | None:
    words = COMMANDS[name].words
    return found(words) if words else None


def test_each_command_has_a_public_call() -> None:
    assert CALLS.keys() == COMMANDS.keys()
    public = {id(getattr(flowrl, name)) for name in flowrl.__all__}
    for place in CALLS.values():
        whole = place.removesuffix(f".{place.rpartition('.')[2]}") if "Run." in place else place
        assert id(found(whole)) in public, place


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].words])
def test_options_are_keywords_with_the_same_defaults(name: str) -> None:
    kind, call = arguments(name), found(CALLS[name])
    assert kind is not None
    known, method = inspect.signature(call).parameters, "Run." in CALLS[name]
    for field in fields(kind):
        keyword = OTHER_NAMES.get((name, field.name), field.name)
        if (name, field.name) in NO_KEYWORD:
            assert keyword not in known
            continue
        if method and field.name in OF_RUN and keyword not in known:
            continue
        assert keyword in known, f"{name}: {field.name} is no keyword of {CALLS[name]}"
        default, own = known[keyword].default, field.default
        if (name, field.name) in OTHER_DEFAULTS or field.name in word_fields(kind):
            continue
        needed = inspect.Parameter.empty
        if default is needed:
            assert own in (MISSING, (), None), f"{name}: {field.name} has a default"
        else:
            assert (own or None) == (default or None), f"{name}: {field.name}: {own!r}, {default!r}"
    if COMMANDS[name].settings:
        assert "settings" in inspect.signature(flowrl.Run).parameters


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ALONE])
def test_the_command_makes_the_call(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Reached(Exception):
        """The call was made."""

    def reached(*given: Any, **named: Any) -> None:
        raise Reached

    place = "flowrl.api.run:Run.begin" if name == "train" else CALLS[name]  # what train() calls
    module, _, attribute = place.partition(":")
    monkeypatch.setattr(f"{module}.{attribute}", reached)
    (tmp_path / "my_run.yaml").write_text((PROJECT / "configs/demo.yaml").read_text())
    (tmp_path / "run.yaml").write_text((PROJECT / "configs/demo.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    example = COMMANDS[name].example.replace("papers/*", "demo")  # a shell writes the names out
    words = shlex.split(example.partition(" > ")[0])
    with pytest.raises(Reached):
        main(words[1:])


def test_dir_lists_the_public_names_alone_and_all_are_documented() -> None:
    assert dir(flowrl) == sorted(flowrl.__all__)
    assert dir(flowrl.api) == sorted(set(flowrl.__all__) - {"__version__", "path"})
    page = (PROJECT / "docs/api.md").read_text(encoding="utf-8")
    missing = [name for name in flowrl.__all__ if f"flowrl.{name}" not in page]
    assert not missing, f"docs/api.md does not name {', '.join(missing)}"
    for name in flowrl.__all__:
        if callable(getattr(flowrl, name)):
            assert inspect.getdoc(getattr(flowrl, name)), name


def test_what_needs_no_torch_does_not_import_it() -> None:
    code = "import sys, flowrl; flowrl.path('configs/demo.yaml'); flowrl.UserError; dir(flowrl); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
