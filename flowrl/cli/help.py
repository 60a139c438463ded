"""Help texts, made from the source of dataclasses and settings without importing them.

Importing torch takes seconds, which `--help` should not.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import fill

_SOURCES = Path(__file__).resolve().parent.parent
_WIDTH = 98
_POSITIONAL = ("Word[", "tyro.conf.Positional[")
RECIPE_NAME = "recipe.name"


@dataclass(frozen=True)
class Command:
    """A command: its line in the overview, its example, and the class that holds its words."""

    usage: str
    about: str
    example: str
    file: str = ""  # below flowrl/
    words: str = ""  # the class in it
    settings: bool = False  # whether every setting of a run's file is an option


COMMANDS = {
    "new": Command(
        "FOLDER [--model M] [--recipe R] [--text]",
        "write a run file, a reward of your own and prompts to start from",
        "flowrl new my_run --recipe flow_grpo",
        "cli/new.py",
        "New",
    ),
    "train": Command(
        "CONFIG [--train.lr 1e-4 ...] | --resume RUN",
        "align a model; every setting of the file is an option",
        "flowrl train configs/demo.yaml --train.iterations 4 --recipe.group 6",
        settings=True,
    ),
    "sample": Command(
        'RUN "a red circle" ...',
        "generate samples with a run's weights",
        'flowrl sample runs/demo-0001 "a red circle" --weights best --count 8',
        "settings/arguments.py",
        "SampleArguments",
    ),
    "evaluate": Command(
        "RUN [--prompts FILE ...]",
        "score a run's weights, or its base, on prompts",
        "flowrl evaluate runs/demo-0001 --weights base --rewards shapes brightness",
        "settings/arguments.py",
        "EvaluateArguments",
    ),
    "report": Command(
        "RUN",
        "write a run's page: curves, samples over the run, tree, settings, alarms",
        "flowrl report runs/demo-0001 --out demo.html",
        "cli/report.py",
        "Report",
    ),
    "compare": Command(
        "RUN RUN ...",
        "write several runs on one page, with paired intervals over prompts",
        "flowrl compare runs/demo-0001 runs/demo_lora-0001 --out comparison.html",
        "cli/report.py",
        "Compare",
    ),
    "export": Command(
        "RUN [--merged] [--push-to-hub OWNER/NAME]",
        "write an adapter for diffusers, ComfyUI and kohya's tools, with a model card",
        "flowrl export runs/demo-0001 --weights best --push-to-hub me/shapes",
        "cli/export.py",
        "Export",
    ),
    "plan": Command(
        "CONFIG ...",
        "describe an iteration and its costs, without loading weights",
        "flowrl plan configs/papers/*.yaml --memory 80GiB",
        "settings/arguments.py",
        "PlanArguments",
        settings=True,
    ),
    "calibrate": Command(
        "CONFIG",
        "find the noise of each step for dense_grpo, before a run",
        "flowrl calibrate configs/papers/dense_grpo_sd35m_ocr.yaml --rounds 20",
        "cli/calibrate.py",
        "Calibrate",
        settings=True,
    ),
    "prove": Command(
        "CONFIG | --model PIPELINE",
        "compare whole samples with the pipeline's own call",
        "flowrl prove configs/demo.yaml --model.guidance.sample 4.5",
        "settings/arguments.py",
        "ProveArguments",
        settings=True,
    ),
    "recipes": Command(
        "[NAME]", "list the algorithms, or the settings of one", "flowrl recipes flow_grpo"
    ),
    "serve-reward": Command(
        "NAME [--port 8100 ...]",
        "serve a reward over HTTP, for {name: remote, url: ...}",
        "flowrl serve-reward '{name: shapes, kind: strict}' --port 8100",
        "cli/serve.py",
        "Serve",
    ),
    "score": Command(
        "FOLDER --rewards A,B",
        "score a folder of images: a table and a contact sheet",
        "flowrl score images --rewards brightness,colour",
        "evaluation/scoring.py",
        "ScoreArguments",
    ),
    "evaluate-rewards": Command(
        "DATA --rewards A,B",
        "compare rewards with human preferences: a page",
        "flowrl evaluate-rewards configs/preferences/pairs.jsonl --rewards shapes,brightness",
        "evaluation/reward_evaluation.py",
        "EvaluateRewards",
    ),
    "suites": Command(
        "[NAME]",
        "list prompt sets with their own metrics",
        "flowrl suites shapes",
        "evaluation/suites.py",
        "Suites",
    ),
    "doctor": Command(
        "",
        "check Python, devices, versions, extras, the hub's cache and launchers",
        "flowrl doctor",
        "cli/doctor.py",
        "Doctor",
    ),
    "completion": Command(
        "SHELL",
        "print the script that completes commands, options and runs in bash, zsh or fish",
        "flowrl completion bash >> ~/.bashrc",
    ),
    "schema": Command(
        "",
        "print the JSON schema of a run's file, for editors",
        "flowrl schema > flowrl.schema.json",
    ),
}


def overview() -> str:
    """All commands, for `flowrl --help`."""
    width = max(len(f"{name} {c.usage}") for name, c in COMMANDS.items() if name != "train")
    lines = [
        f"  {f'{n} {c.usage}':<{width}}  {c.about}" for n, c in COMMANDS.items() if n != "train"
    ]
    return "\n".join(
        [
            "usage: flowrl COMMAND ...",
            "",
            f"  {'train CONFIG [--train.lr 1e-4 ...]':<{width}}  {COMMANDS['train'].about}",
            f"  {'train --resume RUN':<{width}}  continue an interrupted run, to the same bits",
            *lines,
            "",
            "`flowrl COMMAND --help` explains a command, `flowrl --version` prints the version.",
        ]
    )


def command_help(name: str) -> str:
    """Usage, meaning, words, options and an example of one command."""
    command = COMMANDS[name]
    parts = [f"usage: flowrl {name} {command.usage}".rstrip()]
    if command.words:
        found = _classes(_SOURCES / command.file)[command.words]
        parts.append(fill(" ".join((ast.get_docstring(found) or "").split()), _WIDTH))
        parts.append("\n".join(_words(found)))
    else:
        parts.append(f"{command.about[0].upper()}{command.about[1:]}.")
    if name == "train":
        parts.append("  --folder RUN\n      A new folder for the run; runs/CONFIG-0001 if absent.")
        parts.append("  --resume RUN\n      Continue this run from its last checkpoint.")
        parts.append("  --no-cache\n      Prove the model at the start though a proof is kept.")
    if command.settings:
        parts.append("settings of a run's file, each of which is an option:")
        parts.append("\n".join(_settings()))
    parts.append(f"example:\n  {command.example}")
    return "\n\n".join(parts)


def _words(kind: ast.ClassDef) -> Iterator[str]:
    for name, annotation, default, about in _fields(kind):
        if annotation.startswith(_POSITIONAL):
            yield _entry(name.upper(), "", about)
        else:
            yield _entry(_option(name), "" if annotation == "bool" else default, about)


def command_options(name: str) -> dict[str, str]:
    """Every option of a command, with dashes, and its annotation in the source."""
    command, found = COMMANDS[name], dict[str, str]()
    if command.words:
        fields = _fields(_classes(_SOURCES / command.file)[command.words])
        found |= {_option(n): kind for n, kind, _, _ in fields if not kind.startswith(_POSITIONAL)}
    if name == "train":
        found |= {"--folder": "Path", "--resume": "RUN", "--no-cache": "bool"}
    if command.settings:
        found |= {_option(path): kind for path, kind, _, _ in _setting_fields("Run", "")}
    return found


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _settings() -> Iterator[str]:
    for path, _, default, about in _setting_fields("Run", ""):
        if path == RECIPE_NAME:
            yield _entry("--recipe.name NAME", "", "The algorithm; `flowrl recipes NAME` lists the")
            yield "      settings of one: --recipe.steps, --recipe.group, ..."
        else:
            yield _entry(_option(path), default, about)


def _setting_fields(kind: str, at: str) -> Iterator[tuple[str, str, str, str]]:
    """(path, annotation, default, docstring) of each setting; of the recipe, that of its name."""
    classes = _setting_classes()
    for name, annotation, default, about in _fields(classes[kind]):
        inner = [each for each in classes if each in _identifiers(annotation)]
        if name == "recipe":
            yield RECIPE_NAME, "str", "", ""
        elif inner and "tuple" not in annotation:
            yield from _setting_fields(inner[0], f"{at}{name}.")
            if "RowCount" in annotation:  # one number may stand for the section
                yield f"{at}{name}", annotation, default, about
        else:
            yield f"{at}{name}", annotation, default, about


def _entry(name: str, default: str, about: str) -> str:
    shown = f" ({default})" if default else ""
    text = fill(" ".join(about.split()), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {name}{shown}" + (f"\n{text}" if about else "")


def _fields(kind: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    """(name, annotation, default, docstring) of each field of a class."""
    for here, below in zip(kind.body, [*kind.body[1:], None], strict=True):
        if not isinstance(here, ast.AnnAssign) or not isinstance(here.target, ast.Name):
            continue
        about = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            about = str(below.value.value)
        default, alias = _default(here.value)
        yield alias or here.target.id, ast.unparse(here.annotation), default, about


def _default(value: ast.expr | None) -> tuple[str, str]:
    """A field's default as text, and its name in a file if that differs."""
    if not isinstance(value, ast.Call):
        return _plain(value), ""
    named = {keyword.arg: keyword.value for keyword in value.keywords}
    alias = ast.literal_eval(named["alias"]) if "alias" in named else ""
    return _plain(named.get("default")), alias


def _plain(value: ast.expr | None) -> str:
    if value is None:
        return ""
    text = ast.unparse(value)
    words = {"None": "null", "True": "true", "False": "false", "()": ""}
    return words.get(text, text.strip("'"))


def _identifiers(annotation: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(annotation)) if isinstance(node, ast.Name)}


@cache
def _classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


@cache
def _setting_classes() -> dict[str, ast.ClassDef]:
    found: dict[str, ast.ClassDef] = {}
    for path in sorted((_SOURCES / "settings").glob("*.py")):
        found |= _classes(path)
    return found
