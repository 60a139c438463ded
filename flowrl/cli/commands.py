"""What each word of the command line does."""

import inspect
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import tyro
import yaml

from flowrl.errors import UserError
from flowrl.paths import find
from flowrl.recipes import RECIPES
from flowrl.settings import RECIPE_SETTINGS, Run
from flowrl.settings.arguments import EvaluateArguments, PlanArguments, SampleArguments
from flowrl.settings.read import check_run, override, read_run, run_from

T = TypeVar("T")


def parse_arguments(kind: type[T], arguments: Sequence[str], prog: str) -> T:
    return tyro.cli(kind, args=list(arguments), prog=f"flowrl {prog}", description=kind.__doc__)


def train_command(arguments: list[str]) -> int:
    """`train CONFIG [overrides]` or `train --resume RUN`."""
    own, rest = _split(arguments, ("--resume", "--folder"))
    if "--resume" in own:
        return _resume(Path(own["--resume"]), rest)
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-h", "--help")):
        raise UserError("train: name a file, such as `flowrl train configs/demo.yaml`")
    if rest[0] in ("-h", "--help"):
        print("usage: flowrl train CONFIG [--folder RUN] [--train.lr 1e-4 ...] | --resume RUN")
        print(
            "every setting of a file is an option: flowrl train configs/demo.yaml --help lists them"
        )
        return 0
    path = find(rest[0])
    run = override(read_run(path), rest[1:])
    check_run(run)
    folder = Path(own["--folder"]) if "--folder" in own else None
    if folder is not None and folder.exists():
        raise UserError(f"{folder} exists; give another --folder, or --resume {folder}")
    quiet()
    from flowrl.run.train import start

    return _finish(start(run, path.stem, folder))


def _resume(folder: Path, rest: Sequence[str]) -> int:
    if rest and not rest[0].startswith("-"):
        raise UserError(f"train --resume takes a run's folder and options, not {rest[0]}")
    run = override(run_of(folder), rest)
    check_run(run)
    quiet()
    from flowrl.run.train import resume

    return _finish(resume(run, folder))


def _finish(result: "object") -> int:
    from flowrl.run.train import Result

    assert isinstance(result, Result)
    code = 0 if result.done else 128 + (result.signal or 0)
    if not result.main:
        return code
    if not result.done:
        print(f"saved; go on with: flowrl train --resume {result.folder}")
        return code
    for name, value in result.first.items():
        if name == "image/diversity" or not name.startswith("image/"):
            print(f"held-out {name.removeprefix('image/')}: {value:.3f} -> {result.last[name]:.3f}")
    print(f"samples: {result.folder / 'samples'}  weights: {result.weights}")
    return code


def sample_command(arguments: list[str]) -> int:
    from flowrl.cli.sample import sample_prompts as paint

    given = parse_arguments(SampleArguments, arguments, "sample")
    if not given.prompts or not all(prompt.strip() for prompt in given.prompts):
        raise UserError('sample: give prompts, such as: flowrl sample RUN "a red circle"')
    quiet()
    paint(run_of(given.run), given)
    return 0


def evaluate_command(arguments: list[str]) -> int:
    from flowrl.cli.sample import evaluate_weights as score

    given = parse_arguments(EvaluateArguments, arguments, "evaluate")
    quiet()
    score(run_of(given.run), given)
    return 0


def plan(arguments: list[str]) -> int:
    own, rest = _split(arguments, ("--svg", "--iteration", "--memory"))
    if not rest:
        raise UserError("plan: name a file, such as `flowrl plan configs/demo.yaml`")
    words = [rest[0], *(word for pair in own.items() for word in pair)]
    given = parse_arguments(PlanArguments, words, "plan")
    run = override(read_run(find(str(given.config))), rest[1:])
    check_run(run)
    quiet()
    from flowrl.cli.plan import describe_run
    from flowrl.run import memory

    print(describe_run(run, given.iteration, given.svg))
    print(memory.memory_report(run, given.memory, given.iteration))
    return 0


def recipes(arguments: list[str]) -> int:
    """The table, or the settings of one with types, defaults and source."""
    if not arguments:
        width = max(map(len, RECIPES))
        for name, recipe in RECIPES.items():
            print(f"{name:<{width}}  {(recipe.__doc__ or '').strip().splitlines()[0]}")
        return 0
    name = arguments[0]
    if name not in RECIPE_SETTINGS:
        run_from({"recipe": {"name": name}}, "recipes")
    print(f"{name}: {inspect.cleandoc(RECIPES[name].__doc__ or '')}\n")
    rows = recipe_rows(name)
    width = max(len(key) for key, _, _ in rows)
    for key, kind, default in rows:
        print(f"  {key:<{width}}  {default}  ({kind})")
    return 0


def recipe_rows(name: str) -> list[tuple[str, str, str]]:
    """(setting, type, default) of a recipe, as one writes them in YAML."""
    fields = RECIPE_SETTINGS[name].model_fields.items()
    return [(k, readable(f.annotation), in_yaml(f.default)) for k, f in fields if k != "name"]


def readable(kind: Any) -> str:
    """A type in words: "group, batch or null" for Literal["group", "batch"] | None."""
    parts = get_args(kind)
    if kind is type(None):
        return "null"
    if get_origin(kind) is tuple:
        each = [readable(part) for part in parts if part is not Ellipsis]
        return f"list of {each[0]}" if Ellipsis in parts else f"[{', '.join(each)}]"
    if get_origin(kind) is Literal:
        *most, last = map(in_yaml, parts)
        return f"{', '.join(most)} or {last}" if most else last
    if parts:
        return " or ".join(readable(part) for part in parts)
    return kind.__name__


def in_yaml(value: Any) -> str:
    """On one line: null, true, [0, 3], 0.7."""
    return yaml.safe_dump([value], default_flow_style=True, width=1000).strip()[1:-1]


def serve_reward(arguments: list[str]) -> int:
    """Put a reward behind HTTP."""
    from flowrl.cli.serve import Serve, run_reward_server

    run_reward_server(parse_arguments(Serve, arguments, "serve-reward"))
    return 0


def score_command(arguments: list[str]) -> int:
    from flowrl.evaluation.scoring import ScoreArguments, score_folder

    quiet()
    score_folder(parse_arguments(ScoreArguments, arguments, "score"))
    return 0


def evaluate_rewards(arguments: list[str]) -> int:
    from flowrl.evaluation.reward_evaluation import EvaluateRewards, report_rewards

    quiet()
    report_rewards(parse_arguments(EvaluateRewards, arguments, "evaluate-rewards"))
    return 0


def suites(arguments: list[str]) -> int:
    from flowrl.evaluation.suites import Suites, list_suites

    list_suites(parse_arguments(Suites, arguments, "suites"))
    return 0


def schema(arguments: list[str]) -> int:
    print(json.dumps(Run.model_json_schema(by_alias=True), indent=2))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train_command,
    "sample": sample_command,
    "evaluate": evaluate_command,
    "plan": plan,
    "recipes": recipes,
    "serve-reward": serve_reward,
    "score": score_command,
    "evaluate-rewards": evaluate_rewards,
    "suites": suites,
    "schema": schema,
}


def run_of(folder: Path) -> Run:
    """The resolved settings of a run's folder."""
    file = folder / "run.yaml"
    if not file.is_file():
        raise UserError(f"{folder} is no run: it has no run.yaml")
    return read_run(file)


def quiet() -> None:
    """Libraries' advice is not for our users; our own words are."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def _split(arguments: Sequence[str], own: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Take `--key value` and `--key=value` of `own` out of the arguments."""
    taken: dict[str, str] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        key, _, value = word.partition("=")
        if key in own:
            taken[key] = value or next(words, "")
            if not taken[key] or taken[key].startswith("--"):
                raise UserError(f"{key}: missing its value")
        else:
            rest.append(word)
    return taken, rest
