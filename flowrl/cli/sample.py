"""Samples and evaluations with a run's weights."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from flowrl.cli.steer import SampleScorer, SteeredSampler, drivable, steered_samples
from flowrl.errors import UserError
from flowrl.evaluation.outputs import check_output_file
from flowrl.evaluation.suites import Suite, load_suite, suite_summary
from flowrl.media.pages import Page
from flowrl.media.statistics import Statistics
from flowrl.models.policy import Policy
from flowrl.paths import numbered
from flowrl.prompts import PromptSet
from flowrl.run import checkpoint
from flowrl.run.evaluate import Trial, TrialSamples, draw_trial, score_trial
from flowrl.run.learner import load_policy
from flowrl.run.session import load_rewards, prove_rewards
from flowrl.settings import RewardSpec, Run
from flowrl.settings.arguments import EvaluateArguments, SampleArguments
from flowrl.settings.read import override
from flowrl.settings.sentences import plain_message
from flowrl.settings.strict_yaml import parse_yaml

METRIC_NAMES = {
    "image/diversity": "diversity within a prompt",
    "text/length": "tokens per completion",
    "text/stopped": "share that ended with a stop token",
    "text/distinct": "distinct within a prompt",
}
WEIGHT_FOLDERS = ("adapter", "pipeline", "model")  # of the last weights


def device_of(run: Run) -> torch.device:
    """The run's device; auto is the first GPU, if there is one."""
    if run.model.device != "auto":
        return torch.device(run.model.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def policy_of(run: Run, folder: Path, weights: str) -> Policy:
    """The run's model with its last, best, base or other weights."""
    chosen = None if weights == "base" else weights_folder(folder, weights)
    policy = load_policy(run, device_of(run))
    if chosen is not None and (chosen / checkpoint.POLICIES_FILE).is_file():
        checkpoint.bring(policy, run, chosen)
    elif chosen is not None:
        policy.load_weights(chosen)
    return policy


def weights_folder(folder: Path, weights: str) -> Path:
    """The folder of a run's last or best weights, or `weights` itself. UserError if missing."""
    if weights == "best":
        chosen = max((folder / "best").glob("[0-9]*"), default=None)
    elif weights == "last":
        chosen = next((p for n in WEIGHT_FOLDERS if (p := folder / n).is_dir()), None)
    else:
        chosen = Path(weights) if Path(weights).is_dir() else None
    if chosen is None:
        unfinished = "; the run has not ended: try --weights best" if weights == "last" else ""
        raise UserError(f"{folder} has no {weights!r} weights{unfinished}")
    return chosen


def samples_folder(run_folder: Path, out: Path | None) -> Path:
    """The folder for samples. UserError for one that holds files, since samples would replace
    them."""
    if out is None:
        return numbered(run_folder / "samples", "sample")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} is a file, and samples need a folder: name another one")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out: {out} already holds files: name a new folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot make the folder {out}: {error.strerror}") from error
    return out


def sample_prompts(run: Run, given: SampleArguments) -> None:
    """Generate and score samples of prompts, and write them with a page of all."""
    out = samples_folder(given.run, given.out)
    rewards = load_rewards(parse_rewards(given.rewards) if given.rewards else run.judges)
    if given.guidance is not None:
        run = override(run, ["--model.guidance.sample", str(given.guidance)])
    policy = policy_of(run, given.run, given.weights)
    prompts = with_rows(run, given.prompts)
    steps = given.steps or run.evaluation_steps
    trial = Trial(prompts, tuple(range(len(prompts))), given.count, steps, given.seed)
    if given.steer == "no":
        result = draw_trial(policy, trial)
    else:
        guidance = run.model.guidance.sample
        scorer = SampleScorer(drivable(policy), rewards, trial, guidance, device_of(run))
        how = SteeredSampler(given.steer, given.particles, given.strength)
        samples, evaluations = steered_samples(scorer, how)
        result = TrialSamples(samples, Statistics({}, {}))
        print(f"steered by {', '.join(rewards)}: {evaluations} network evaluations")
    scores = score_trial(rewards, result).scores
    shown = [
        float(v) if ok else None
        for v, ok in zip(scores.values[:, 0], scores.scored[:, 0], strict=True)
    ]
    title = f"{given.run.name}, {given.weights} weights: {scores.names[0]}"
    page = Page(result.samples, shown, title)
    page.save_each(out)
    whole = page.save(out, "grid")
    print(f"{len(shown)} samples in {out}; all on one page: {whole}")


def with_rows(run: Run, texts: tuple[str, ...]) -> PromptSet:
    """Prompts with the rows that an environment receives: the first row of the run's files with
    this prompt, or the prompt alone."""
    known: dict[str, Mapping[str, Any]] = {}
    if run.model.environment is not None:
        for place in run.prompts.given:
            if run.prompts.on_disk(place):
                rows = run.prompts.read(place)
                known |= dict(zip(rows.texts[::-1], rows.meta[::-1], strict=True))
        for text in dict.fromkeys(texts):
            if text not in known:
                name = run.model.environment.name
                print(f"{text!r} is in no prompt file of the run: {name} gets only the prompt")
    return PromptSet(texts, tuple(known.get(text, {"prompt": text}) for text in texts))


def evaluation_prompts(run: Run, given: EvaluateArguments, suite: Suite | None) -> PromptSet:
    """The suite's prompts, those of `--prompts`, or the run's held-out ones."""
    if suite is not None:
        if given.prompts is not None:
            raise UserError("evaluate: a suite has its own prompts: leave --prompts or --suite out")
        return suite.prompts
    if given.prompts is not None:
        return PromptSet.read(given.prompts, run.prompts.column, "--prompts")
    if run.prompts.held_out is None:
        raise UserError("evaluate: the run has no held-out prompts: add --prompts FILE")
    return run.prompts.read("held_out")


def evaluate_weights(run: Run, given: EvaluateArguments) -> None:
    """Print the mean of each reward over samples of held-out prompts, or of a suite."""
    if given.out is not None:
        check_output_file(given.out)
    suite = None if given.suite is None else load_suite(given.suite)
    prompts = evaluation_prompts(run, given, suite)
    words = given.rewards or (suite.rewards if suite is not None else ())
    rewards = load_rewards(parse_rewards(words) if words else run.judges)
    e = run.evaluate
    whole = e.samples if suite is None else len(prompts) * e.per_prompt
    trial = Trial.of(
        prompts,
        given.samples or whole,
        e.per_prompt,
        given.steps or run.evaluation_steps,
        e.seed if given.seed is None else given.seed,
    )
    for sentence in prove_rewards(rewards, run, prompts):
        print(sentence)
    policy = policy_of(run, given.run, given.weights)
    result = score_trial(rewards, draw_trial(policy, trial))
    count = len(result.samples.prompts)
    for name in result.scores.names:
        mean = result.metrics[name]
        error = float(result.scores.values[:, result.scores.names.index(name)].std()) / count**0.5
        print(f"{name}: {mean:.4f} +- {error:.4f} (standard error, {count} samples)")
    if suite is not None:
        print(suite_summary(suite, result.scores, result.samples.meta))
    for name in [name for name in result.metrics if name in METRIC_NAMES]:
        print(f"{METRIC_NAMES[name]}: {result.metrics[name]:.4f}")
    if given.out is not None:
        write_scores(given.out, result.samples.prompts, result.scores.names, result.scores.values)


def write_scores(
    out: Path, prompts: Sequence[str], names: Sequence[str], values: torch.Tensor
) -> None:
    with out.open("w") as file:
        for prompt, row in zip(prompts, values.tolist(), strict=True):
            scores = dict(zip(names, row, strict=True))
            file.write(json.dumps({"prompt": prompt, **scores}) + "\n")
    print(f"scores of every sample: {out}")


def parse_rewards(words: Sequence[str]) -> tuple[RewardSpec, ...]:
    """Rewards of the command line: names, or YAML such as '{name: shapes, kind: strict}'."""
    try:
        values = [parse_yaml(word, "--rewards") for word in words]
        return tuple(RewardSpec.model_validate(value) for value in values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"--rewards: {plain_message(first)}") from error
