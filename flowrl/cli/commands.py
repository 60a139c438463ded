"""The commands: each takes command-line words and returns an exit code."""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from flowrl.cli.installed import check_torchvision
from flowrl.cli.restarts import FOLDER, RESUME, grants, launched, split_keys, trust_of
from flowrl.errors import FolderInUse, UserError
from flowrl.paths import run_file
from flowrl.run.watch.start_check import check_model_of, check_start, refusals, unchecked
from flowrl.settings.command_line.arguments import (
    EvaluateArguments,
    ExportArguments,
    PlanArguments,
    ProveArguments,
    SampleArguments,
    expanded,
    parse_arguments,
)
from flowrl.settings.read import check_plan, open_folder, override, read_run, with_full_paths
from flowrl.settings.trust import Trust

NO_CACHE, WAIT, AUTO = "--no-cache", "--wait", "auto"
CHECK_ROWS = "--check-rows"
WAIT_SECONDS = 5.0


def train_command(arguments: list[str]) -> int:
    """`train CONFIG [overrides]`, `train --resume RUN`, or, for what is started again and again,
    `train CONFIG --folder RUN --resume auto`."""
    cache, wait = NO_CACHE not in arguments, WAIT in arguments
    words = [word for word in arguments if word not in (NO_CACHE, WAIT) and not grants(word)]
    own, rest = split_keys(words, (RESUME, FOLDER))
    if own.get(RESUME) == AUTO:
        if FOLDER not in own or not rest or rest[0].startswith("-"):
            raise UserError(
                "train --resume auto needs a run file and the run's folder: flowrl train FILE "
                "--folder RUN --resume auto"
            )
        return _go_on(rest, expanded(own[FOLDER]), cache, trust_of(arguments), wait)
    if wait:
        raise UserError("train: --wait belongs to --resume auto: leave it out")
    if RESUME in own:
        return _resume(expanded(own[RESUME]), rest, cache, trust_of(arguments))
    if not rest or rest[0].startswith("-"):
        raise UserError("train: give a run file first, such as `flowrl train configs/demo.yaml`")
    path = run_file(rest[0])
    run = override(read_run(path), rest[1:])
    folder = expanded(own[FOLDER]) if FOLDER in own else None
    if folder is not None and launched():
        quiet()
        from flowrl.cli.run_start import begun_before

        if begun_before(run, folder):
            return _resume(folder, rest[1:], cache, trust_of(arguments))
    check_start(run)
    if folder is not None and folder.exists() and not launched():  # else the main process looks
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


def _go_on(words: Sequence[str], folder: Path, cache: bool, trust: Trust, wait: bool) -> int:
    """Begin this run, resume it, or leave a finished one as it is. Settings that the file or the
    options have changed since the run began follow the rules of a resume."""
    path = run_file(words[0])
    run = with_full_paths(override(read_run(path), words[1:]))
    check_start(run)
    quiet()
    from flowrl.cli.run_start import folder_state, resume, start

    said = False
    while True:
        try:
            state = folder_state(run, folder)
            if state == "finished":
                print(f"{folder} has finished its {run.train.iterations} iterations")
                return 0
            if state == "absent":
                return _finish(start(run, path.stem, folder, cache))
            opened = open_folder(folder, trust, beside=run).changed(run)
            with opened.limited():
                return _finish(resume(opened.run, folder, cache))
        except FolderInUse as error:
            if not wait:
                raise FolderInUse(f"{error}; or {WAIT}, to go on once it has ended") from error
            if not said:
                print(f"{folder} is in use: waiting until it is free", flush=True)
            said = True
            time.sleep(WAIT_SECONDS)


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


def runs_command(arguments: list[str]) -> int:
    """`runs [FOLDER ...]`."""
    from flowrl.cli.runs import Runs, print_runs

    print_runs(parse_arguments(Runs, arguments, "runs"))
    return 0


def launch_command(arguments: list[str]) -> int:
    """`launch WHERE CONFIG [overrides]`."""
    from flowrl.cli.launch import LaunchArguments, launch_job

    words, options = split_settings(arguments)
    return launch_job(parse_arguments(LaunchArguments, words, "launch"), options)


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
    """`plan CONFIG ... [overrides]`. Exit code 1 if a run could not start here or does not
    fit in memory."""
    keys = ("--svg", "--iteration", "--memory", "--devices", "--utilisation")
    own, rest = split_keys([word for word in arguments if word != CHECK_ROWS], keys)
    count = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    words = [*rest[:count], *(word for pair in own.items() for word in pair)]
    words += [CHECK_ROWS] * (CHECK_ROWS in arguments)
    given = parse_arguments(PlanArguments, words, "plan")
    if not given.configs:
        raise UserError("plan: give a run file, such as `flowrl plan configs/demo.yaml`")
    if given.svg is not None and len(given.configs) > 1:
        raise UserError("plan: --svg draws a single run: give one file")
    fits = [_plan_one(path, given, rest[count:], i) for i, path in enumerate(given.configs)]
    return 0 if all(fits) else 1


def _plan_one(path: Path, given: PlanArguments, options: Sequence[str], index: int) -> bool:
    """Print one plan. Returns whether the run can start here and fits in memory, as far as that is
    known."""
    run = override(read_run(run_file(str(path))), options)
    check_plan(run)
    quiet()
    from flowrl.cli.check_rows import report_rows
    from flowrl.cli.plan import describe_run
    from flowrl.estimate import fit
    from flowrl.estimate import time as time_estimate
    from flowrl.estimate.devices import parse_devices
    from flowrl.estimate.workers import workers_report

    devices = None if given.devices is None else parse_devices(given.devices)
    if len(given.configs) > 1:
        print(f"{chr(10) if index else ''}{path}")
    check_model_of(run)  # else nothing is known of what it would cost
    print(describe_run(run, given.iteration, given.svg))
    limit = fit.limit(given.memory, devices)
    print(fit.memory_report(run, limit, given.iteration))
    if devices is not None:
        print(time_estimate.time_report(run, devices, given.utilisation, given.iteration))
    for line in workers_report(run, devices, given.utilisation, given.iteration):
        print(line)
    points = list(refusals(run))
    for point in points:
        print(f"refused: {point}")
    print("not checked here:", *unchecked(run), sep="\n  ")
    won = not given.check_rows or report_rows(run)
    return not points and won and fit.fits(run, limit, given.iteration)


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


def import_command(arguments: list[str]) -> int:
    """`import WHAT`. Exit code 1 if `flowrl plan` would refuse the result."""
    from flowrl.cli.import_run import Import, import_peer

    return int(import_peer(parse_arguments(Import, arguments, "import")).refusal is not None)


def doctor(arguments: list[str]) -> int:
    """`doctor`, `doctor RUN` or `doctor --sandbox`."""
    from flowrl.cli.doctor import Doctor, print_findings

    given = parse_arguments(Doctor, arguments, "doctor")
    if given.folder is not None:
        from flowrl.cli.rights import print_rights

        return print_rights(given.folder)
    if given.sandbox:
        from flowrl.cli.sandbox_check import check_sandbox

        return check_sandbox(given.program, given.isolation)
    if given.program is not None:
        raise UserError("doctor: --program needs --sandbox")
    quiet()
    if given.device is not None:
        check_torchvision()
        from flowrl.cli.device_check import check_device

        return check_device(given.device, given.run)
    if given.run is not None:
        raise UserError("doctor: --run needs --device")
    return print_findings()


def drill(arguments: list[str]) -> int:
    """`drill RUN`."""
    from flowrl.cli.drill import DrillArguments, drill_run

    words = [word for word in arguments if not grants(word)]
    return drill_run(parse_arguments(DrillArguments, words, "drill"), trust_of(arguments))


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
    import transformers.dynamic_module_utils
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    # A model with code of its own is refused; nobody is asked whether to run it.
    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
