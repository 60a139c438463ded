"""The stage `update`: evaluations under every policy that the loss reads, the loss, its gradients
and the optimizer steps. Denominators are counted here alone."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.errors import NotFiniteError
from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.histograms import IterationValues
from flowrl.iteration.learning_check import SIGNAL, LearningCheck, LearningWatch, signal_metric
from flowrl.iteration.minibatches import Chunks, shares_of
from flowrl.iteration.ratio_check import checked_ratio
from flowrl.iteration.records import TrainingRows, Updated
from flowrl.iteration.schedule import learning_rate
from flowrl.iteration.tally import Tally
from flowrl.likelihoods.rows import (
    Evaluation,
    Rows,
    sampled_elsewhere,
    with_replayed,
    without_old,
)
from flowrl.likelihoods.transition import Likelihood
from flowrl.losses.base import Counts, Derived, Entries, Metric, reduced
from flowrl.models.call_sizes import CallTooLarge, bounded_call
from flowrl.models.diffusers.call.results.decoder import late_verdicts
from flowrl.models.evaluation_counter import Meter
from flowrl.processes.sharding import clip_shards
from flowrl.session.finite import check_iteration
from flowrl.session.learner import Learner
from flowrl.session.progress import Progress
from flowrl.session.record import Terminal
from flowrl.session.smaller_calls import with_smaller_calls

SKIPPED_STEPS = 3  # optimizer steps in a row without a finite gradient
ChunkEntries = tuple[Entries, Tensor]
"""The entries of a loss on a chunk of rows, and their mask [b t]."""


@runtime_checkable
class ChunkLoss(Protocol):
    def __call__(
        self, learner: Learner, training: TrainingRows, chunk: Rows, equal: frozenset[str] | None
    ) -> ChunkEntries:
        """The loss of a chunk of rows. `equal`: see `chunk_loss`."""
        ...


@runtime_checkable
class Prepare(Protocol):
    def __call__(
        self, learner: Learner, training: TrainingRows, shares: list[Chunks]
    ) -> list[Chunks]:
        """The rows of all optimizer steps, before the first one. Collective."""
        ...


@runtime_checkable
class FirstCheck(Protocol):
    def __call__(
        self, learner: Learner, training: TrainingRows, terminal: Terminal
    ) -> TrainingRows:
        """Check the rows of a run's first iteration. Collective."""
        ...


def unchanged(learner: Learner, training: TrainingRows, shares: list[Chunks]) -> list[Chunks]:
    del learner, training
    return shares


def averages_equal_to_trained(learner: Learner) -> frozenset[str]:
    """Averages that the loss or the sampling reads, and whose weights still equal the trained ones
    on all processes."""
    names = {*learner.algorithm.loss.roles, learner.algorithm.behaviour}
    if names.isdisjoint(average.name for average in learner.policies.averages):
        return frozenset()
    equal_by_process = learner.parallel.every(learner.policies.equal_to_current(names))
    return frozenset(set.intersection(*equal_by_process))


def add_gradients(
    learner: Learner,
    training: TrainingRows,
    share: Chunks,
    equal: frozenset[str] | None,
    tally: Tally,
    values_of_entries: IterationValues | None,
    loss: ChunkLoss,
    watch: LearningWatch | None = None,
) -> None:
    """Add the gradients of one optimizer step's chunks, and their metrics to `tally` and
    `values_of_entries`. `equal`: see `chunk_loss`; None after the iteration's first step."""
    counts = denominators(learner, share)
    with learner.parallel.together(), bounded_call("training"):
        for chunk in share:
            rows = chunk.rows()
            entries, mask = loss(learner, training, rows, equal)
            if watch is not None:
                watch.chunk(learner.algorithm.loss, rows, entries)
            value = reduced(entries, mask, counts)
            value = value if learner.loss_weight == 1 else learner.loss_weight * value
            learner.parallel.backward(learner.scaler.scale(value))
            tally.add("loss", entries.value, mask)
            for name, values in entries.metrics.items():
                tally.add(name, values, mask)
            if (signal := signal_metric(learner.algorithm.loss, rows)) is not None:
                tally.add(SIGNAL, signal, mask)
            if values_of_entries is not None:
                values_of_entries.add(rows, entries.metrics)


@torch.no_grad()
def with_old(learner: Learner, training: TrainingRows, chunks: Chunks) -> Chunks:
    """Evaluate the sampling policy, or the proximal one, for rows without its evaluation."""
    if "old" not in learner.algorithm.loss.roles:
        return chunks
    likelihood = learner.algorithm.likelihood
    with learner.policies.using(learner.old):
        return [
            chunk
            if chunk.has_old
            else replace(chunk, old=evaluated_old(likelihood, training, chunk.rows()))
            for chunk in chunks
        ]


def evaluated_old(likelihood: Likelihood, training: TrainingRows, rows: Rows) -> Evaluation:
    return with_replayed(likelihood.evaluate(training.policy, rows), rows)


RoleEvaluation = Callable[[Learner, TrainingRows, Rows], Evaluation]


def chunk_loss(
    learner: Learner,
    training: TrainingRows,
    chunk: Rows,
    equal: frozenset[str] | None = None,
    other_roles: Mapping[str, RoleEvaluation] = {},
) -> ChunkEntries:
    """Loss of a chunk: evaluate every policy that the loss reads, the trained one last.

    equal        the averages whose weights still equal the trained ones; None once an optimizer
                 step was taken since sampling
    other_roles  roles of the loss that are no policies of the learner, and how to evaluate them
    """
    evaluations = evaluated_roles(learner, training, chunk, equal, other_roles)
    loss = learner.algorithm.loss
    entries = loss(learner.algorithm.likelihood, evaluations, chunk)
    entries = entries._replace(new=evaluations["new"])
    if "old" in evaluations:
        unstepped = equal is not None and learner.sampler == "current"
        compares_stored = unstepped and not learner.run.budget.replay
        mismatch = mismatch_metric(chunk, evaluations, compares_stored)
        entries = entries._replace(metrics={**mismatch, **entries.metrics})
    return entries, chunk.mask


def evaluated_roles(
    learner: Learner,
    training: TrainingRows,
    chunk: Rows,
    equal: frozenset[str] | None,
    other_roles: Mapping[str, RoleEvaluation],
) -> dict[str, Evaluation]:
    """Evaluations of a chunk by role: "new", with gradients, and every role of the loss. Arguments
    as in `chunk_loss`."""
    policies, likelihood = learner.policies, learner.algorithm.likelihood
    roles = learner.algorithm.loss.roles
    shared = roles_of_trained_weights(learner, chunk, equal)
    evaluations: dict[str, Evaluation] = {}
    for role in sorted(roles - {"old", *other_roles} - shared):
        with torch.no_grad(), policies.using(policies.at_sampling(role)):
            evaluations[role] = likelihood.evaluate(training.policy, chunk)
    for role in roles & other_roles.keys():
        evaluations[role] = other_roles[role](learner, training, chunk)
    if "old" in roles - shared:
        with torch.no_grad(), policies.using(learner.old):
            evaluations["old"] = chunk.old or evaluated_old(likelihood, training, chunk)
    new = evaluations["new"] = likelihood.evaluate(training.policy, chunk)
    for role in sorted(shared):
        out = None if new.out is None else new.out.detach()
        evaluations[role] = Evaluation(new.logp.detach(), out)
    if "old" in shared:
        evaluations["old"] = with_replayed(evaluations["old"], chunk)
    return evaluations


def roles_of_trained_weights(
    learner: Learner, chunk: Rows, equal: frozenset[str] | None
) -> frozenset[str]:
    """Roles of the loss whose weights are the trained ones: they share its evaluation.

    Rows have no `old` only before the first step, if the policy that samples is among these.
    """
    algorithm, averages = learner.algorithm, equal or frozenset[str]()
    trained = {"current", *averages}
    shared = algorithm.loss.roles & trained
    # Under a lag `learner.old` names the weights kept from sampling, so the average is asked too.
    sampled_now = learner.old in trained or algorithm.behaviour in averages
    if "old" in algorithm.loss.roles and sampled_now and chunk.old is None:
        shared |= {"old"}
    return shared


def mismatch_metric(
    chunk: Rows, evaluations: Mapping[str, Evaluation], compares_stored: bool
) -> dict[str, Metric]:
    """`mismatch`: |log p_trainer - log p_sampler| of each entry, in nats, under the sampling
    weights.

    compares_stored: compare the log-probabilities in the rows' `old` with those of the trained
    weights, which are still the sampling weights
    """
    if (sampled := sampled_elsewhere(chunk)) is not None:
        pair = evaluations["old"].logp, sampled
    elif compares_stored and chunk.old is not None:
        pair = evaluations["new"].logp.detach(), chunk.old.logp
    else:
        return {}
    return {"mismatch": Derived(_distance, pair)}


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().nan_to_num(0.0)


def denominators(learner: Learner, share: Chunks) -> Counts:
    """Denominators of all sums, over the whole optimizer step and all processes."""
    local_counts = Counts.of([chunk.mask for chunk in share])
    return Counts(*torch.tensor(learner.parallel.every(tuple(local_counts))).sum(0).tolist())


def optimizer_step(learner: Learner, progress: Progress, tally: Tally) -> float:
    """Sum gradients over processes, clip and step. A norm that is not finite skips the step. This
    is the only wait for a GPU: the norm, spreads of decoders and the values in `tally` are read at
    once.
    """
    parameters, scale = learner.policies.parameters, learner.scaler.get_scale()
    learner.parallel.sum_gradients(parameters)
    learner.scaler.unscale_(learner.optimizer)
    clip = clip_shards if learner.policies.sharded else torch.nn.utils.clip_grad_norm_
    late = late_verdicts()
    gradient_norm = clip(parameters.values(), learner.run.train.max_grad_norm)
    norm, *fine = tally.settle(gradient_norm, *late.spreads)
    if fine:
        late.judge(fine)
    if math.isfinite(norm):
        learner.scaler.step(learner.optimizer)
        learner.policies.publish()
    learner.scaler.update()
    learner.optimizer.zero_grad(set_to_none=True)
    skipped = progress.count_skipped(learner.name, norm, scale)
    if skipped >= SKIPPED_STEPS:  # all processes have this norm, and stop here
        raise NotFiniteError(
            "no finite gradient in three consecutive optimizer steps; lower train.lr or use "
            "model.dtype: "
            "float32"
        )
    return norm


def update(
    learner: Learner,
    training: TrainingRows,
    progress: Progress,
    keep_values: bool = False,
    loss: ChunkLoss = chunk_loss,
    prepare: Prepare = unchanged,
    watch: LearningWatch | None = None,
) -> Updated:
    """Take the iteration's optimizer steps, which `watch` measures.

    NotFiniteError after SKIPPED_STEPS consecutive steps without a finite gradient; `progress`
    counts them, over iterations and resumed runs.
    """
    learner.optimizer.zero_grad(set_to_none=True)  # of an update that ran out of memory
    tally, values_of_entries = Tally(), IterationValues() if keep_values else None
    meter = Meter(frozen=training.frozen)
    training = replace(training, policy=meter(training.policy))
    if learner.recomputes_old:
        rows = [without_old(part, keep=learner.decouples) for part in training.rows]
        training = replace(training, rows=tuple(rows))
    shares = shares_of(learner, training, training.iteration)
    # The first step's rows can share the trained policy's evaluation (`roles_of_trained_weights`),
    # unless a later epoch reads them again, after the weights have changed.
    with learner.parallel.together(), bounded_call("training"):
        waits = 1 if learner.run.train.epochs == 1 else 0
        shares[waits:] = [with_old(learner, training, share) for share in shares[waits:]]
    shares = prepare(learner, training, shares)
    equal = averages_equal_to_trained(learner)
    norms: list[float] = []
    with nullcontext() if watch is None else watch.steps_of(learner):
        for number, share in enumerate(shares * learner.run.train.epochs):
            try:
                still_equal = None if number else equal
                add_gradients(
                    learner,
                    training,
                    share,
                    still_equal,
                    tally=tally,
                    values_of_entries=values_of_entries,
                    loss=loss,
                    watch=watch,
                )
            except CallTooLarge as error:
                # Once a step was taken, the weights that sampled are gone.
                error.repeatable = not norms
                raise
            norms.append(optimizer_step(learner, progress, tally))
    finite = [norm for norm in norms if math.isfinite(norm)]
    scale = {"loss_scale": learner.scaler.get_scale()} if learner.scaler.is_enabled() else {}
    metrics = {
        **tally.means(),
        **scale,
        "count/training": meter.total(learner.parallel.every, "graded"),
        "count/frozen": meter.total(learner.parallel.every, "frozen"),
        "grad_norm": sum(finite) / len(finite) if finite else math.nan,
        "skipped": float(len(norms) - len(finite)),
    }
    return Updated(metrics, len(norms), values_of_entries)


@dataclass(frozen=True)
class UpdateStage:
    """Optimizer steps of one model, and the averages that follow them. In a run's first iteration
    the rows are checked before.

    keep_values  whether the values of all entries are kept, for an observer
    loss         of a chunk of rows
    prepare      adds columns to the rows of all steps
    check        of the first iteration
    learning     judges the first update after a start
    """

    learner: Learner
    terminal: Terminal
    progress: Progress
    clock: PhaseClock
    keep_values: bool = False
    loss: ChunkLoss = chunk_loss
    prepare: Prepare = unchanged
    check: FirstCheck = checked_ratio
    learning: LearningCheck = field(default_factory=LearningCheck)

    def __call__(self, rows: TrainingRows) -> Updated:
        rate = learning_rate(self.learner.run, rows.iteration)
        for group in self.learner.optimizer.param_groups:
            group["lr"] = rate
        if self.progress.optimizer_steps == 0:
            rows = self.checked(rows)
        with self.clock("update"):
            updated, watch = self.steps(rows)
        self.follow(rows, updated)
        updated = replace(updated, metrics={**updated.metrics, "lr": rate})
        if watch is not None:
            metrics = {**rows.metrics, **updated.metrics}
            self.learning.judge(self.learner, watch, metrics, self.terminal)
        return updated

    def checked(self, rows: TrainingRows) -> TrainingRows:
        """The same rows after measuring the first ratio, which may switch off compilation."""
        learner = self.learner

        def check() -> TrainingRows:
            with bounded_call("training"):
                return self.check(learner, rows, self.terminal)

        return with_smaller_calls(learner, self.terminal, check)

    def steps(self, rows: TrainingRows) -> tuple[Updated, LearningWatch | None]:
        """Take the optimizer steps; again, with smaller calls, while the first is not taken."""
        learner = self.learner

        def take() -> tuple[Updated, LearningWatch | None]:
            learner.policies.forget_gradients()
            watch = self.learning.watch()
            updated = update(
                learner,
                rows,
                self.progress,
                keep_values=self.keep_values,
                loss=self.loss,
                prepare=self.prepare,
                watch=watch,
            )
            return updated, watch

        return with_smaller_calls(learner, self.terminal, take)

    def follow(self, rows: TrainingRows, updated: Updated) -> None:
        """Update the averages, and check that everything is finite."""
        policies, number = self.learner.policies, rows.iteration + 1
        due = self.refreshed(updated.metrics, number) if policies.averages else set[str]()
        policies.follow(self.progress.optimizer_steps + updated.steps, due)
        metrics = {**rows.metrics, **updated.metrics}
        check_iteration(rows.rows, policies.named(), metrics, number)

    def refreshed(self, metrics: Mapping[str, float], number: int) -> set[str]:
        """Averages that become the current weights; the same on all processes, as the metrics
        are."""
        names, progress = set[str](), self.progress
        for average in self.learner.policies.averages:
            name = self.learner.named(average.name)
            passed = number - progress.refreshed.get(name, 0)
            kl = metrics.get(f"kl_{average.name}", 0.0)
            if average.refresh is not None and average.refresh.due(passed, kl):
                names.add(average.name)
                progress.refreshed = {**progress.refreshed, name: number}
        return names
