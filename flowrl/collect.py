"""Sample, decode, score, credit: one iteration's experience. No gradients here."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from flowrl.advantages import Context
from flowrl.errors import UserError
from flowrl.models.policy import Rollout
from flowrl.prompts import Draws
from flowrl.rows import Rows
from flowrl.samples import decode
from flowrl.session import Session
from rewards import Samples, Scores, score_all
from rewards.reports import reports


@dataclass(frozen=True)
class Experience:
    rows: tuple[Rows, ...]  # one for each (rollout, trained step) or matching draw
    draws: tuple[int, ...]  # ids; a row's `prompt` is a place in them
    policy: Any  # what a likelihood evaluates: the weights in force when called, for training
    metrics: dict[str, float]  # over all processes
    samples: Samples  # this process's, to look at
    scores: Scores


def collect(session: Session, iteration: int) -> Experience:
    s, algorithm = session.run, session.algorithm
    weights = session.tracker.weights(len(session.prompts))
    whole = session.prompts.draw(iteration, s.prompts.per_iteration, s.train.seed, weights)
    mine = session.mine(len(whole.ids))
    draws = Draws(whole.ids[mine.start : mine.stop], whole.rows[mine.start : mine.stop])
    seconds: dict[str, float] = {}
    with timed(seconds, "encode"):
        batch = session.policy.open(*session.prompts.take(draws.rows), algorithm.steps)
    looked = 0

    def lookahead(rollout: Rollout) -> Tensor:
        nonlocal looked
        looked += len(rollout.prompt)
        return total(session, decode(batch, rollout, session.prompts, draws.rows), iteration)

    with session.policies.using(algorithm.behaviour), timed(seconds, "sample"):
        rollouts = batch.rollouts(
            algorithm.plan,
            draws.ids,
            seed=s.train.seed,
            iteration=iteration,
            keep_mean=algorithm.likelihood.keep_mean,
            score=lookahead,
        )
    rows: list[Rows] = []
    parts: list[tuple[Samples, Scores, dict[str, float]]] = []
    for rollout in rollouts:
        with timed(seconds, "decode"):
            samples = decode(batch, rollout, session.prompts, draws.rows)
        with timed(seconds, "score"):
            scores = score_all(session.rewards, samples)
        own, metrics = credit(session, rollout, scores, whole)
        rows += algorithm.likelihood.rows(rollout, *own)
        parts.append((samples, scores, metrics))
    samples, scores, _ = parts[0]
    metrics = _mean([part[2] for part in parts])
    metrics |= _mean(gather_object([batch.statistics(rollouts[0], samples.media)]))
    metrics |= _mean(gather_object([reports(session.rewards)]))
    metrics |= {f"seconds/{phase}": taken for phase, taken in seconds.items()}
    metrics["count/sampling"] = batch.meter.total()
    drawn = sum(len(rollout.prompt) for rollout in rollouts)
    metrics["count/scored"] = float(sum(gather_object([drawn + looked])))
    return Experience(tuple(rows), draws.ids, batch.policy, metrics, samples, scores)


def total(session: Session, samples: Samples, iteration: int) -> Tensor:
    """The weighted sum of the rewards [n], NaN where one of them has no score: steers particles."""
    scores = score_all(session.rewards, samples)
    weighted = scores.values @ session.weights(iteration).to(scores.values.dtype)
    return torch.where(scores.scored.all(1), weighted, torch.nan)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add up the wall seconds of a phase."""
    began = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began


def credit(
    session: Session, rollout: Rollout, scores: Scores, draws: Draws
) -> tuple[tuple[Tensor, Tensor], dict[str, float]]:
    """Advantages and mask [n k] of this process's samples.

    Scores are few numbers: all processes see all of them, compute all credit and keep their share.
    """
    group, columns = rollout.columns.group, rollout.columns
    everyone = Scores(
        torch.cat(gather_object([scores.values])),
        torch.cat(gather_object([scores.scored])),
        scores.names,
    )
    context = Context(
        columns,
        session.weights(rollout.iteration),
        edge_logp(session, rollout),
        lengths=torch.cat(gather_object([rollout.lengths.cpu()])),
        prompts=torch.tensor(draws.rows),
    )
    context = session.tracker.before(context)
    credited = session.algorithm.advantage.credited(everyone, context)
    handle_failures(session, everyone, credited.view(-1, group).any(1))
    advantage, mask = session.algorithm.advantage(everyone, context)
    session.tracker.after(everyone, context)
    mine = session.mine(len(draws.ids))
    own = slice(mine.start * group, mine.stop * group)
    device = rollout.prompt.device
    return (advantage[own].to(device), mask[own].to(device)), _score_metrics(
        everyone, session.weights(rollout.iteration), group
    )


def edge_logp(session: Session, rollout: Rollout) -> dict[int, Tensor]:
    """Log-densities by step over all processes, where credit weighs nodes by them."""
    if session.algorithm.advantage.fusion != "path":
        return {}
    return {e.step: torch.cat(gather_object([e.logp.cpu()])) for e in rollout.edges}


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


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Over the rows that have it: a process may have nothing to say of a thing."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}
