"""Score a model on prompts and compare it with its base, with intervals of the differences."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from pydantic import ValidationError

from flowrl.cli.given_model import GivenModel, load_into
from flowrl.errors import UserError, terminal_text
from flowrl.evaluation.dimensions import dimension_lines
from flowrl.evaluation.measure import parse_specs
from flowrl.evaluation.outputs import check_output_file
from flowrl.evaluation.paired import paired_gain, prompt_means
from flowrl.evaluation.suites import Suite, load_suite, suite_summary
from flowrl.json_text import json_text
from flowrl.models.policy import EvaluationSampler, Policy
from flowrl.paths import removed_on_error
from flowrl.prompts import PromptSet
from flowrl.run.evaluate.attempts import Attempts
from flowrl.run.evaluate.evaluate import HeldOutResult, Trial, draw_trial, score_trial
from flowrl.run.evaluate.start_checks import made_form
from flowrl.run.watch.size_check import check_sizes
from flowrl.run.watch.text_facts import likely_form
from flowrl.session.live import NOTHING_LIVE, Live
from flowrl.session.session import load_rewards, prove_rewards
from flowrl.session.smaller_calls import explained
from flowrl.settings import EvaluateSettings, OwnSettings, PromptFiles, RewardSpec, RunSettings
from flowrl.settings.checks.machine import check_texts
from flowrl.settings.command_line.arguments import EvaluateArguments
from flowrl.settings.file.strict_yaml import parse_yaml
from flowrl.settings.read import Overrides
from flowrl.settings.words.sentences import plain_message
from rewards import Reward
from rewards.judging.tally import take_tallies
from rewards.types import MediaForm

METRIC_NAMES = {
    "image/diversity": "diversity within a prompt",
    "sound/diversity": "diversity within a prompt",
    "sample/diversity": "diversity within a prompt",
    "text/length": "tokens per completion",
    "text/stopped": "share that ended with a stop token",
    "text/distinct": "distinct within a prompt",
}
RowMask = Bool[np.ndarray, " n"]


def evaluate_weights(
    arguments: EvaluateArguments, options: Overrides, live: Live = NOTHING_LIVE
) -> "EvaluationTable":
    """Print the mean of each reward over samples of held-out prompts, or of a suite, and its
    difference from the base model's. `live`: rewards that are Python objects."""
    if arguments.out is not None:
        check_output_file(arguments.out, begins=b"{")
    chosen = GivenModel.of(arguments, options, "evaluate")
    run = chosen.run
    suite = None if arguments.suite is None else load_suite(arguments.suite)
    own_prompts = suite is None and not arguments.prompts  # the run's, whose rows have its rights
    with chosen.limited() if own_prompts else nullcontext():
        prompts = evaluation_prompts(chosen, arguments, suite)
        check_texts(prompts, run.model)
        check_sizes(run, prompts)
    words = arguments.rewards or (suite.rewards if suite is not None else ())
    if not words and chosen.folder is None:
        raise UserError("evaluate: --model has no rewards: add some with --rewards")
    e = evaluation_settings(run, arguments)
    specs = tuple(parse_specs(words, "--rewards").values())
    with explained(run, trains=False, fewer="samples"):
        with nullcontext() if specs else chosen.limited():
            rewards = load_rewards(_fitting(specs or run.judges, not own_prompts), live)
        with chosen.limited() if own_prompts else nullcontext():
            return _evaluate(arguments, chosen, EvaluationInput(suite, prompts, rewards, e))


@dataclass(frozen=True)
class EvaluationInput:
    """Prompts, rewards by label, and settings of an evaluation; `suite` if the prompts are one."""

    suite: Suite | None
    prompts: PromptSet
    rewards: Mapping[str, Reward]
    settings: EvaluateSettings


def _evaluate(
    arguments: EvaluateArguments, chosen: GivenModel, subject: EvaluationInput
) -> "EvaluationTable":
    run, suite, prompts, rewards, e = (
        chosen.run,
        subject.suite,
        subject.prompts,
        subject.rewards,
        subject.settings,
    )
    opened: tuple[Any, Any] | None = None
    if isinstance(run.model, OwnSettings):  # it alone knows its form
        opened = chosen.open()
    form = likely_form(run) if opened is None else proven_form(opened[1], prompts, run)
    for sentence in prove_rewards(rewards, run, prompts, form):
        print(terminal_text(sentence))
    model, policy = opened or chosen.open()
    whole = e.samples if suite is None else len(prompts) * e.per_prompt
    steps = chosen.steps(policy, arguments.steps)
    trial = Trial.of(prompts, arguments.samples or whole, e.per_prompt, steps, e.seed)

    def scored(sampler: EvaluationSampler) -> HeldOutResult:
        return score_trial(rewards, draw_trial(sampler, trial), Attempts.of(e))

    sampler: EvaluationSampler = policy
    if arguments.base_steps:
        sampler = chosen.ended_by_base(policy, arguments.base_steps, "evaluate")
    take_tallies(rewards)  # those of the self-test
    base = scored(policy) if chosen.weights is not None and not arguments.alone else None
    of_base = take_tallies(rewards)
    load_into(model, run, chosen.weights)
    result = scored(sampler)
    table = EvaluationTable(result, base)
    print(terminal_text("\n".join(table_lines(table))))
    if suite is not None:
        print(terminal_text(suite_summary(suite, result.scores, result.samples.meta)))
    if lines := dimension_lines(take_tallies(rewards), None if base is None else of_base):
        print(terminal_text("\n".join(lines)))
    if arguments.out is not None:
        write_scores(arguments.out, result, base)
    return table


def _fitting(specs: Sequence[RewardSpec], other: bool) -> list[RewardSpec]:
    """Rewards for the run's data sets, or without them for `other` prompts."""
    return [spec.model_copy(update={"sets": ()}) if other else spec for spec in specs]


def proven_form(policy: Policy, prompts: PromptSet, run: RunSettings) -> MediaForm:
    """Form of the samples of a user's own model, from its checks."""
    policy.proofs(prompts.texts[:2], run.evaluation_steps, prompts.meta[:2])
    return made_form(policy)


def evaluation_settings(run: RunSettings, arguments: EvaluateArguments) -> EvaluateSettings:
    """A run's `evaluate` settings with the command line's options. UserError if they do not fit."""
    e = run.evaluate
    changes: dict[str, Any] = {
        "seed": e.seed if arguments.seed is None else arguments.seed,
        "per_prompt": arguments.per_prompt or max(e.per_prompt, *arguments.pass_at, 1),
        "pass_at": arguments.pass_at or e.pass_at,
        "majority": arguments.majority or e.majority,
    }
    try:
        return EvaluateSettings.model_validate(e.model_dump() | changes)
    except ValidationError as error:
        raise UserError(f"evaluate: {plain_message(error.errors(include_url=False)[0])}") from error


def evaluation_prompts(
    chosen: GivenModel, arguments: EvaluateArguments, suite: Suite | None
) -> PromptSet:
    """The suite's prompts, those of `--prompts`, or the run's held-out ones."""
    run = chosen.run
    if suite is not None:
        if arguments.prompts:
            raise UserError(
                "evaluate: a suite has its own prompts: leave out either --prompts or --suite"
            )
        return suite.prompts
    if arguments.prompts:
        return given_prompts(arguments.prompts, run.prompts.column)
    if run.prompts.held_out is None:
        owner = "the run has no held-out prompts" if chosen.folder else "--model has no prompts"
        raise UserError(f"evaluate: {owner}: add --prompts FILE")
    return run.prompts.read("held_out")


def given_prompts(words: Sequence[str], column: str) -> PromptSet:
    """Read the data sets of `--prompts`: names, or YAML with the keys of `prompts.held_out`."""
    values = [parse_yaml(word, "--prompts") if word[:1] == "{" else word for word in words]
    try:
        sets = PromptFiles.model_validate({"train": "none", "held_out": values}).held_out or ()
    except ValidationError as error:
        raise UserError(
            f"--prompts: {plain_message(error.errors(include_url=False)[0])}"
        ) from error
    prompts = {data_set.label: data_set.read(column, "--prompts") for data_set in sets}
    return PromptSet.joined(prompts) if len(prompts) > 1 else next(iter(prompts.values()))


@dataclass(frozen=True)
class EvaluationTable:
    """Results of one trial, and the base model's on the same prompts and noise, if any."""

    result: HeldOutResult
    base: HeldOutResult | None

    @property
    def with_base(self) -> HeldOutResult:
        """The result, which also has the base model's."""
        return replace(self.result, base=self.base)

    def line(self, label: str, name: str, rows: RowMask | None = None) -> str:
        """Mean of a column with its standard error, and its difference from the base model's."""
        now, group = self._column(self.result, name, rows), self._groups(rows)
        values, counted = now, "samples"
        if name in self.result.attempts:  # a prompt's samples share one value
            values, counted = prompt_means(now, group), "prompts"
        scored = values[~np.isnan(values)]
        if not len(scored):
            return f"{label}: no scores{self._without_scores(name, rows)}"
        error = float(scored.std(ddof=1)) / len(scored) ** 0.5 if len(scored) > 1 else float("nan")
        text = (
            f"{label}: {scored.mean():.4f} +- {error:.4f} (standard error, {len(scored)} {counted})"
        )
        return text if self.base is None else f"{text}; {self._beside(name, rows)}"

    def _without_scores(self, name: str, rows: RowMask | None) -> str:
        """Why a reward has no scores: it abstained, or failed."""
        scores = self.result.scores
        if name not in scores.names or len(scores.values) != len(self.result.columns[name]):
            return ""
        applies = scores.column(name).applies.numpy()
        applies = applies if rows is None else applies[rows]
        if not applies.any():
            return f": it applies to none of the {len(applies)} samples (None for each)"
        return f": it scored none of the {applies.sum()} samples to which it applies"

    def _beside(self, name: str, rows: RowMask | None) -> str:
        assert self.base is not None
        now, base = (self._column(r, name, rows) for r in (self.result, self.base))
        gain = paired_gain(now, base, self._groups(rows))
        scored = base[~np.isnan(base)]
        mean = float(scored.mean()) if len(scored) else float("nan")
        interval = f"95 % interval {gain.low:+.4f} to {gain.high:+.4f} over {gain.n} prompts"
        if gain.n < 2:
            interval = "no interval, since it needs two prompts"
        return f"base {mean:.4f}, difference {gain.value:+.4f} ({interval})"

    def _column(
        self, result: HeldOutResult, name: str, rows: RowMask | None
    ) -> Float[np.ndarray, " kept"]:
        column = result.columns[name].double().numpy()
        return column if rows is None else column[rows]

    def _groups(self, rows: RowMask | None) -> Any:
        group = self.result.samples.group.numpy()
        return group if rows is None else group[rows]


def table_lines(table: EvaluationTable) -> list[str]:
    """One line per reward, per attempt and per statistic, and per data set if there are several."""
    result, lines = table.result, []
    for name in (*result.scores.names, *result.attempts):
        lines.append(table.line(name, name))
        for label in dict.fromkeys(result.data_sets):
            rows = np.array([name == label for name in result.data_sets])
            lines.append(table.line(f"  {label}", name, rows))
    for name in [name for name in result.metrics if name in METRIC_NAMES]:
        text = f"{METRIC_NAMES[name]}: {result.metrics[name]:.4f}"
        lines.append(text if table.base is None else f"{text}; {table._beside(name, None)}")
    return lines


def write_scores(out: Path, result: HeldOutResult, base: HeldOutResult | None) -> None:
    """Write one line per sample: its prompt, scores and attempts, and the base model's."""
    sides = [_rows_of(result), [] if base is None else _rows_of(base)]
    with removed_on_error(out), out.open("w") as file:
        for i, prompt in enumerate(result.samples.prompts):
            row: dict[str, Any] = {"prompt": prompt, **sides[0][i]}
            if result.data_sets:
                row["data_set"] = result.data_sets[i]
            if base is not None:
                row["base"] = sides[1][i]
            file.write(json_text(row) + "\n")
    print(f"scores of every sample: {out}")


def _rows_of(result: HeldOutResult) -> list[Mapping[str, float | None]]:
    names = (*result.scores.names, *result.attempts)
    columns = [result.columns[name].tolist() for name in names]
    cells = [[None if v != v else v for v in row] for row in zip(*columns, strict=True)]
    return [dict(zip(names, row, strict=True)) for row in cells]
