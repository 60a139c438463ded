"""The commands: each takes the words of a command line, makes the call of this API that stands for
it, and returns an exit code. Their imports are inside, since a command that needs no torch should
not wait for it."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from flowrl.cli.commands import quiet, split_settings
from flowrl.cli.restarts import FOLDER, RESUME, grants, split_keys, trust_of
from flowrl.errors import UserError
from flowrl.paths import find
from flowrl.settings.command_line.arguments import (
    EvaluateArguments,
    ExportArguments,
    PlanArguments,
    ProveArguments,
    SampleArguments,
    expanded,
    parse_arguments,
)
from flowrl.settings.words.scores import shown_score

if TYPE_CHECKING:
    from flowrl.api.run import Run
    from flowrl.run.train import Result
    from flowrl.settings import RunSettings

NO_CACHE, WAIT, AUTO = "--no-cache", "--wait", "auto"
CHECK_ROWS = "--check-rows"


def keywords(parsed: Any, *without: str) -> dict[str, Any]:
    """The fields of a command's arguments as keywords of its call, but those that its object was
    made with."""
    return {f.name: getattr(parsed, f.name) for f in fields(parsed) if f.name not in without}


def train_command(arguments: list[str]) -> int:
    """`train CONFIG [overrides]`, `train --resume RUN`, or, for what is started again and again,
    `train CONFIG --folder RUN --resume auto`."""
    no_cache, wait = NO_CACHE in arguments, WAIT in arguments
    words = [word for word in arguments if word not in (NO_CACHE, WAIT) and not grants(word)]
    keys, rest = split_keys(words, (RESUME, FOLDER))
    folder, trust = (expanded(keys[FOLDER]) if FOLDER in keys else None), trust_of(arguments)
    begins = bool(rest) and not rest[0].startswith("-")
    auto = keys.get(RESUME) == AUTO
    if auto and (folder is None or not begins):
        raise UserError(
            "train --resume auto needs a run file and the run's folder: flowrl train FILE "
            "--folder RUN --resume auto"
        )
    if wait and not auto:
        raise UserError("train: --wait belongs to --resume auto: leave it out")
    if RESUME in keys and not auto:
        if begins:
            raise UserError(f"train --resume takes a run's folder and options, not {rest[0]}")
        run = _run(settings=rest, trust=trust)
        run.folder = expanded(keys[RESUME])
        return _finish(run.begin_again(no_cache=no_cache), run)
    if not begins:
        raise UserError("train: give a run file first, such as `flowrl train configs/demo.yaml`")
    run = _run(rest[0], settings=rest[1:])
    if run.folder is not None:
        named = quote(str(run.folder))
        raise UserError(
            f"train: {run.folder} is a run's folder: resume it with `flowrl train --resume {named}`"
            f", or begin another run of its file, {quote(str(run.folder / 'run.yaml'))}"
        )
    resume = AUTO if auto else None
    result = run.begin(folder=folder, resume=resume, wait=wait, no_cache=no_cache, trust=trust)
    return _finish(result, run)


def _run(source: str | Path | None = None, **arguments: Any) -> "Run":
    quiet()
    from flowrl.cli.importing import collection_paused

    with collection_paused():
        from flowrl.api.run import Run
    return Run(None if source is None else str(source), **arguments)  # a word, which may be a name


def _finish(result: "Result", run: "Run") -> int:
    from accelerate import PartialState

    PartialState().destroy_process_group()
    code = 0 if result.done else 128 + (result.signal or 0)
    if not result.main or (result.done and not result.last):
        return code
    if not result.done:
        print(f"saved; resume with: flowrl train --resume {quote(str(result.folder))}")
        return code
    for name, value in result.last.items():
        if name.endswith("/diversity") or not name.startswith(("image/", "sound/")):
            before = f"{result.first[name]:.3f} -> " if name in result.first else ""
            shown = shown_score(name.removeprefix("image/").removeprefix("sound/"))
            print(f"held-out {shown}: {before}{value:.3f}")
    from flowrl.pages.run_folder import RunFolder
    from flowrl.pages.run_page import last_words

    if said := last_words(RunFolder.read(result.folder), quote(str(result.folder))):
        print(said)
    print(f"samples: {result.folder / 'samples'}  weights: {result.weights}")
    if (page := result.folder / "report.html").is_file():
        print(f"page: {page}")
    settings = run.settings
    if result.weights is not None and settings.prompt_writer is None:
        _how_to_load(settings, result.weights)
    return code


def _how_to_load(run: "RunSettings", weights: Path) -> None:
    """Print the lines that load a pipeline's trained weights without flowrl."""
    from flowrl.cli.model_card import loader, loading_lines
    from flowrl.settings import PipelineSettings

    m = run.model
    if not isinstance(m, PipelineSettings):
        return

    def on_disk(source: str) -> str:
        path = find(source)
        return str(path) if path.exists() else source

    print(f"in plain diffusers (import torch; from diffusers import {loader(m)}):")
    files = [path.name for path in weights.iterdir()]
    for line in loading_lines(m, on_disk(m.source), None, files, str(weights), on_disk):
        print(f"  {line}")


def runs_command(arguments: list[str]) -> int:
    """`runs [FOLDER ...]`."""
    from flowrl.api.around import list_runs
    from flowrl.cli.runs import Runs, print_runs

    parsed = parse_arguments(Runs, arguments, "runs")
    print_runs(list_runs(parsed.folders), as_json=parsed.json)
    return 0


def launch_command(arguments: list[str]) -> int:
    """`launch WHERE CONFIG [overrides]`."""
    from flowrl.cli.launch import LaunchArguments

    words, options = split_settings(arguments)
    parsed = parse_arguments(LaunchArguments, words, "launch")
    return _run(parsed.config, settings=options).launch(**keywords(parsed, "config"))


def sample_command(arguments: list[str]) -> int:
    """`sample RUN PROMPT ... [overrides]` or `sample --model M PROMPT ...`."""
    words, options = split_settings(arguments)
    parsed = parse_arguments(SampleArguments, words, "sample")
    if parsed.model is not None and parsed.run is not None:  # all its words are prompts
        parsed.run, parsed.prompts = None, (parsed.run, *parsed.prompts)
    if not parsed.prompts or not all(prompt.strip() for prompt in parsed.prompts):
        raise UserError(
            'sample: give prompts, such as: flowrl sample RUN "a red circle"; put them before '
            "settings such as --model.height, which take all words after them"
        )
    run, named = _subject(parsed, "sample"), keywords(parsed, *SUBJECT, "rewards")
    run.sample(**named, rewards=_rewards(parsed.rewards), settings=options, written=True)
    return 0


SUBJECT = ("run", "model", "adapter", "trust")  # words that name a run's weights, or a model


def _subject(parsed: SampleArguments | EvaluateArguments, command: str) -> "Run":
    """The run, or the untrained model, of a command."""
    quiet()
    from flowrl.api.run import Run
    from flowrl.cli.given_model import check_subject

    check_subject(parsed, command)
    if parsed.model is not None:
        return Run.of_model(parsed.model, parsed.adapter)
    return Run.at(parsed.run or "", trust=parsed.trust)


def _rewards(words: Sequence[str]) -> list[Any]:
    """Rewards of `--rewards`: names, or mappings in YAML."""
    from flowrl.evaluation.measure import parse_specs
    from flowrl.settings.file.strict_yaml import list_entries

    parse_specs(words, "--rewards")  # whose sentences name the option
    return list_entries(words, "--rewards")


def evaluate_command(arguments: list[str]) -> int:
    """`evaluate RUN [overrides]` or `evaluate --model M`."""
    from flowrl.api.parts import PromptSources

    words, options = split_settings(arguments)
    parsed = parse_arguments(EvaluateArguments, words, "evaluate")
    run, named = _subject(parsed, "evaluate"), keywords(parsed, *SUBJECT, "rewards", "prompts")
    prompts = PromptSources(parsed.prompts) if parsed.prompts else None
    run.evaluate(prompts, **named, rewards=_rewards(parsed.rewards), settings=options)
    return 0


def report_command(arguments: list[str]) -> int:
    """`report RUN`."""
    from flowrl.cli.report import Report

    parsed = parse_arguments(Report, arguments, "report")
    _at(parsed.run).report(**keywords(parsed, "run"))
    return 0


def _at(folder: Path, trust: bool | str = False) -> "Run":
    quiet()
    from flowrl.api.run import Run

    return Run.at(folder, trust=trust)


def compare_command(arguments: list[str]) -> int:
    """`compare RUN RUN ...`."""
    from flowrl.api.run import compare
    from flowrl.cli.report import Compare

    compare(**keywords(parse_arguments(Compare, arguments, "compare")))
    return 0


def plan_command(arguments: list[str]) -> int:
    """`plan CONFIG ... [overrides]`. Exit code 1 if a run could not start here or does not
    fit in memory."""
    keys = ("--svg", "--iteration", "--memory", "--devices", "--utilisation")
    key_values, rest = split_keys([word for word in arguments if word != CHECK_ROWS], keys)
    count = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    words = [*rest[:count], *(word for pair in key_values.items() for word in pair)]
    words += [CHECK_ROWS] * (CHECK_ROWS in arguments)
    parsed = parse_arguments(PlanArguments, words, "plan")
    if not parsed.configs:
        raise UserError("plan: give a run file, such as `flowrl plan configs/demo.yaml`")
    if parsed.svg is not None and len(parsed.configs) > 1:
        raise UserError("plan: --svg draws a single run: give one file")
    accepted = True
    for i, config in enumerate(parsed.configs):
        run_plan = _run(config, settings=rest[count:]).plan(**keywords(parsed, "configs"))
        if len(parsed.configs) > 1:
            print(f"{chr(10) if i else ''}{config}")
        print(run_plan)
        accepted &= run_plan.accepted
    return 0 if accepted else 1


def prove_command(arguments: list[str]) -> int:
    """`prove CONFIG [overrides]` or `prove --model PIPELINE`. Exit code 1 if it is refused."""
    key_values, rest = split_keys([word for word in arguments if word != NO_CACHE], ("--model",))
    named = [] if not rest or rest[0].startswith("-") else rest[:1]
    words = [*named, *(word for pair in key_values.items() for word in pair)]
    parsed = parse_arguments(ProveArguments, words, "prove")
    if parsed.config is None and parsed.model is None:
        raise UserError(
            "prove: give a run file, such as `flowrl prove configs/demo.yaml`, or use --model"
        )
    options = rest[len(named) :]
    quiet()
    from flowrl.api.run import Run

    if parsed.config is None:
        run = Run.of_model(parsed.model or "", settings=options)
    else:
        other = [] if parsed.model is None else ["--model.pipeline", parsed.model]
        run = Run(str(parsed.config), settings=[*other, *options])
    return 0 if run.prove(no_cache=NO_CACHE in arguments) else 1


def calibrate_command(arguments: list[str]) -> int:
    """`calibrate CONFIG [overrides]`: print each round's table, and the last one as YAML."""
    from flowrl.cli.calibrate import Calibrate

    words, options = split_settings(arguments)
    parsed = parse_arguments(Calibrate, words, "calibrate")
    if parsed.config is None:
        raise UserError("calibrate: give a run file, such as `flowrl calibrate run.yaml`")
    _run(parsed.config, settings=options).calibrate(**keywords(parsed, "config"))
    return 0


def export_command(arguments: list[str]) -> int:
    """`export RUN`."""
    parsed = parse_arguments(ExportArguments, arguments, "export")
    _at(parsed.run, parsed.trust).export(**keywords(parsed, "run", "trust"))
    return 0


def convert_command(arguments: list[str]) -> int:
    """`convert FILE --config FOLDER --out FOLDER`."""
    from flowrl.cli.convert import Convert

    parsed = parse_arguments(Convert, arguments, "convert")
    quiet()
    from flowrl.api.around import convert

    print(convert(**keywords(parsed)))
    return 0


def recipes_command(arguments: list[str]) -> int:
    """`recipes [NAME]`: print the recipes by evidence, or one recipe with its settings."""
    from flowrl.api.around import list_recipes
    from flowrl.cli.recipe_text import Recipes

    print(list_recipes(**keywords(parse_arguments(Recipes, arguments, "recipes"))))
    return 0


def rewards_command(arguments: list[str]) -> int:
    """`rewards [NAME]`: print the rewards by what they score, or one reward with its settings."""
    from flowrl.api.around import list_rewards
    from flowrl.cli.reward_text import Rewards

    print(list_rewards(**keywords(parse_arguments(Rewards, arguments, "rewards"))))
    return 0


def serve_reward_command(arguments: list[str]) -> int:
    """`serve-reward NAME`."""
    from flowrl.cli.serve import Serve, parse_reward

    parsed = parse_arguments(Serve, arguments, "serve-reward")
    quiet()
    from flowrl.api.scoring import serve_reward

    name, settings = parse_reward(parsed.reward)
    serve_reward({"name": name, **settings}, **keywords(parsed, "reward"))
    return 0


def score_command(arguments: list[str]) -> int:
    """`score FOLDER`."""
    from flowrl.evaluation.scoring import ScoreArguments

    parsed = parse_arguments(ScoreArguments, arguments, "score")
    quiet()
    from flowrl.api.scoring import score

    score(**keywords(parsed, "rewards"), rewards=_rewards(parsed.rewards))
    return 0


def evaluate_rewards_command(arguments: list[str]) -> int:
    """`evaluate-rewards DATA`."""
    from flowrl.evaluation.reward_evaluation import EvaluateRewards

    parsed = parse_arguments(EvaluateRewards, arguments, "evaluate-rewards")
    quiet()
    from flowrl.api.scoring import evaluate_rewards

    named = keywords(parsed, "dataset", "rewards", "judges")
    rewards, judges = _rewards(parsed.rewards), _rewards(parsed.judges)
    evaluate_rewards(parsed.dataset, rewards, judges=judges, **named)
    return 0


def vote_command(arguments: list[str]) -> int:
    """`vote SOURCE`."""
    from flowrl.cli.vote import Vote

    parsed = parse_arguments(Vote, arguments, "vote")
    quiet()
    from flowrl.api.voting import vote

    vote(**keywords(parsed))
    return 0


def fit_reward_command(arguments: list[str]) -> int:
    """`fit-reward VOTES`."""
    from flowrl.votes.fit import FitReward

    parsed = parse_arguments(FitReward, arguments, "fit-reward")
    quiet()
    from flowrl.api.voting import fit_reward

    fit_reward(**keywords(parsed))
    return 0


def suites_command(arguments: list[str]) -> int:
    """`suites [NAME]`."""
    from flowrl.api.around import suites
    from flowrl.evaluation.suites import Suites

    suites(**keywords(parse_arguments(Suites, arguments, "suites")))
    return 0


def new_command(arguments: list[str]) -> int:
    """`new FOLDER`."""
    from flowrl.api.around import new_run
    from flowrl.cli.new import New

    new_run(**keywords(parse_arguments(New, arguments, "new")))
    return 0


def import_command(arguments: list[str]) -> int:
    """`import WHAT`. Exit code 1 if `flowrl plan` would refuse the result."""
    from flowrl.api.importing_runs import import_run
    from flowrl.cli.import_run import Import, print_import

    parsed = parse_arguments(Import, arguments, "import")
    imported = import_run(**keywords(parsed))
    print_import(imported, parsed.out)
    return int(imported.refusal is not None)


def doctor_command(arguments: list[str]) -> int:
    """`doctor`, `doctor RUN` or `doctor --sandbox`."""
    from flowrl.api.around import doctor
    from flowrl.cli.doctor import Doctor

    return doctor(**keywords(parse_arguments(Doctor, arguments, "doctor")))


def drill_command(arguments: list[str]) -> int:
    """`drill RUN`."""
    from flowrl.cli.drill import DrillArguments

    words = [word for word in arguments if not grants(word)]
    parsed = parse_arguments(DrillArguments, words, "drill")
    return _at(parsed.folder, trust_of(arguments)).drill(**keywords(parsed, "folder"))


def schema_command(arguments: list[str]) -> int:
    """`schema`: print the schema of a run file, for editors."""
    from flowrl.api.around import schema
    from flowrl.json_text import json_text

    if arguments:
        raise UserError(f"schema takes no arguments, got {' '.join(arguments)[:200]}")
    print(json_text(schema(), indent=2))
    return 0
