"""The commands: each takes command-line words and returns an exit code."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from flowrl.cli.installed import check_torchvision
from flowrl.cli.restarts import FOLDER, RESUME, grants, resumed_by_launcher, split_keys, trust_of
from flowrl.cli.start_check import check_start
from flowrl.errors import UserError
from flowrl.paths import run_file
from flowrl.settings.command_line.arguments import (
    EvaluateArguments,
    ExportArguments,
    PlanArguments,
    ProveArguments,
    SampleArguments,
    expanded,
    parse_arguments,
)
from flowrl.settings.read import check_plan, open_folder, override, read_run
from flowrl.settings.trust import Trust

NO_CACHE = "--no-cache"


def train_command(arguments: list[str]) -> int:
    """`train CONFIG [overrides]` or `train --resume RUN`."""
    cache = NO_CACHE not in arguments
    words = [word for word in arguments if word != NO_CACHE and not grants(word)]
    own, rest = split_keys(words, (RESUME, FOLDER))
    if RESUME in own:
        return _resume(expanded(own[RESUME]), rest, cache, trust_of(arguments))
    if not rest or rest[0].startswith("-"):
        raise UserError("train: give a run file first, such as `flowrl train configs/demo.yaml`")
    path = run_file(rest[0])
    if FOLDER in own and resumed_by_launcher(expanded(own[FOLDER])):
        return _resume(expanded(own[FOLDER]), rest[1:], cache, trust_of(arguments))
    run = override(read_run(path), rest[1:])
    check_start(run)
    folder = expanded(own[FOLDER]) if FOLDER in own else None
    if folder is not None and folder.exists():
        raise UserError(
            f"{folder} already exists; choose another --folder, or --resume {quote(str(folder))}"
        )
    quiet()
    from flowrl.cli.run_start import start

    return _finish(start(run, path.stem, folder, cache))


def _resume(folder: Path, rest: Sequence[str], cache: bool, trust: Trust) -> int:
    if rest and not rest[0].startswith("-"):
        raise UserError(f"train --resume takes a run's folder and options, not {rest[0]}")
    opened = open_folder(folder, trust).overridden(rest)
    with opened.limited():
        check_start(opened.run)
        quiet()
        from flowrl.cli.run_start import resume

        return _finish(resume(opened.run, folder, cache))


def _finish(result: "object") -> int:
    from accelerate import PartialState

    from flowrl.run.train import Result

    assert isinstance(result, Result)
    PartialState().destroy_process_group()
    code = 0 if result.done else 128 + (result.signal or 0)
    if not result.main:
        return code
    if not result.done:
        print(f"saved; resume with: flowrl train --resume {quote(str(result.folder))}")
        return code
    for name, value in result.last.items():
        if name == "image/diversity" or not name.startswith("image/"):
            before = f"{result.first[name]:.3f} -> " if name in result.first else ""
            print(f"held-out {name.removeprefix('image/')}: {before}{value:.3f}")
    print(f"samples: {result.folder / 'samples'}  weights: {result.weights}")
    if (page := result.folder / "report.html").is_file():
        print(f"page: {page}")
    return code


def sample_command(arguments: list[str]) -> int:
    """`sample RUN PROMPT ... [overrides]` or `sample --model M PROMPT ...`."""
    from flowrl.cli.sample import sample_prompts

    words, options = split_settings(arguments)
    given = parse_arguments(SampleArguments, words, "sample")
    if given.model is not None and given.run is not None:  # all its words are prompts
        given.run, given.prompts = None, (given.run, *given.prompts)
    if not given.prompts or not all(prompt.strip() for prompt in given.prompts):
        raise UserError(
            'sample: give prompts, such as: flowrl sample RUN "a red circle"; put them before '
            "settings such as --model.height, which take all words after them"
        )
    quiet()
    sample_prompts(given, options)
    return 0


def evaluate_command(arguments: list[str]) -> int:
    """`evaluate RUN [overrides]` or `evaluate --model M`."""
    from flowrl.cli.evaluate import evaluate_weights

    words, options = split_settings(arguments)
    given = parse_arguments(EvaluateArguments, words, "evaluate")
    quiet()
    evaluate_weights(given, options)
    return 0


def report_command(arguments: list[str]) -> int:
    """`report RUN`."""
    from flowrl.cli.report import Report, print_report

    print_report(parse_arguments(Report, arguments, "report"))
    return 0


def compare_command(arguments: list[str]) -> int:
    """`compare RUN RUN ...`."""
    from flowrl.cli.report import Compare, print_comparison

    print_comparison(parse_arguments(Compare, arguments, "compare"))
    return 0


def plan(arguments: list[str]) -> int:
    """`plan CONFIG ... [overrides]`. Exit code 1 if a run does not fit in memory."""
    keys = ("--svg", "--iteration", "--memory", "--devices", "--utilisation")
    own, rest = split_keys(arguments, keys)
    count = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    words = [*rest[:count], *(word for pair in own.items() for word in pair)]
    given = parse_arguments(PlanArguments, words, "plan")
    if not given.configs:
        raise UserError("plan: give a run file, such as `flowrl plan configs/demo.yaml`")
    if given.svg is not None and len(given.configs) > 1:
        raise UserError("plan: --svg draws a single run: give one file")
    fits = [_plan_one(path, given, rest[count:], i) for i, path in enumerate(given.configs)]
    return 0 if all(fits) else 1


def _plan_one(path: Path, given: PlanArguments, options: Sequence[str], index: int) -> bool:
    """Print one plan. Returns whether the run fits in memory, as far as that is known."""
    run = override(read_run(run_file(str(path))), options)
    check_plan(run)
    quiet()
    from flowrl.cli.plan import describe_run, open_points
    from flowrl.estimate import fit
    from flowrl.estimate import time as time_estimate
    from flowrl.estimate.devices import parse_devices
    from flowrl.estimate.workers import workers_report

    devices = None if given.devices is None else parse_devices(given.devices)
    if len(given.configs) > 1:
        print(f"{chr(10) if index else ''}{path}")
    print(describe_run(run, given.iteration, given.svg))
    limit = fit.limit(given.memory, devices)
    print(fit.memory_report(run, limit, given.iteration))
    if devices is not None:
        print(time_estimate.time_report(run, devices, given.utilisation, given.iteration))
    for line in workers_report(run, devices, given.utilisation, given.iteration):
        print(line)
    for point in open_points(run):
        print(f"before training: {point}")
    return fit.fits(run, limit, given.iteration)


def prove(arguments: list[str]) -> int:
    """`prove CONFIG [overrides]` or `prove --model PIPELINE`. Exit code 1 if it is refused."""
    own, rest = split_keys([word for word in arguments if word != NO_CACHE], ("--model",))
    named = [] if not rest or rest[0].startswith("-") else rest[:1]
    words = [*named, *(word for pair in own.items() for word in pair)]
    given = parse_arguments(ProveArguments, words, "prove")
    quiet()
    from flowrl.cli.prove import prove_run

    return prove_run(given, rest[len(named) :], cache=NO_CACHE not in arguments)


def export_command(arguments: list[str]) -> int:
    """`export RUN`."""
    from flowrl.cli.export import export_run

    given = parse_arguments(ExportArguments, arguments, "export")
    quiet()
    export_run(given)
    return 0


def serve_reward_command(arguments: list[str]) -> int:
    """`serve-reward NAME`."""
    from flowrl.cli.serve import Serve, run_reward_server

    run_reward_server(parse_arguments(Serve, arguments, "serve-reward"))
    return 0


def score_command(arguments: list[str]) -> int:
    """`score FOLDER`."""
    from flowrl.evaluation.scoring import ScoreArguments, score_folder

    quiet()
    score_folder(parse_arguments(ScoreArguments, arguments, "score"))
    return 0


def evaluate_rewards_command(arguments: list[str]) -> int:
    """`evaluate-rewards DATA`."""
    from flowrl.evaluation.reward_evaluation import EvaluateRewards
    from flowrl.pages.reward_page import report_rewards

    quiet()
    report_rewards(parse_arguments(EvaluateRewards, arguments, "evaluate-rewards"))
    return 0


def vote_command(arguments: list[str]) -> int:
    """`vote SOURCE`."""
    from flowrl.cli.vote import Vote, ask_for_votes

    quiet()
    ask_for_votes(parse_arguments(Vote, arguments, "vote"))
    return 0


def fit_reward_command(arguments: list[str]) -> int:
    """`fit-reward VOTES`."""
    from flowrl.votes.fit import FitReward, fit_reward_to

    quiet()
    fit_reward_to(parse_arguments(FitReward, arguments, "fit-reward"))
    return 0


def suites(arguments: list[str]) -> int:
    """`suites [NAME]`."""
    from flowrl.evaluation.suites import Suites, list_suites

    list_suites(parse_arguments(Suites, arguments, "suites"))
    return 0


def new(arguments: list[str]) -> int:
    """`new FOLDER`."""
    from flowrl.cli.new import New, write_new_run

    write_new_run(parse_arguments(New, arguments, "new"))
    return 0


def doctor(arguments: list[str]) -> int:
    """`doctor` or `doctor RUN`."""
    from flowrl.cli.doctor import Doctor, print_findings

    given = parse_arguments(Doctor, arguments, "doctor")
    if given.folder is not None:
        from flowrl.cli.rights import print_rights

        return print_rights(given.folder)
    quiet()
    if given.device is not None:
        check_torchvision()
        from flowrl.cli.device_check import check_device

        return check_device(given.device, given.run)
    if given.run is not None:
        raise UserError("doctor: --run needs --device")
    return print_findings()


def split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate options such as `--model.dtype bfloat16`, with their values, from other words."""
    words: list[str] = []
    options: list[str] = []
    into = words
    for i, word in enumerate(arguments):
        if word == "--":  # what follows are no options
            return [*words, *arguments[i:]], options
        if word.startswith("--"):
            into = options if "." in word.partition("=")[0] else words
        into.append(word)
    return words, options


def quiet() -> None:
    """Silence libraries' progress bars and hints."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from diffusers.utils import logging as diffusers_logging
    from transformers import dynamic_module_utils
    from transformers.utils import logging as transformers_logging

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    # A model with code of its own is refused; nobody is asked whether to run it.
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
