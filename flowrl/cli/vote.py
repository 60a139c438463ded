"""`flowrl vote`: people compare samples on a page: of a run and its base, of two runs, of a folder,
or of a file of preferences."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from flowrl.cli.evaluate import evaluation_prompts, given_prompts
from flowrl.cli.given_model import GivenModel, device_of, load_into
from flowrl.cli.out_folder import out_folder, whole_or_empty
from flowrl.demo.taste import TASTES
from flowrl.errors import UserError, in_words, terminal_text
from flowrl.evaluation.folders import Where, find_items
from flowrl.evaluation.preferences import ReadOptions, load_preferences
from flowrl.evaluation.reader_words import OF_A_TABLE
from flowrl.evaluation.tables import SUFFIXES
from flowrl.models.open import whole_at_evaluation
from flowrl.models.own.policy import shown_by
from flowrl.models.policy import EvaluationSampler
from flowrl.pages.run_page import write_report
from flowrl.paths import folder_inside, new_numbered, run_path
from flowrl.prompts import PromptSet
from flowrl.run.evaluate.attempts import Attempts
from flowrl.run.evaluate.evaluate import Trial, TrialSamples, draw_trial, score_trial
from flowrl.session.learner import load_models
from flowrl.session.session import load_rewards
from flowrl.session.smaller_calls import explained
from flowrl.settings.command_line.arguments import AtLeastOne, EvaluateArguments, Word
from flowrl.settings.read import check_plan, read_run
from flowrl.votes.answer import VoteAnswer, export_votes, write_results
from flowrl.votes.collect import SampleCopies, VoteQuestion, plan_again, plan_folder, plan_pairs
from flowrl.votes.log import VoteLog, forget_rater
from flowrl.votes.plan import PLAN, VotePlan
from flowrl.votes.serve import Helper, PageAddress, check_extra, serve_votes
from flowrl.votes.simulated import SimulatedPerson
from rewards import Reward
from rewards.fitted.scoring import KnowsPrompts
from rewards.types import Samples, parts_of

VOTES_OF_A_RUN = 120  # pairs, unless --votes says otherwise
RUN_FILE, RUN_VOTES = "run.yaml", "votes"
VoteSource = Literal["a run", "a run file", "a folder of images", "a table of preferences"]
SOURCES_OF_OPTION: Mapping[str, tuple[VoteSource, ...]] = {
    "weights": ("a run",),
    "trust": ("a run",),
    "steps": ("a run", "a run file"),
    "prompts": ("a run", "a run file", "a folder of images"),
    "prompts_from": ("a folder of images",),
}
"""What each option of a new vote is of; those that are not here are of every source."""
# options of a plan, which a folder of votes has once and for all
FIXED = ("question", "votes", "raters", "out", *SOURCES_OF_OPTION)


@dataclass
class Vote:
    """Compare samples on a page, blind and one pair at a time: a run with its base, two runs, a
    folder of images, the base model of a run file, or a file of preferences again. Writes
    votes.jsonl, which fit-reward, evaluate-rewards and dpo read. A folder of votes is resumed where
    it was left."""

    source: Word[tuple[Path, ...]] = ()
    """A run's folder, two of them, a run file (samples of its base model), a folder of images, a
    table of preferences, or a folder of votes to resume."""
    question: str = "Which one do you prefer?"
    """The question above each pair."""
    votes: AtLeastOne | None = None
    """Number of pairs, fixed in advance: 120 of a run or a run file, at most 200 of a folder, or
    all of a table if absent. One pair in ten is asked twice."""
    raters: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of people: each gets a link. A fifth of the pairs is shown to all of them."""
    results: bool = False
    """Of a folder of votes: print what was found so far, and end. Before all votes are in, the
    answer says that it was looked at early."""
    forget: str | None = None
    """Of a folder of votes: delete all that is kept of a rater, such as rater-2, and end."""
    export: Literal["argilla", "label-studio", "chosen"] | None = None
    """Of a folder of votes: write them for a labelling tool, or as chosen and rejected (without
    ties), and end. fit-reward and evaluate-rewards read all three."""
    weights: str = "last"
    """Of a run: last, best, or a folder."""
    trust: bool | str = False
    """Grant a folder that was not started here all that its run.yaml asks for, or the rights that
    are named: --trust=code,network,variables,files,accounts. See SECURITY.md."""
    prompts: Path | None = None
    """Of a run: another prompt file than its held-out one. Of a folder: its table of prompts."""
    prompts_from: Where = "auto"
    """Of a folder: table, captions, metadata or names, as of `flowrl score`."""
    steps: AtLeastOne | None = None
    """Of a run: denoising steps; the evaluation's if absent."""
    seed: int = 0
    """Seed of the pairs, their order and their sides."""
    host: str = "127.0.0.1"
    """The address to listen on; other machines reach this one best by a tunnel of ssh."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8300
    """The port; 0 is any free one."""
    person: Literal["page", "simulated"] = "page"
    """page: people, in a browser. simulated: a program with the hidden taste of the demo's world,
    which errs as people do, for trials."""
    taste: Literal["large", "left", "warm"] = "large"
    """The hidden taste of a simulated person: large objects, objects on the left, or warm colours
    (flowrl/demo/taste.py)."""
    out: Path | None = None
    """A new or empty folder for the votes; RUN/votes/vote-0001 or votes-0001 if absent."""


def ask_for_votes(arguments: Vote) -> tuple[Path, VoteAnswer]:
    """Collect votes; returns the folder and the answer."""
    if not arguments.source:
        raise UserError("vote: give a run's folder, two of them, a folder of images or a table")
    if not arguments.question.strip():
        raise UserError("vote: --question is empty")
    if arguments.person == "page" and _is_set(arguments, "taste"):
        raise UserError(
            "vote: --taste is of a simulated person: add --person simulated, or leave it out"
        )
    first = arguments.source[0]
    if (first / PLAN).is_file():
        folder = _resumed(arguments, first)
        if arguments.results or arguments.forget is not None or arguments.export is not None:
            if arguments.forget is not None:  # first, so that their votes are not exported
                forget_rater(folder, arguments.forget)
            log = VoteLog.read(folder, VotePlan.read(folder))
            answer = write_results(folder, log)
            if arguments.export is not None:
                exported = export_votes(folder, arguments.export)
                print(f"written: {exported.file}")
                if exported.interface:
                    print(f"labelling interface:\n{exported.interface}")
            return folder, _reported(folder, answer)
    elif arguments.results or arguments.forget is not None or arguments.export is not None:
        raise UserError(
            f"vote: --results, --forget and --export need a folder of votes, and {first} is none"
        )
    else:
        check_extra()  # before anything is sampled
        folder = _new(arguments)
    answer = serve_votes(
        folder, PageAddress(arguments.host, arguments.port), person=_person(arguments)
    )
    return folder, _reported(folder, answer)


def _reported(folder: Path, answer: VoteAnswer) -> VoteAnswer:
    """Say the answer in the terminal, and on the page of the run whose samples were voted on."""
    print(terminal_text("\n".join(answer.sentences)))
    print(f"votes: {folder / 'votes.jsonl'}")
    if answer.early:
        print(f"to go on: flowrl vote {shlex.quote(str(folder))}")
    elif answer.preferred is None:
        print(f"a reward from them: flowrl fit-reward {shlex.quote(str(folder))} --out taste")
    run = folder.resolve().parent.parent
    if folder.resolve().parent.name == RUN_VOTES and (run / RUN_FILE).is_file():
        write_report(run)
    return answer


def _resumed(arguments: Vote, folder: Path) -> Path:
    """A folder of votes. UserError for options that would change its plan."""
    if len(arguments.source) > 1:
        raise UserError(f"vote: {folder} is a folder of votes, which is gone on with alone")
    # a simulated person draws by the seed, also of a folder that is gone on with
    fixed = FIXED if arguments.person == "simulated" else (*FIXED, "seed")
    if options := ", ".join(_option(name) for name in fixed if _is_set(arguments, name)):
        raise UserError(
            f"vote: {folder} is a folder of votes, whose question, raters, number and order of "
            f"pairs are fixed: leave out {options}"
        )
    return folder


def _is_set(arguments: Vote, name: str) -> bool:
    """Whether an option differs from its default."""
    return getattr(arguments, name) != getattr(Vote, name)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_options(arguments: Vote, is_run: bool, is_table: bool, is_file: bool) -> None:
    """UserError for an option that has no part in votes on such a source."""
    kind: VoteSource = "a folder of images"
    if is_run:
        kind = "a run"
    elif is_table:
        kind = "a table of preferences"
    elif is_file:
        kind = "a run file"
    for name, sources in SOURCES_OF_OPTION.items():
        if _is_set(arguments, name) and kind not in sources:
            raise UserError(
                f"vote: {_option(name)} is of {' or '.join(sources)}, and {arguments.source[0]} is "
                f"{kind}: leave it out"
            )


def _new(arguments: Vote) -> Path:
    """A new folder of votes with its samples and its plan."""
    first, runs = (
        arguments.source[0],
        [(source / RUN_FILE).is_file() for source in arguments.source],
    )
    if len(arguments.source) > 1:
        for source in arguments.source:
            if not source.exists():
                raise UserError(f"vote: {source}: no such file or folder")
    if len(arguments.source) > 2 or (len(arguments.source) == 2 and not all(runs)):
        raise UserError("vote: two sources must be two runs; otherwise give one source")
    config = None if first.is_dir() else run_path(str(first))
    table = first.suffix.lower() in SUFFIXES and first.is_file()
    if not table and config is None and not first.is_dir():
        raise UserError(f"vote: {first}: no such file or folder, and none of flowrl's runs")
    _check_options(arguments, is_run=all(runs), is_table=table, is_file=config is not None)
    if arguments.out is not None:
        folder = out_folder(arguments.out)
    elif all(runs):
        folder = new_numbered(folder_inside(first, RUN_VOTES), "vote")
    else:
        folder = new_numbered(Path(), "votes")
    question = VoteQuestion(arguments.question, arguments.votes, arguments.raters, arguments.seed)
    try:
        with whole_or_empty(folder):
            if all(runs):
                _sample_runs(folder, arguments, question)
            elif config is not None and not table:
                _sample_base(folder, arguments, config, question)
            elif table:
                with in_words(OF_A_TABLE):
                    preferences = load_preferences(first, ReadOptions(seed=arguments.seed))
                plan_again(folder, preferences, str(first), question)
            else:
                items = find_items(first, arguments.prompts, arguments.prompts_from)
                print(terminal_text(f"{len(items.items)} files; {items.origin}"))
                plan_folder(folder, items.items, str(first), question)
    except BaseException:
        folder.rmdir()
        raise
    return folder


def _sample_base(folder: Path, arguments: Vote, config: Path, question: VoteQuestion) -> None:
    """Two samples of a run file's base model for each of its prompts of training, so that votes
    know nothing of the held-out ones."""
    run = read_run(config)
    check_plan(run)
    prompts = run.prompts.read("train")
    if arguments.prompts is not None:
        prompts = given_prompts([str(arguments.prompts)], run.prompts.column)
    count = arguments.votes or VOTES_OF_A_RUN
    steps = arguments.steps or run.evaluation_steps
    prompt_count = min(count, len(prompts))
    rows = tuple(i * len(prompts) // prompt_count for i in range(prompt_count))
    pairs_per_prompt = -(-count // prompt_count)  # pairs of a prompt
    trial = Trial(prompts, rows, 2 * pairs_per_prompt, steps, arguments.seed)
    with explained(run, trains=False):
        policy = whole_at_evaluation(load_models(run, device_of(run)), run)
        samples = shown_by(policy, draw_trial(policy, trial).samples)
    copies, name = SampleCopies(folder), f"the base model of {config.name}"
    copies.add_all(samples, name)
    pairs = [(row, row + 1) for row in range(0, len(samples.prompts), 2)][:count]
    plan_pairs(copies, "base", str(config), pairs, question)


@dataclass(frozen=True)
class _Side:
    """One side of a comparison: its samples, the run's recorded scores of them by reward, and
    sentences on scores that are left out."""

    name: str
    samples: Samples
    scores: Mapping[str, list[float | None]]
    left_out: Sequence[str] = ()


def _sample_runs(folder: Path, arguments: Vote, question: VoteQuestion) -> None:
    """Sample a run's base and trained weights, or the weights of two runs, for the same prompts and
    from the evaluation's noise."""
    asked = [_arguments(arguments, run) for run in arguments.source]
    models = [GivenModel.of(arguments_of_run, (), "vote") for arguments_of_run in asked]
    with models[0].limited() if arguments.prompts is None else nullcontext():
        prompts = evaluation_prompts(models[0], asked[0], None)
    trials = [_trial(model, arguments, prompts) for model in models]
    if len(models) == 1:
        with explained(models[0].run, trains=False):
            sides = _before_and_after(models[0], trials[0])
    else:
        sides = list[_Side]()
        for run, model, trial in zip(arguments.source, models, trials, strict=True):
            with explained(model.run, trains=False):
                sides.append(_drawn(model, trial, run.resolve().name))
    if sides[0].name == sides[1].name:
        sides = [replace(side, name=f"{side.name} ({i + 1})") for i, side in enumerate(sides)]
    for sentence in dict.fromkeys(sentence for side in sides for sentence in side.left_out):
        print(terminal_text(sentence))
    copies = SampleCopies(folder)
    rows = [copies.add_all(side.samples, side.name, side.scores) for side in sides]
    source = " and ".join(str(source) for source in arguments.source)
    names = (sides[0].name, sides[1].name)
    pairs = list(zip(*rows, strict=True))
    kind = "run" if len(models) == 1 else "runs"
    plan_pairs(copies, kind, source, pairs, question, names)


def _arguments(arguments: Vote, run: Path) -> EvaluateArguments:
    prompts = () if arguments.prompts is None else (str(arguments.prompts),)
    return EvaluateArguments(
        run=run,
        weights=arguments.weights,
        trust=arguments.trust,
        prompts=prompts,
        steps=arguments.steps,
    )


def _trial(model: GivenModel, arguments: Vote, prompts: PromptSet) -> Trial:
    """A trial of as many prompts as there are votes, if there are so many: the answer's interval is
    over prompts."""
    count = arguments.votes or VOTES_OF_A_RUN
    steps = arguments.steps or model.run.evaluation_steps
    return Trial.of(prompts, count, 1, steps, model.run.evaluate.seed)


def _before_and_after(model: GivenModel, trial: Trial) -> list[_Side]:
    """The trained weights' samples, and the base's."""
    if model.weights is None:
        raise UserError("vote: --weights base leaves nothing to compare: choose last or best")
    loaded, policy = model.open()
    base = draw_trial(policy, trial)
    load_into(loaded, model.run, model.weights)
    return [
        _scored(model, policy, "trained", draw_trial(policy, trial)),
        _scored(model, policy, "base", base),
    ]


def _drawn(model: GivenModel, trial: Trial, name: str) -> _Side:
    loaded, policy = model.open()
    load_into(loaded, model.run, model.weights)
    return _scored(model, policy, name, draw_trial(policy, trial))


def _scored(model: GivenModel, policy: EvaluationSampler, name: str, drawn: TrialSamples) -> _Side:
    """Samples with the scores of the run's evaluation rewards, as far as they may be opened. Scores
    of prompts that a reward was fitted to votes on are left out: its agreement there is no test."""
    scores, left_out = dict[str, list[float | None]](), list[str]()
    if model.judges:
        with model.limited():
            rewards = load_rewards(model.judges)
            table = score_trial(rewards, drawn, Attempts()).scores
        for i, label in enumerate(table.names):
            column = zip(table.values[:, i].tolist(), table.scored[:, i].tolist(), strict=True)
            values = [value if is_scored else None for value, is_scored in column]
            tests, sentence = testing_scores(label, rewards[label], drawn.samples.prompts, values)
            if tests is not None:
                scores[label] = tests
            left_out += [sentence] if sentence else []
    return _Side(name, shown_by(policy, drawn.samples), scores, left_out)


def testing_scores(
    label: str, reward: Reward, prompts: Sequence[str], scores: Sequence[float | None]
) -> tuple[list[float | None] | None, str]:
    """The scores that test whether a reward agrees with people: None where it was fitted to votes
    on the prompt; no list if that is everywhere. Also a sentence on those; empty if there are
    none."""
    fits = list(parts_of(reward, KnowsPrompts))
    seen = [any(fit.has_seen(prompt) for fit in fits) for prompt in prompts]
    if not any(seen):
        return list(scores), ""
    of = f"{sum(seen)} of {len(seen)}" if not all(seen) else "all"
    sentence = (
        f"{label} was fitted to votes on the prompts of {of} samples: its scores of these are left "
        "out, since its agreement with people there is no test"
    )
    if all(seen):
        return None, sentence
    pairs = zip(scores, seen, strict=True)
    return [None if is_seen else score for score, is_seen in pairs], sentence


def _person(arguments: Vote) -> Helper | None:
    if arguments.person == "page":
        return None
    print(
        f"a simulated person votes, by the hidden taste {arguments.taste!r} of the demo's world "
        "(flowrl/demo/taste.py)"
    )
    taste = TASTES[arguments.taste]
    return SimulatedPerson(lambda image, _: taste.of(image), taste.temperature, seed=arguments.seed)
