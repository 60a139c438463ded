"""Sample, score and assign credit: one iteration's experience. No gradients here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from flowrl.budget.groups import Groups, samples_of
from flowrl.credit.values import Context, ReferenceRatios, SampleTurns
from flowrl.errors import UserError
from flowrl.likelihoods.rows import Rows
from flowrl.media.statistics import merged_means
from flowrl.run.experience.intermediate_scores import intermediate_metrics
from flowrl.run.experience.reference_kl import turns_of
from flowrl.run.experience.reward_gradient import RewardPath
from flowrl.run.experience.round import PlanSamples
from flowrl.run.experience.rounds import ModelCall, Rounds
from flowrl.run.experience.turn_scores import turn_metrics
from flowrl.run.state.session import Session
from flowrl.run.state.units import LAG, StoredSamples
from rewards import Samples, Scores
from rewards.types import reports
from samplers import Rollout
from samplers.mixed import MixedRollout, scales_by_step


@dataclass(frozen=True)
class FirstSamples:
    """This process's samples from an iteration's first plan, for display.

    credit  their advantages and mask [n k]
    plans   of the iteration
    """

    part: PlanSamples
    credit: tuple[Tensor, Tensor]
    plans: int


@dataclass(frozen=True)
class Experience:
    rows: tuple[Rows, ...]  # one for each (rollout, trained step) or matching draw
    draws: tuple[int, ...]  # ids; a row's `prompt` is a place in them
    policy: ModelCall  # with the current weights, for training
    metrics: dict[str, float]  # over all processes
    samples: Samples | StoredSamples  # this process's, for logs and pages
    scores: Scores
    reference_evaluations: int = 0  # without gradients, that credit needed on this process
    first: FirstSamples | None = None  # None where a replay replaces some, or all are given
    reward_path: RewardPath | None = None  # of gradient methods
    tasks: tuple[str, ...] = ()  # of the draws, where each task has a teacher
    before: "Experience | None" = None  # of the model that wrote the prompts

    @property
    def chain(self) -> "tuple[Experience, ...]":
        """One experience for each model of `Learner.chain`."""
        return (*(() if self.before is None else self.before.chain), self)


@dataclass(frozen=True)
class PlanCredit:
    # per round: advantages and mask [n k] of this process's samples, on the CPU
    owns: list[tuple[Tensor, ...]]
    metrics: dict[str, float]


def collect(session: Session, iteration: int) -> Experience:
    """Sample and score an iteration, and turn the scores into rows with advantages."""
    rounds = Rounds.sample(session, iteration)
    first = rounds.first
    plans = [credit(session, rounds, plan) for plan in range(len(first.parts))]
    learned = rounds.merged([each.owns for each in plans])
    metrics = _mean([each.metrics for each in plans])
    if session.spending is not None:
        metrics |= session.spending.metrics()
    metrics |= _descriptions(session, rounds)
    if session.source is not None:
        metrics |= _summed(session.parallel.every(session.source.metrics()))
    for phase, taken in rounds.seconds.items():
        metrics[f"seconds/{phase}"] = taken
    part = first.parts[0]
    evaluations = sum(map(attrgetter("reference_evaluations"), rounds.each))
    shown = None
    if not session.run.budget.replay:
        advantages, mask = plans[0].owns[0]
        shown = FirstSamples(part, (advantages, mask), len(first.parts))
    path, tasks, teachers = None, (), session.run.teachers
    if session.algorithm.reward_gradient:
        path = RewardPath.of(session, first.batch, first.prompts, iteration)
    if teachers is not None:
        tasks = teachers.tasks(session.prompts, learned.prompts)
    learned_from = (learned.rows, learned.draws, learned.policy, metrics)
    of_samples = (part.samples, part.scores, evaluations, shown)
    made = Experience(*learned_from, *of_samples, path, tasks)
    return made if rounds.rewritings is None else _with_rewriter(session, rounds, plans, made)


def _with_rewriter(
    session: Session, images: Rounds, plans: Sequence[PlanCredit], made: Experience
) -> Experience:
    """Add the language model's experience: rewritings with the scores of their images."""
    written, joint = images.rewritings, session.run.joint
    assert written is not None and joint is not None
    own = written.session
    round_ = written.scored(images.first, images.seconds)
    rounds = Rounds.of(own, round_, images.seconds)
    credited = credit(own, rounds, 0)
    if joint.credit == "shared":
        credited = replace(credited, owns=_shared(images, rounds, plans))
    learned = rounds.merged([credited.owns])
    described = _descriptions(own, rounds) | credited.metrics
    shown = {"flat_groups", "reward_std", "count/sampling"} | (
        described.keys() - made.metrics.keys()
    )
    metrics = {own.learner.named(k): v for k, v in described.items() if k in shown}
    advantages, mask = credited.owns[0]
    part = round_.parts[0]
    before = Experience(
        *(learned.rows, learned.draws, learned.policy, described),
        *(part.samples, part.scores, round_.reference_evaluations),
        FirstSamples(part, (advantages, mask), 1),
    )
    return replace(made, before=before, metrics=made.metrics | metrics)


def _shared(
    images: Rounds, rounds: Rounds, plans: Sequence[PlanCredit]
) -> list[tuple[Tensor, ...]]:
    """The mean advantage of each rewriting's images, at all of the rewriting's decision points."""
    written, sums = images.rewritings, list[Tensor]()
    assert written is not None
    for plan in plans:
        advantages, mask = plan.owns[0]
        count = mask.sum(1)
        mean = (advantages * mask).sum(1) / count.clamp(min=1)
        sums.append(images.gathered([torch.stack([mean, (count > 0).double()], 1)]))
    draws = len(written.order)
    both = torch.cat([each.view(draws, -1, 2) for each in sums], 1).flatten(0, 1)
    value, known = written.means(both[:, :1], both[:, 1:].bool())
    points = len(written.rollout.columns.nodes)
    whole = tuple(column.expand(-1, points).contiguous() for column in (value, known))
    return rounds.local(whole, written.group)


def _descriptions(session: Session, rounds: Rounds) -> dict[str, float]:
    """Statistics of the first round's samples, reports of rewards, and counts of all rounds."""
    every = session.parallel.every
    statistics = rounds.first.found.statistics
    own_means = (statistics.means, statistics.size) if rounds.first.counts else None
    metrics = merged_means([*filter(None, every(own_means))])
    reported = reports(session.reporting) | dict(rounds.first.found.reports)
    if session.algorithm.guides:
        reported |= _guided(rounds)
    metrics |= _mean(every(reported))
    evaluations = map(attrgetter("found.evaluations"), rounds.each)
    metrics["count/sampling"] = float(sum(map(sum, map(every, evaluations))))
    if session.algorithm.samples_start:
        metrics["count/start"] = float(rounds.start_samples)
    own = scored_samples(rounds.each)
    metrics["count/scored"] = float(sum(every(own)))
    return metrics


def scored_samples(rounds: Sequence[Any]) -> int:
    """Number of samples and predicted clean images that this process scored. Rounds without its own
    draws, in which it only follows the other processes, do not count."""
    scored = 0
    for each in rounds:
        if each.counts:
            scored += each.found.looked
            for part in each.parts:
                scored += len(part.rollout.prompt)
    return scored


def _summed(rows: list[dict[str, float]]) -> dict[str, float]:
    """Add up what each process counts; a lag, and how draws were chosen, are the same for all."""
    counted = [n for n in rows[0] if n.startswith(("workers/", "seconds/")) and n != LAG]
    return rows[0] | {n: sum(row[n] for row in rows) for n in counted}


def _guided(rounds: Rounds) -> dict[str, float]:
    """Measure how far this process's guided steps were shifted, if any were trained on."""
    rollouts = [part.rollout for r in rounds.each if r.counts for part in r.parts]
    edges = [e for each in rollouts for part in each.parts for e in part.edges]
    moved = [edge.moved.mean() for edge in edges if edge.moved is not None]
    return {"guide/moved": float(torch.stack(moved).mean())} if moved else {}


def credit(session: Session, rounds: Rounds, plan: int) -> PlanCredit:
    """Compute the credit of one plan.

    There are few scores, so all processes get all of them, compute all credit and keep their share.
    """
    rollout = rounds.first.parts[plan].rollout
    columns = rollout.columns
    advantage, parts = session.algorithm.advantage, rounds.parts(plan)
    everyone = Scores.joined([*map(attrgetter("everyone"), parts)])
    context = context_of(session, rounds, plan)
    summed = advantage.summed(everyone, context)
    credited = summed.mask[..., 0].any(1).view(-1, columns.group).any(1)
    handle_failures(everyone, credited, session.run.train.on_failure == "skip_group")
    metrics = _score_metrics(everyone, session.weights(rollout.iteration), columns.group)
    unmerged = rounds.rewritings is None or not rounds.merges  # a prompt has one draw
    if session.spending is None and session.tracker is None and unmerged:
        advantages, mask = advantage(everyone, context, summed)
        kept = whole = advantages.contiguous(), mask.contiguous()
    else:
        kept, whole, context = _budgeted(session, rounds, plan, everyone, context)
    if context.reference is not None:
        metrics |= _kl(context.reference, kept[1])
    if everyone.intermediate is not None and context.turns is not None:
        metrics |= turn_metrics(everyone, session.algorithm.by_turn)
    elif everyone.intermediate is not None:
        metrics |= intermediate_metrics(everyone.intermediate)
    return PlanCredit(rounds.local(whole, columns.group), metrics)


MaskedAdvantages = tuple[Tensor, Tensor]  # advantages and mask [n k]


def _budgeted(
    session: Session, rounds: Rounds, plan: int, everyone: Scores, context: Context
) -> tuple[MaskedAdvantages, MaskedAdvantages, Context]:
    """Advantages of the kept draws, padded to their groups; the same in the order of all samples;
    and their context. Used if draws are merged, dropped or replaced, or statistics are kept."""
    learned = Scores.joined([part.learned for part in rounds.parts(plan)])
    draws, group = rounds.kept.nonzero()[:, 0], context.columns.group
    groups, samples = Groups(rounds.merged_groups, group), samples_of(draws, group)
    some = itemgetter(samples)
    context = groups.context(context, draws)
    if session.tracker is not None:
        context = session.tracker.before(context)
    kept = session.algorithm.advantage(groups.scores(learned.arranged(some)), context)
    if session.tracker is not None:
        session.tracker.after(groups.scores(everyone.arranged(some)), context)
    advantages, mask = (torch.zeros(len(everyone.values), part.shape[1]).to(part) for part in kept)
    advantages[samples], mask[samples] = (column[groups.place] for column in kept)
    return kept, (advantages, mask), context


def context_of(session: Session, rounds: Rounds, plan: int) -> Context:
    """Gather the other inputs of credit from all draws of all rounds and processes."""

    gathered, parts = rounds.gathered, rounds.parts(plan)
    rollouts = [part.rollout for part in parts]
    flow = [each for each in rollouts if isinstance(each, Rollout | MixedRollout)]
    rollout = rollouts[0]
    turns = reference = None
    if rollout.exists is not None:
        exists = gathered(each.exists for each in rollouts)
        stated = rollout.states is not None  # steps of a completion have no states
        states = gathered(each.states for each in rollouts) if stated else torch.zeros(exists.shape)
        turns = SampleTurns(exists, states.long())
    if session.algorithm.reads_reference:
        reference = ReferenceRatios(
            gathered(part.log_ratios for part in parts), gathered(map(turns_of, rollouts))
        )
    logp: dict[int, Tensor] = {}
    if session.algorithm.advantage.fusion not in (
        "mean",
        "max",
    ):  # credit weighs nodes by their densities
        for i, edge in enumerate(rollout.edges):
            logp[edge.step] = gathered(each.edges[i].logp for each in rollouts)
    return Context(
        rollout.columns,
        session.weights(rollout.iteration),
        logp,
        nodes=None if rollout.nodes is None else gathered(each.nodes for each in rollouts),
        lengths=gathered([each.lengths for each in rollouts]),
        prompts=torch.tensor([row for r in rounds.each for row in r.draws.rows]),
        turns=turns,
        reference=reference,
        steps=gathered(map(scales_by_step, flow)) if session.several_sizes else None,
    )


def handle_failures(scores: Scores, credited: Tensor, skip: bool) -> None:
    """Stop if groups have no score, or drop those groups if `skip` (`train.on_failure`).

    `credited` [draws]: whether any sample of the group has an advantage.
    """
    lost = ~credited
    if lost.any() and not skip:
        scored = scores.scored.any(0).tolist()
        silent = [name for name, some in zip(scores.names, scored, strict=True) if not some]
        who = f" (reward {', '.join(silent)} scored nothing)" if silent else ""
        raise UserError(
            f"{int(lost.sum())} of {len(lost)} groups have no score{who}; fix the reward, "
            "or set train.on_failure: skip_group to skip these groups"
        )
    if lost.all():
        raise UserError("no group of this iteration has a score; fix the reward")


def _score_metrics(scores: Scores, weights: Tensor, group: int) -> dict[str, float]:
    whole = scores.scored.all(1)
    total = (scores.values @ weights.to(scores.values.dtype)).double()
    by_group = total.view(-1, group)
    known = total[whole]
    metrics = {
        "reward": float(known.mean()),
        "reward_std": float(known.std(correction=0)),
        "flat_groups": float((by_group.amax(1) - by_group.amin(1) < 1e-6).double().mean()),
        "unscored": float((~whole).sum()),
        "unscored_share": float((~whole).double().mean()),
    }
    for i, name in enumerate(scores.names):
        column = scores.values[:, i][scores.scored[:, i]]
        metrics[f"reward/{name}"] = float(column.mean()) if len(column) else float("nan")
        metrics[f"reward_std/{name}"] = float(column.std(correction=0))
    return metrics


def _kl(reference: ReferenceRatios, mask: Tensor) -> dict[str, float]:
    """Mean KL of the samples in the loss, in nats, if it is subtracted from their reward."""
    kept = mask.any(1)
    moved = reference.log_ratios[kept].nansum()
    return {"kl_sample": float(moved / kept.sum().clamp(min=1))}


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Average each metric over the processes that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: sum(column) / len(column) for name, column in values.items()}
