"""Help texts, written from the schema, without torch: `--help` should not take seconds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from flowrl.cli.schema import read_schema

_WIDTH = 98
RECIPE_NAME = "recipe.name"


@dataclass(frozen=True)
class Command:
    """A command: its line in the overview, its example, and the class of its arguments."""

    usage: str
    about: str
    example: str
    words: str = ""  # module:Class
    settings: bool = False  # whether every setting of a run's file is an option


COMMANDS = {
    "new": Command(
        "FOLDER [--model M] [--recipe R] [--text]",
        "write a run file, a reward of your own and prompts to start from",
        "flowrl new my_run --recipe flow_grpo",
        "flowrl.cli.new:New",
    ),
    "train": Command(
        "CONFIG [--train.lr 1e-4 ...] | --resume RUN",
        "align a model; every setting of the file is an option",
        "flowrl train configs/demo.yaml --train.iterations 4 --recipe.group 6",
        "flowrl.settings.arguments:TrainArguments",
        settings=True,
    ),
    "sample": Command(
        'RUN "a red circle" ...',
        "generate samples with a run's weights",
        'flowrl sample runs/demo-0001 "a red circle" --weights best --count 8',
        "flowrl.settings.arguments:SampleArguments",
    ),
    "evaluate": Command(
        "RUN [--prompts FILE ...]",
        "score a run's weights, or its base, on prompts",
        "flowrl evaluate runs/demo-0001 --weights base --rewards shapes brightness",
        "flowrl.settings.arguments:EvaluateArguments",
    ),
    "report": Command(
        "RUN",
        "write a run's page: curves, samples over the run, tree, settings, alarms",
        "flowrl report runs/demo-0001 --out demo.html",
        "flowrl.cli.report:Report",
    ),
    "compare": Command(
        "RUN RUN ...",
        "write several runs on one page, with paired intervals over prompts",
        "flowrl compare runs/demo-0001 runs/demo_lora-0001 --out comparison.html",
        "flowrl.cli.report:Compare",
    ),
    "export": Command(
        "RUN [--merged] [--push-to-hub OWNER/NAME]",
        "write an adapter for diffusers, ComfyUI and kohya's tools, with a model card",
        "flowrl export runs/demo-0001 --weights best --push-to-hub me/shapes",
        "flowrl.settings.arguments:ExportArguments",
    ),
    "plan": Command(
        "CONFIG ...",
        "describe an iteration and its costs, without loading weights",
        "flowrl plan configs/papers/*.yaml --memory 80GiB",
        "flowrl.settings.arguments:PlanArguments",
        settings=True,
    ),
    "calibrate": Command(
        "CONFIG",
        "find the noise of each step for dense_grpo, before a run",
        "flowrl calibrate configs/papers/dense_grpo_sd35m_ocr.yaml --rounds 20",
        "flowrl.cli.calibrate:Calibrate",
        settings=True,
    ),
    "prove": Command(
        "CONFIG | --model PIPELINE",
        "compare whole samples with the pipeline's own call",
        "flowrl prove configs/demo.yaml --model.guidance.sample 4.5",
        "flowrl.settings.arguments:ProveArguments",
        settings=True,
    ),
    "recipes": Command(
        "[NAME]", "list the algorithms, or the settings of one", "flowrl recipes flow_grpo"
    ),
    "serve-reward": Command(
        "NAME [--port 8100 ...]",
        "serve a reward over HTTP, for {name: remote, url: ...}",
        "flowrl serve-reward '{name: shapes, kind: strict}' --port 8100",
        "flowrl.cli.serve:Serve",
    ),
    "score": Command(
        "FOLDER --rewards A B",
        "score a folder of images: a table and a contact sheet",
        "flowrl score images --rewards brightness,colour",
        "flowrl.evaluation.scoring:ScoreArguments",
    ),
    "evaluate-rewards": Command(
        "DATA --rewards A B",
        "compare rewards with human preferences: a page",
        "flowrl evaluate-rewards configs/preferences/pairs.jsonl --rewards shapes,brightness",
        "flowrl.evaluation.reward_evaluation:EvaluateRewards",
    ),
    "suites": Command(
        "[NAME]",
        "list prompt sets with their own metrics",
        "flowrl suites shapes",
        "flowrl.evaluation.suites:Suites",
    ),
    "doctor": Command(
        "",
        "check Python, devices, versions, extras, the hub's cache and launchers",
        "flowrl doctor",
        "flowrl.cli.doctor:Doctor",
    ),
    "path": Command(
        "NAME",
        "print the path of a file that comes with flowrl",
        "flowrl path configs/accelerate/ddp.yaml",
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
        made = read_schema()["commands"][name]
        parts.append(fill(made["about"], _WIDTH))
        parts.append("\n".join(_entry(word) for word in made["words"]))
    else:
        parts.append(f"{command.about[0].upper()}{command.about[1:]}.")
    if command.settings:
        parts.append("settings of a run's file, each of which is an option:")
        parts.append("\n".join(_settings()))
    parts.append(f"example:\n  {command.example}")
    return "\n\n".join(parts)


def command_options(name: str) -> dict[str, Mapping[str, Any]]:
    """The options of a command, with dashes, as the schema describes them."""
    if name not in read_schema()["commands"]:
        return {}
    words = read_schema()["commands"][name]["words"]
    settings = read_schema()["settings"] if COMMANDS[name].settings else ()
    return {each["name"]: each for each in (*words, *settings) if each["name"].startswith("--")}


def _settings() -> Iterator[str]:
    for setting in read_schema()["settings"]:
        if setting["name"] == f"--{RECIPE_NAME}":
            about = (
                "The algorithm; `flowrl recipes NAME` lists the settings of one: --recipe.steps, "
            )
            yield _entry({**setting, "name": "--recipe.name NAME", "about": f"{about}..."})
        else:
            yield _entry(setting)


def _entry(word: Mapping[str, Any]) -> str:
    shown = f" ({word['default']})" if word["default"] else ""
    about = fill(word["about"], _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {word['name']}{shown}" + (f"\n{about}" if about else "")
