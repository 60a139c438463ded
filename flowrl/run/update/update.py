"""From rows to optimizer steps: denominators, evaluations, losses and gradients."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import NotFiniteError
from flowrl.likelihoods.rows import (
    Evaluation,
    Rows,
    sampled_elsewhere,
    with_replayed,
    without_old,
)
from flowrl.likelihoods.transition import Likelihood
from flowrl.losses.averages import TEACHER
from flowrl.losses.base import (
    Counts,
    Derived,
    Entries,
    Metric,
    entropies,
    reduced,
)
from flowrl.losses.weights import share_bound
from flowrl.models.call_sizes import CallTooLarge, bounded_call
from flowrl.models.diffusers.call.results.decoder import late_verdicts
from flowrl.models.evaluation_counter import Meter
from flowrl.processes.sharding import clip_shards
from flowrl.run.experience.collect import Experience
from flowrl.run.experience.reward_gradient import path_entries
from flowrl.run.state.learner import Learner
from flowrl.run.state.progress import Progress
from flowrl.run.state.teachers import judged_by_teachers
from flowrl.run.update.minibatches import Chunks, shares_of
from flowrl.run.update.tally import Tally
from flowrl.run.watch.histograms import IterationValues
from samplers.host import on_host

SKIPPED_STEPS = 3  # optimizer steps in a row without a finite gradient


@dataclass(frozen=True)
class Updated:
    """Metrics and values of an iteration's optimizer steps.

    metrics  over all processes
    steps    number of optimizer steps, including skipped ones
    values   of all entries in the loss, if an observer shows them
    """

    metrics: dict[str, float]
    steps: int
    values: IterationValues | None = None


def update(
    learner: Learner, experience: Experience, progress: Progress, keep_values: bool = False
) -> Updated:
    """Take the iteration's optimizer steps.

    NotFiniteError after SKIPPED_STEPS consecutive steps without a finite gradient; `progress`
    counts them, over iterations and resumed runs.
    """
    learner.optimizer.zero_grad(set_to_none=True)  # of an update that ran out of memory
    tally, seen = Tally(), IterationValues() if keep_values else None
    meter = Meter(frozen=experience.reference_evaluations)
    experience = replace(experience, policy=meter(experience.policy))
    if learner.recomputes_old:
        lacking = partial(without_old, keep=learner.decouples)
        experience = replace(experience, rows=tuple(map(lacking, experience.rows)))
    shares = shares_of(learner, experience, progress.iteration)
    with (
        learner.parallel.together(),
        bounded_call("training"),
    ):  # a first step may wait for the weights that sampled, unless its rows come again
        waits = 1 if learner.run.train.epochs == 1 else 0
        shares[waits:] = map(partial(with_old, learner, experience), shares[waits:])
    if (part := learner.algorithm.entropy_share) is not None:
        shares = with_uncertain(learner, experience, shares, part)
    equal = averages_in_use(learner)
    norms: list[float] = []
    for number, share in enumerate(shares * learner.run.train.epochs):
        try:
            before = None if number else equal
            add_gradients(learner, experience, share, before, tally, seen)
        except CallTooLarge as error:
            error.repeatable = not norms  # a step has changed the weights that sampled
            raise
        norms.append(optimizer_step(learner, progress, tally))
    finite = [*filter(math.isfinite, norms)]
    scale = {"loss_scale": learner.scaler.get_scale()} if learner.scaler.is_enabled() else {}
    decoded = 0 if experience.reward_path is None else experience.reward_path.decoded[0]
    if total := sum(learner.parallel.every(decoded)):
        scale["count/decoded_graded"] = float(total)
    metrics = {
        **tally.means(),
        **scale,
        "count/training": meter.total(learner.parallel.every, "graded"),
        "count/frozen": meter.total(learner.parallel.every, "frozen"),
        "grad_norm": sum(finite) / len(finite) if finite else math.nan,
        "skipped": float(len(norms) - len(finite)),
    }
    return Updated(metrics, len(norms), seen)


def averages_in_use(learner: Learner) -> frozenset[str]:
    """Averages used by the loss or for sampling, while they equal the trained weights on all
    processes."""
    read = {*learner.algorithm.loss.roles, learner.algorithm.behaviour}
    if read.isdisjoint(map(attrgetter("name"), learner.policies.averages)):
        return frozenset()
    every = learner.parallel.every(learner.policies.equal_to_current(read))
    return frozenset(set.intersection(*every))


def add_gradients(
    learner: Learner,
    experience: Experience,
    share: Chunks,
    equal: frozenset[str] | None,
    tally: Tally,
    seen: IterationValues | None,
) -> None:
    """Add the gradients of one optimizer step's chunks, and their metrics to `tally` and `seen`.
    `equal`: see `chunk_loss`; None after the iteration's first step."""
    counts = denominators(learner, share)
    with learner.parallel.together(), bounded_call("training"):
        for chunk in share:
            rows = chunk.rows()
            entries, mask = chunk_loss(learner, experience, rows, equal)
            loss = reduced(entries, mask, counts)
            loss = loss if learner.loss_weight == 1 else learner.loss_weight * loss
            learner.parallel.backward(learner.scaler.scale(loss))
            tally.add("loss", entries.value, mask)
            for name, values in entries.metrics.items():
                tally.add(name, values, mask)
            if seen is not None:
                seen.add(rows, entries.metrics)


@torch.no_grad()
def with_old(learner: Learner, experience: Experience, chunks: Chunks) -> Chunks:
    """Evaluate the sampling policy, or the proximal one, for rows without its evaluation."""
    if "old" not in learner.algorithm.loss.roles:
        return chunks
    likelihood = learner.algorithm.likelihood
    with learner.policies.using(learner.old):
        return [
            chunk
            if chunk.has_old
            else replace(chunk, old=evaluated_old(likelihood, experience, chunk.rows()))
            for chunk in chunks
        ]


def evaluated_old(likelihood: Likelihood, experience: Experience, rows: Rows) -> Evaluation:
    return with_replayed(likelihood.evaluate(experience.policy, rows), rows)


@torch.no_grad()
def with_uncertain(
    learner: Learner, experience: Experience, shares: list[Chunks], part: float
) -> list[Chunks]:
    """Mark the most uncertain tokens of the iteration under the policy that sampled; if the loss
    trains only on a share of them. They are chosen once, so that the choice depends neither on
    chunks nor on processes."""
    chunks = [chunk for share in shares for chunk in share]
    using = learner.policies.using(learner.sampler)
    with learner.parallel.together(), bounded_call("training"), using:
        values = [_entropies(learner, experience, chunk.rows()) for chunk in chunks]
    own = [column.cpu()[on_host(c.mask)] for c, column in zip(chunks, values, strict=True)]
    every = torch.cat(learner.parallel.every(torch.cat([torch.empty(0), *own])))
    if len(every) == 0:
        return shares
    bound = share_bound(every, part)
    pairs = zip(chunks, values, strict=True)
    marked = iter([replace(chunk, uncertain=column >= bound) for chunk, column in pairs])
    return [[next(marked) for _ in share] for share in shares]


def _entropies(learner: Learner, experience: Experience, rows: Rows) -> Tensor:
    """Entropies from `old` if it was recomputed, and from a new evaluation if it was stored."""
    if rows.old is not None and rows.old.out is not None:
        return rows.old.out
    return entropies(learner.algorithm.likelihood.evaluate(experience.policy, rows))


def chunk_loss(
    learner: Learner, experience: Experience, chunk: Rows, equal: frozenset[str] | None = None
) -> tuple[Entries, Tensor]:
    """Loss of a chunk: evaluate every policy that the loss reads, the trained one last.

    equal: the policies whose weights still equal the trained ones; None once an optimizer step was
    taken since sampling. They are not evaluated, but share the trained policy's evaluation
    """
    algorithm, policies = learner.algorithm, learner.policies
    likelihood, loss = algorithm.likelihood, algorithm.loss
    if experience.reward_path is not None:
        velocity: Any = experience.policy  # `Algorithm` refuses gradient methods of texts
        entries = path_entries(learner, velocity, experience.reward_path, chunk)
        return entries, chunk.mask
    evaluations: dict[str, Evaluation] = {}
    same = {"current", *(equal or ())}
    shared = loss.roles & same
    for role in sorted(loss.roles - {"old", TEACHER} - shared):
        with torch.no_grad(), policies.using(policies.at_sampling(role)):
            evaluations[role] = likelihood.evaluate(experience.policy, chunk)
    if TEACHER in loss.roles:
        evaluations[TEACHER] = judged_by_teachers(
            learner, experience.policy, chunk, experience.tasks
        )
    old = learner.old  # an average under its own name, where its weights are those at sampling
    fresh = (old in same or algorithm.behaviour in (equal or ())) and chunk.old is None
    if "old" in loss.roles and not fresh:
        with torch.no_grad(), policies.using(old):
            evaluations["old"] = chunk.old or evaluated_old(likelihood, experience, chunk)
    new = evaluations["new"] = likelihood.evaluate(experience.policy, chunk)
    if fresh:  # before the first step the policy is the one that sampled: no second evaluation
        shared |= {"old"}
    for role in sorted(shared & loss.roles):
        out = None if new.out is None else new.out.detach()
        evaluations[role] = Evaluation(new.logp.detach(), out)
    if fresh and "old" in evaluations:
        evaluations["old"] = with_replayed(evaluations["old"], chunk)
    entries = loss(likelihood, evaluations, chunk)
    if "old" in evaluations:
        here = equal is not None and learner.sampler == "current"
        stored = here and not learner.run.budget.replay
        own = mismatch_metric(chunk, evaluations, stored)
        entries = entries._replace(metrics={**own, **entries.metrics})
    return entries, chunk.mask


def mismatch_metric(
    chunk: Rows, evaluations: Mapping[str, Evaluation], stored: bool
) -> dict[str, Metric]:
    """`mismatch`: |log p_trainer - log p_sampler| of each entry, in nats, under the sampling
    weights.

    stored: compare the log-probabilities in the rows' `old` with those of the trained weights,
    which are still the sampling weights
    """
    if (sampled := sampled_elsewhere(chunk)) is not None:
        pair = evaluations["old"].logp, sampled
    elif stored and chunk.old is not None:
        pair = evaluations["new"].logp.detach(), chunk.old.logp
    else:
        return {}
    return {"mismatch": Derived(_distance, pair)}


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().nan_to_num(0.0)


def denominators(learner: Learner, share: Chunks) -> Counts:
    """Denominators of all sums, over the whole optimizer step and all processes."""
    own = Counts.of([*map(attrgetter("mask"), share)])
    return Counts(*torch.tensor(learner.parallel.every(tuple(own))).sum(0).tolist())


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
    there = clip(parameters.values(), learner.run.train.max_grad_norm)
    norm, *fine = tally.settle(there, *late.spreads)
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
