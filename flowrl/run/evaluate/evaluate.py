"""Held-out scores: plain sampling from fixed noise, scored by the held-out rewards."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from flowrl.errors import NotFiniteError
from flowrl.iteration.units import StoredSamples
from flowrl.media.statistics import merged_means
from flowrl.prompts import DATA_SET, PromptSet
from flowrl.run.evaluate.attempts import Attempts
from flowrl.run.evaluate.trial import (
    AskedTrial,
    ScoredTrial,
    StoredTrial,
    Trial,
    TrialSamples,
    TrialSource,
    draw_trial,
)
from flowrl.run.save import checkpoint
from flowrl.session.learner import Learner
from flowrl.session.progress import Progress, deciding
from flowrl.session.session import SOURCE, Session, score_once
from flowrl.session.smaller_calls import with_smaller_calls
from flowrl.settings import RunSettings
from rewards import Reward, Samples, Scores, score_all


@dataclass(frozen=True)
class HeldOutResult:
    """Results on held-out prompts; the samples of a prompt are contiguous in all columns.

    metrics    mean of each reward over the samples of all processes to which it applies, left out
               if it applies to none; and statistics of the media
    columns    [n] of all processes: scores, NaN where there is none, attempts, and statistics
    samples    this process's
    scores     this process's
    attempts   names of the columns from `flowrl.run.evaluate.attempts`
    data_sets  of the n samples, if the prompts come from several
    base       the base model's result on the same prompts and noise, where it was asked for
    """

    metrics: dict[str, float]
    columns: dict[str, Tensor]
    samples: Samples | StoredSamples
    scores: Scores
    attempts: tuple[str, ...] = ()
    data_sets: tuple[str, ...] = ()
    base: "HeldOutResult | None" = None

    def by_data_set(self) -> dict[str, dict[str, float]]:
        """Mean scores and attempts of each data set; NaN without scores."""
        means: dict[str, dict[str, float]] = {}
        for label in dict.fromkeys(self.data_sets):
            rows = torch.tensor([data_set == label for data_set in self.data_sets])
            names = (*self.scores.names, *self.attempts)
            means[label] = {name: known_mean(self.columns[name][rows]) for name in names}
        return means

    def spreads(self, base: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Standard deviations of the samples, and standard errors of the paired gains over `base`.

        The noise is the same in every evaluation, so each sample is paired with a sample of the
        base model. Nothing for fewer than two scored samples.
        """
        spreads: dict[str, float] = {}
        for name, column in self.columns.items():
            if len(values := column[~column.isnan()].double()) > 1:
                spreads[f"held_out_std/{name}"] = float(values.std())
            if len(base.get(name, ())) != len(column):  # a resumed run may evaluate more samples
                continue
            gains = column - column.new_tensor(base[name])
            if len(values := gains[~gains.isnan()].double()) > 1:
                spreads[f"held_out_gain_error/{name}"] = float(values.std()) / len(values) ** 0.5
        return spreads


def score_trial(
    rewards: Mapping[str, Reward], trial: TrialSamples, attempts: Attempts = Attempts()
) -> HeldOutResult:
    """The result of a trial that this process has drawn as a whole, whatever others do."""
    scores = score_all(rewards, trial.samples)
    more = attempts.columns(rewards, trial.samples, scores)
    return merged_trial(trial, scores, more=more, gather=list)


def known_mean(column: Tensor) -> float:
    """Mean of the non-NaN values; NaN if there are none."""
    values = column[~column.isnan()].double()
    return float(values.mean()) if len(values) else math.nan


def merged_trial(
    trial: TrialSamples | StoredTrial,
    scores: Scores,
    counts: bool = True,
    more: Mapping[str, Tensor] = MappingProxyType({}),
    gather: Callable[[list[Any]], list[Any]] = gather_object,
) -> HeldOutResult:
    """Merge the results of all processes that count.

    `more` are further columns [n] of this process's samples. `gather` brings the lists of all
    processes together; `list` leaves each process its own.
    """
    counted = slice(None if counts else 0)
    parts = gather([trial.statistics if counts else None])
    values, scored, applies, statistics = (
        torch.cat(gather([scores.values[counted]])),
        torch.cat(gather([scores.scored[counted]])),
        torch.cat(gather([scores.applies[counted]])),
        [part for part in parts if part is not None],
    )
    metrics = {
        name: float(values[:, i][scored[:, i]].double().mean())
        if scored[:, i].any()
        else float("nan")
        for i, name in enumerate(scores.names)
        if applies[:, i].any()
    }
    metrics |= merged_means([(part.means, part.size) for part in statistics])
    columns = {n: torch.cat([s.columns[n] for s in statistics]) for n in statistics[0].columns}
    scored_values = values.double().masked_fill(~scored, torch.nan)
    columns |= dict(zip(scores.names, scored_values.unbind(1), strict=True))
    for name, column in more.items():
        columns[name] = torch.cat(gather([column[counted]]))
        if name.partition("/")[2] in metrics:  # attempts at rewards that apply
            metrics[name] = known_mean(columns[name])
    labels = [str(row[DATA_SET]) for row in trial.samples.meta if DATA_SET in row][counted]
    sets = tuple(label for part in gather([labels]) for label in part)
    return HeldOutResult(metrics, columns, trial.samples.on_cpu(), scores, tuple(more), sets)


def trial_of(run: RunSettings, prompts: PromptSet) -> Trial:
    """The whole evaluation of a run."""
    e = run.evaluate
    return Trial.of(prompts, e.samples, e.per_prompt, run.evaluation_steps, e.seed)


def slices_of_trial(learner: Learner, prompts: PromptSet) -> list[Trial]:
    """This process's share of an evaluation, cut if `workers.evaluate` asks for it."""
    trial = trial_of(learner.run, prompts)
    mine, _ = learner.parallel.share(len(trial.rows))
    return trial.part(mine).cut(learner.run.workers.evaluation_slice)


def scored_slice(learner: Learner, part: Trial, judges: Mapping[str, Reward]) -> ScoredTrial:
    """Sample and score a slice of an evaluation with the weights of evaluations."""
    parallel = learner.parallel
    server = learner.run.server  # without sync it does not sample evaluations
    texts = learner.algorithm.text and (server is None or server.sync == "none")
    by_turn = learner.run.algorithm().by_turn
    # texts are written token by token: sharded weights are gathered once, not for each
    with learner.evaluating(), parallel.whole() if texts else nullcontext():
        trial = draw_trial(learner.evaluator, part, by_turn)
    scores = score_once(parallel, judges, trial.samples)
    more = Attempts.of(learner.run.evaluate).columns(judges, trial.samples, scores)
    return ScoredTrial(trial, scores, more)


def evaluate_held_out(
    learner: Learner,
    prompts: PromptSet,
    judges: Mapping[str, Reward],
    request: AskedTrial | None = None,
) -> HeldOutResult:
    """Run the evaluation of a run on held-out prompts, always from the same noise; or wait for
    workers that were asked for it.

    NotFiniteError, on all processes, for a reward that applies to samples and scored none of them.
    """
    parallel, slices = learner.parallel, slices_of_trial(learner, prompts)
    trial = trial_of(learner.run, prompts)
    _, counts = parallel.share(len(trial.rows))
    with parallel.together():
        if request is None:
            parts = [scored_slice(learner, part, judges) for part in slices]
        else:
            parts = request.parts()
        trial_samples, scores, more = ScoredTrial.joined(slices, parts)
    result = merged_trial(trial_samples, scores, counts and parallel.leads, more)
    for name in result.scores.names:
        if name in result.metrics and not math.isfinite(result.metrics[name]):
            raise NotFiniteError(
                f"the held-out score {name} is {result.metrics[name]}: the reward scored none of "
                f"the {len(trial.rows) * trial.group} samples; fix the reward or its settings"
            )
    return result


@dataclass(frozen=True)
class Evaluated:
    """An evaluation of a run.

    key      the reward that decides which weights are the best
    metrics  `held_out/...` and `data_set/...`, for the record
    """

    result: HeldOutResult
    key: str
    metrics: dict[str, float]


def ask_workers(session: Session, iteration: int) -> AskedTrial | None:
    """Ask the workers for an evaluation of the present weights; None if this process evaluates."""
    held_out = session.held_out
    if held_out is None or not session.run.workers.evaluate or SOURCE not in session.table:
        return None
    source = session.table[SOURCE]
    if not isinstance(source, TrialSource):
        return None
    return source.ask(slices_of_trial(session.learner, held_out), iteration)


def evaluate_and_keep(
    session: Session, progress: Progress, earlier: AskedTrial | None = None
) -> Evaluated | None:
    """Evaluate on the run's held-out prompts and keep the best weights; None without held-out
    prompts. `earlier`: workers were asked for it, before the weights changed."""
    if session.held_out is None:
        return None
    learner, request = session.learner, earlier or ask_workers(session, progress.iteration)
    evaluate = partial(evaluate_held_out, learner, session.held_out, session.measured, request)
    result = with_smaller_calls(learner, session.terminal, evaluate, learner.evaluator)
    if progress.base_scores is None:
        progress.base_scores = {n: result.columns[n].tolist() for n in result.scores.names}
    first = progress.first is None
    progress.first = progress.first or result.metrics
    progress.last = result.metrics
    key = deciding(session.run, progress.first)
    if first and key not in result.metrics:
        session.terminal.warn(
            f"checkpoint.best: the reward {key} applies to none of the held-out samples, so no "
            "weights are kept in best; name another held-out reward, or add prompts for this one"
        )
    with session.parallel.together():
        session.writer.wait()  # a checkpoint removes best weights that it does not know
    weights = None if earlier is None else earlier.weights
    if key in result.metrics:
        checkpoint.keep_best(learner, session.folder, progress, result.metrics[key], weights)
    means = {f"held_out/{name}": value for name, value in result.metrics.items()}
    for label, scores in result.by_data_set().items():
        means |= {f"data_set/{label}/{n}": v for n, v in scores.items() if not math.isnan(v)}
    return Evaluated(result, key, means | result.spreads(progress.base_scores))
