"""Sample, score, credit: one iteration's experience. No gradients here."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.budget.groups import Groups, samples_of
from flowrl.credit.values import Context, ReferenceRatios, SampleTurns
from flowrl.errors import UserError
from flowrl.likelihoods.rows import Rows
from flowrl.run.experience.intermediate_scores import intermediate_metrics, looks_of
from flowrl.run.experience.reference_kl import turns_of
from flowrl.run.experience.reward_gradient import RewardPath
from flowrl.run.experience.round import PlanSamples
from flowrl.run.experience.rounds import ModelCall, Rounds
from flowrl.run.state.session import Session
from flowrl.run.state.teachers import tasks_of
from rewards import Samples, Scores
from rewards.types import reports
from samplers import Rollout


@dataclass(frozen=True)
class FirstSamples:
    """The samples of an iteration's first plan on this process, for what shows them.

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
    samples: Samples  # this process's, for logs and pages
    scores: Scores
    reference_evaluations: int = 0  # without gradients, that credit needed on this process
    first: FirstSamples | None = None  # None where a replay replaces some, or all are given
    reward_path: RewardPath | None = None  # of gradient methods
    tasks: tuple[str, ...] = ()  # of the draws, where each task has a teacher


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
    metrics = _mean([each.metrics for each in plans]) | session.spending.metrics()
    metrics |= _descriptions(session, rounds)
    metrics |= {f"seconds/{phase}": taken for phase, taken in rounds.seconds.items()}
    part, evaluations = first.parts[0], sum(r.reference_evaluations for r in rounds.each)
    shown = None
    if not session.run.budget.replay:
        advantages, mask = plans[0].owns[0]
        shown = FirstSamples(part, (advantages, mask), len(first.parts))
    learned_from = (learned.rows, learned.draws, learned.policy, metrics)
    return Experience(
        *learned_from,
        part.samples,
        part.scores,
        evaluations,
        shown,
        RewardPath.of(session, first.batch, first.prompts, iteration),
        tasks_of(session.run, session.prompts, learned.prompts),
    )


def _descriptions(session: Session, rounds: Rounds) -> dict[str, float]:
    """Statistics of the first round's samples, reports of rewards, and counts of all rounds."""
    every = session.parallel.every
    statistics = rounds.first.statistics.means if rounds.first.counts else {}
    metrics = _mean(every({**statistics, **_guided(rounds)})) | _mean(
        every(reports(session.rewards))
    )
    metrics["count/sampling"] = sum(r.batch.meter.total(every) for r in rounds.each)
    own = sum(len(p.rollout.prompt) for r in rounds.each for p in r.parts)
    own += sum(r.lookaheads + sum(looks_of(p.rollout) for p in r.parts) for r in rounds.each)
    metrics["count/scored"] = float(sum(every(own)))
    return metrics


def _guided(rounds: Rounds) -> dict[str, float]:
    """Measure how far guided steps of this process were moved, if any were trained on."""
    rollouts = [part.rollout for r in rounds.each if r.counts for part in r.parts]
    edges = [edge for each in rollouts if isinstance(each, Rollout) for edge in each.edges]
    moved = [edge.moved.mean() for edge in edges if edge.moved is not None]
    return {"guide/moved": float(torch.stack(moved).mean())} if moved else {}


def credit(session: Session, rounds: Rounds, plan: int) -> PlanCredit:
    """Compute the credit of one of the plans.

    Scores are few numbers: all processes see all of them, compute all credit and keep their share.
    """
    rollout = rounds.first.parts[plan].rollout
    columns = rollout.columns
    everyone = rounds.scores(lambda part: part.everyone, plan)
    learned = rounds.scores(lambda part: part.learned, plan)
    context = context_of(session, rounds, plan)
    credited = session.algorithm.advantage.credited(everyone, context)
    skip = session.run.train.on_failure == "skip_group"
    handle_failures(everyone, credited.view(-1, columns.group).any(1), skip)
    draws = rounds.kept.nonzero()[:, 0]
    groups = Groups(rounds.merged_groups, columns.group)
    samples = samples_of(draws, columns.group)
    context = session.tracker.before(groups.context(context, draws))
    kept = session.algorithm.advantage(groups.scores(_some(learned, samples)), context)
    session.tracker.after(groups.scores(_some(everyone, samples)), context)
    whole = [torch.zeros(len(everyone.values), part.shape[1]).to(part) for part in kept]
    for part, column in zip(whole, kept, strict=True):
        part[samples] = column[groups.place]
    owns = rounds.own(whole, columns.group)
    metrics = _score_metrics(everyone, session.weights(rollout.iteration), columns.group)
    return PlanCredit(owns, metrics | _kl(context, kept[1]) | intermediate_metrics(everyone))


def _some(scores: Scores, samples: Tensor) -> Scores:
    return scores.arranged(lambda column: column[samples])


def context_of(session: Session, rounds: Rounds, plan: int) -> Context:
    """Gather what credit reads beside the scores, of all draws of all rounds and processes."""

    def gathered(read: Callable[[PlanSamples], Tensor | None]) -> Tensor:
        return rounds.gathered(read, plan)

    rollout = rounds.first.parts[plan].rollout
    turns = reference = None
    if rollout.exists is not None:
        turns = SampleTurns(
            gathered(lambda each: each.rollout.exists), gathered(lambda each: each.rollout.states)
        )
    if session.algorithm.reads_reference:
        reference = ReferenceRatios(
            gathered(lambda each: each.log_ratios), gathered(lambda each: turns_of(each.rollout))
        )
    logp: dict[int, Tensor] = {}
    if session.algorithm.advantage.fusion not in (
        "mean",
        "max",
    ):  # credit weighs nodes by their densities
        for i, edge in enumerate(rollout.edges):
            logp[edge.step] = gathered(lambda each, i=i: each.rollout.edges[i].logp)
    return Context(
        rollout.columns,
        session.weights(rollout.iteration),
        logp,
        nodes=None if rollout.nodes is None else gathered(lambda each: each.rollout.nodes),
        lengths=gathered(lambda each: each.rollout.lengths),
        prompts=torch.tensor([row for r in rounds.each for row in r.draws.rows]),
        turns=turns,
        reference=reference,
    )


def handle_failures(scores: Scores, credited: Tensor, skip: bool) -> None:
    """Stop, or go on without the groups that have no score if `skip` (`train.on_failure`).

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


def _kl(context: Context, mask: Tensor) -> dict[str, float]:
    """Mean KL of the samples in the loss, in nats, where it is subtracted from their reward."""
    if context.reference is None:
        return {}
    kept = mask.any(1)
    moved = context.reference.log_ratios[kept].nansum()
    return {"kl_sample": float(moved / kept.sum().clamp(min=1))}


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Average each metric over the rows that have it: not every process has every metric."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: sum(column) / len(column) for name, column in values.items()}
