"""Sample, score, credit: one iteration's experience. No gradients here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from flowrl.budget.groups import Groups, samples_of
from flowrl.budget.spending import DrawRequest
from flowrl.credit.advantages import Context
from flowrl.errors import UserError
from flowrl.likelihoods.rows import Rows, stacked, take
from flowrl.models.policy import RolloutLike
from flowrl.run.round import Round, sample_round, timed
from flowrl.run.session import Session
from rewards import Samples, Scores
from rewards.reports import reports


@dataclass(frozen=True)
class Experience:
    rows: tuple[Rows, ...]  # one for each (rollout, trained step) or matching draw
    draws: tuple[int, ...]  # ids; a row's `prompt` is a place in them
    policy: Any  # what a likelihood evaluates: the weights in force when called, for training
    metrics: dict[str, float]  # over all processes
    samples: Samples  # this process's, to look at
    scores: Scores
    asked: int = 0  # evaluations without gradients that credit asked this process for


def collect(session: Session, iteration: int) -> Experience:
    s, spending, seconds = session.run, session.spending, dict[str, float]()
    weights = session.tracker.weights(len(session.prompts))
    call = DrawRequest(session.prompts, s.prompts.per_iteration, s.train.seed, iteration, weights)
    rounds: list[Round] = []
    while (draws := spending.draws(call, [r.found for r in rounds])) is not None:
        rounds.append(sample_round(session, iteration, draws, seconds))
    kept = spending.kept(call, [r.found for r in rounds])
    rows: list[list[Rows]] = [[] for _ in rounds]
    parts: list[dict[str, float]] = []
    for index in range(len(rounds[0].parts)):
        owns, metrics = credit(session, rounds, index, kept)
        for mine, r, own in zip(rows, rounds, owns, strict=True):
            if r.counts:
                mine += session.algorithm.likelihood.rows(r.parts[index].rollout, *own)
        parts.append(metrics)
    learned, ids, policy = assembled(session, rounds, rows, kept, seconds)
    metrics = _mean(parts) | spending.metrics() | _said(session, rounds)
    metrics |= {f"seconds/{phase}": taken for phase, taken in seconds.items()}
    first, asked = rounds[0].parts[0], sum(r.asked for r in rounds)
    return Experience(learned, ids, policy, metrics, first.samples, first.scores, asked)


def _said(session: Session, rounds: Sequence[Round]) -> dict[str, float]:
    """What the first round's samples look like, what rewards report, and what all rounds cost."""
    every = session.parallel.every
    metrics = _mean(every(rounds[0].said)) | _mean(every(reports(session.rewards)))
    metrics["count/sampling"] = sum(r.batch.meter.total(every) for r in rounds)
    own = sum(len(p.rollout.prompt) for r in rounds for p in r.parts)
    own += sum(r.looked for r in rounds)
    metrics["count/scored"] = float(sum(every(own)))
    return metrics


def assembled(
    session: Session,
    rounds: Sequence[Round],
    rows: Sequence[Sequence[Rows]],
    kept: Tensor,
    seconds: dict[str, float],
) -> tuple[tuple[Rows, ...], tuple[int, ...], Any]:
    """The rows of all rounds as one, the draws that their `prompt` is a place in, and the policy
    that knows those draws."""
    first, unit = rounds[0], session.algorithm.loss.unit
    learned, ids, policy = rows[0], first.ids, first.batch.policy
    if len(rounds) > 1:
        here = [
            part[list(r.mine)] & r.counts
            for part, r in zip(kept.split([len(r.draws.ids) for r in rounds]), rounds, strict=True)
        ]
        flags = torch.cat(here).tolist()
        ids = tuple(compress((draw for r in rounds for draw in r.ids), flags))
        prompts = tuple(compress((row for r in rounds for row in r.prompts), flags))
        with session.parallel.together(), timed(seconds, "encode"):
            taken = session.prompts.take(prompts or first.prompts)
            policy = session.policy.open(*taken, session.algorithm.steps).policy
        place = torch.cat(here).cumsum(0) - 1  # of each kept draw of this process
        places = place.masked_fill(~torch.cat(here), -1).split([len(mine) for mine in here])
        pairs = [(mine, at) for mine, at in zip(rows, places, strict=True) if mine]
        moved = [[_moved(each, at) for each in mine] for mine, at in pairs]
        learned = [stacked(same) for same in zip(*moved, strict=True)]
    return tuple(session.spending.rows(each, unit) for each in learned), ids, policy


def _moved(rows: Rows, place: Tensor) -> Rows:
    """Rows of draws that are kept (`place` is not -1), which are now found elsewhere."""
    at = place.to(rows.prompt.device)[rows.prompt]
    left = take(rows, (at >= 0).nonzero()[:, 0])
    return replace(left, prompt=at[at >= 0])


def credit(
    session: Session, rounds: Sequence[Round], index: int, kept: Tensor
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, float]]:
    """Advantages and mask [n k] of this process's samples of each round, under one of the plans.

    Scores are few numbers: all processes see all of them, compute all credit and keep their share.
    """
    parts = [r.parts[index] for r in rounds]
    columns, device = parts[0].rollout.columns, parts[0].rollout.prompt.device
    everyone, taught = (
        _joined([getattr(p, name) for p in parts]) for name in ("everyone", "taught")
    )
    context = context_of(session, rounds, index)
    credited = session.algorithm.advantage.credited(everyone, context)
    handle_failures(session, everyone, credited.view(-1, columns.group).any(1))
    draws = kept.nonzero()[:, 0]
    groups = Groups(_merged(rounds, kept), columns.group)
    samples = samples_of(draws, columns.group)
    context = session.tracker.before(groups.context(context, draws))
    found = session.algorithm.advantage(groups.scores(_some(taught, samples)), context)
    session.tracker.after(groups.scores(_some(everyone, samples)), context)
    whole = [torch.zeros(len(everyone.values), part.shape[1]).to(part) for part in found]
    owns, start = [], 0
    for part, column in zip(whole, found, strict=True):
        part[samples] = column[groups.place]
    for r in rounds:
        own = slice(*((start + end) * columns.group for end in (r.mine.start, r.mine.stop)))
        owns.append((whole[0][own].to(device), whole[1][own].to(device)))
        start += len(r.draws.ids)
    weights = session.weights(parts[0].rollout.iteration)
    return owns, _score_metrics(everyone, weights, columns.group) | _kl(context, found[1])


def _merged(rounds: Sequence[Round], kept: Tensor) -> tuple[int, ...]:
    """Draws of each group that is kept; a group is kept or not as a whole."""
    counts = [n for r in rounds for n in r.draws.merged]
    whole = kept.split(counts)
    return tuple(n for n, part in zip(counts, whole, strict=True) if bool(part[0]))


def _some(scores: Scores, samples: Tensor) -> Scores:
    return Scores(scores.values[samples], scores.scored[samples], scores.names)


def _joined(parts: Sequence[Scores]) -> Scores:
    values, scored = torch.cat([p.values for p in parts]), torch.cat([p.scored for p in parts])
    return Scores(values, scored, parts[0].names)


def context_of(session: Session, rounds: Sequence[Round], index: int) -> Context:
    """What credit reads beside the scores, of all draws of all rounds and processes."""

    def gathered(read: Callable[[Any], Tensor]) -> Tensor:
        each = []
        for r in rounds:
            gather = session.parallel.gatherer(len(r.draws.ids))
            each.append(gather(read(r.parts[index])))
        return torch.cat(each)

    rollout: RolloutLike = rounds[0].parts[index].rollout
    reads_reference = session.algorithm.reads_reference
    logp: dict[int, Tensor] = {}
    if session.algorithm.advantage.fusion == "path":  # credit weighs nodes by their densities
        for i, edge in enumerate(rollout.edges):
            logp[edge.step] = gathered(lambda each, i=i: each.rollout.edges[i].logp)
    return Context(
        rollout.columns,
        session.weights(rollout.iteration),
        logp,
        lengths=gathered(lambda each: each.rollout.lengths),
        prompts=torch.tensor([row for r in rounds for row in r.draws.rows]),
        nodes=None if rollout.nodes is None else gathered(lambda each: each.rollout.nodes),
        exists=None if rollout.exists is None else gathered(lambda each: each.rollout.exists),
        states=None if rollout.states is None else gathered(lambda each: each.rollout.states),
        divergence=gathered(lambda each: each.log_ratios) if reads_reference else None,
        points=gathered(lambda each: each.rollout.point) if reads_reference else None,
    )


def handle_failures(session: Session, scores: Scores, credited: Tensor) -> None:
    """`credited` [draws]: does any sample of the group have credit?"""
    lost = ~credited
    if lost.any() and session.run.train.on_failure == "raise":
        found = scores.scored.any(0).tolist()
        silent = [name for name, some in zip(scores.names, found, strict=True) if not some]
        who = f" (reward {', '.join(silent)} scored nothing)" if silent else ""
        raise UserError(
            f"{int(lost.sum())} of {len(lost)} groups have no score{who}; mend the reward, "
            "or set train.on_failure: skip_group to go on without them"
        )
    if lost.all():
        raise UserError("no group of this iteration has a score; mend the reward")


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
    }
    for i, name in enumerate(scores.names):
        column = scores.values[:, i][scores.scored[:, i]]
        metrics[f"reward/{name}"] = float(column.mean()) if len(column) else float("nan")
        metrics[f"reward_std/{name}"] = float(column.std(correction=0))
    return metrics


def _kl(context: Context, mask: Tensor) -> dict[str, float]:
    """Of the samples in the loss, where a KL is taken off their reward: nats a sample."""
    if context.divergence is None:
        return {}
    kept = mask.any(1)
    return {"kl_sample": float(context.divergence[kept].nansum() / kept.sum().clamp(min=1))}


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Over the rows that have it: a process may have nothing to say of a thing."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}
