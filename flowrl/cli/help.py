"""Help texts, written from the schema, without torch, so that `--help` does not take seconds."""

from collections.abc import Iterator, Mapping
from textwrap import fill
from typing import Any

from flowrl.cli.command_table import COMMANDS, RECIPE_NAME
from flowrl.cli.schema import read_schema

_WIDTH = 98


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
            f"  {'train --resume RUN':<{width}}  resume an interrupted run, bit for bit",
            *lines,
            "",
            "`flowrl COMMAND --help` explains a command, `flowrl --version` prints the version.",
        ]
    )


def command_help(name: str) -> str:
    """Usage, description, arguments, options and an example of one command."""
    command = COMMANDS[name]
    parts = [f"usage: flowrl {name} {command.usage}".rstrip()]
    if command.words:
        entry = read_schema()["commands"][name]
        parts.append(fill(entry["about"], _WIDTH))
        parts.append("\n".join(_entry(word) for word in entry["words"]))
    else:
        parts.append(f"{command.about[0].upper()}{command.about[1:]}.")
    if command.settings:
        parts.append("settings of a run file, each of which is an option:")
        parts.append("\n".join(_settings()))
    parts.append(f"example:\n  {command.example}")
    return "\n\n".join(parts)


def command_options(name: str) -> dict[str, Mapping[str, Any]]:
    """Options of a command, with dashes, as in the schema."""
    if name not in read_schema()["commands"]:
        return {}
    words = read_schema()["commands"][name]["words"]
    settings = read_schema()["settings"] if COMMANDS[name].settings else ()
    return {word["name"]: word for word in (*words, *settings) if word["name"].startswith("--")}


def _settings() -> Iterator[str]:
    for setting in read_schema()["settings"]:
        if setting["name"] == f"--{RECIPE_NAME}":
            about = "The algorithm; `flowrl recipes NAME` lists its settings: --recipe.steps, "
            yield _entry({**setting, "name": "--recipe.name NAME", "about": f"{about}..."})
        else:
            yield _entry(setting)


def _entry(word: Mapping[str, Any]) -> str:
    shown = f" ({word['default']})" if word["default"] else ""
    about = fill(word["about"], _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {word['name']}{shown}" + (f"\n{about}" if about else "")
