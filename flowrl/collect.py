"""Sample, decode, score, credit: one iteration's experience. No gradients here."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from torch import Tensor

from flowrl.advantages import Context
from flowrl.errors import UserError
from flowrl.meter import Meter
from flowrl.prompts import Draws
from flowrl.rows import Rows
from flowrl.session import Session
from flowrl.statistics import image_statistics
from rewards import Samples, Scores, score_all
from samplers import Rollout, Velocity, roll


@dataclass(frozen=True)
class Experience:
    rows: tuple[Rows, ...]  # one for each (rollout, trained step) or matching draw
    draws: tuple[int, ...]  # ids; a row's `prompt` is a place in them
    velocity: Velocity  # of the policy in force when called, for training
    metrics: dict[str, float]  # over all processes
    samples: Samples  # this process's, for pictures
    scores: Scores


def collect(session: Session, iteration: int) -> Experience:
    s, algorithm = session.run, session.algorithm
    whole = session.prompts.draw(iteration, s.prompts.per_iteration, s.train.seed)
    mine = session.mine(len(whole.ids))
    draws = Draws(whole.ids[mine.start : mine.stop], whole.rows[mine.start : mine.stop])
    texts = [session.prompts.texts[row] for row in draws.rows]
    seconds: dict[str, float] = {}
    meter = Meter()
    with timed(seconds, "encode"):
        conditioning = session.policy.encode(texts)

    def bind(guidance: float) -> Velocity:
        return session.policy.bind(conditioning, steps=algorithm.steps, guidance=guidance)

    sigmas = session.policy.schedule(algorithm.steps).sigmas
    with session.policies.using(algorithm.behaviour), timed(seconds, "sample"):
        rollouts = roll(
            algorithm.plan(sigmas, iteration, s.train.seed),
            meter(bind(s.model.guidance.sample)),
            session.policy.shape(algorithm.steps),
            draws.ids,
            seed=s.train.seed,
            iteration=iteration,
            keep_mean=algorithm.likelihood.keep_mean,
            device=session.device,
        )
    rows: list[Rows] = []
    parts: list[tuple[Samples, Scores, dict[str, float]]] = []
    for rollout in rollouts:
        with timed(seconds, "decode"):
            samples = decode(session, rollout, conditioning, draws)
        with timed(seconds, "score"):
            scores = score_all(session.rewards, samples)
        own, metrics = credit(session, rollout, scores, len(whole.ids))
        rows += algorithm.likelihood.rows(rollout, *own)
        parts.append((samples, scores, metrics))
    samples, scores, _ = parts[0]
    metrics = _mean([part[2] for part in parts])
    pictures = image_statistics(samples.media, samples.group)
    metrics |= _mean(gather_object([{f"image/{k}": v for k, v in pictures.items()}]))
    metrics |= {f"seconds/{phase}": taken for phase, taken in seconds.items()}
    metrics["count/sampling"] = meter.total()
    metrics["count/scored"] = float(len(whole.ids) * sum(r.plan.group for r in rollouts))
    training = bind(s.model.guidance.train)
    return Experience(tuple(rows), draws.ids, training, metrics, samples, scores)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add up the wall seconds of a phase."""
    began = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began


def decode(session: Session, rollout: Rollout, conditioning: object, draws: Draws) -> Samples:
    """Leaves to pictures; encodings are handed back row by row, since decoders may read them."""
    algorithm = session.algorithm
    media = session.policy.decode(
        rollout.x0,
        conditioning.take(rollout.prompt.cpu()),  # type: ignore[attr-defined]
        steps=algorithm.steps,
        guidance=session.run.model.guidance.sample,
    )
    rows = [draws.rows[i] for i in rollout.prompt.tolist()]
    return Samples(
        media,
        [session.prompts.texts[row] for row in rows],
        rollout.prompt.cpu(),
        [session.prompts.meta[row] for row in rows],
    )


def credit(
    session: Session, rollout: Rollout, scores: Scores, draws: int
) -> tuple[tuple[Tensor, Tensor], dict[str, float]]:
    """Advantages and mask [n k] of this process's samples.

    Scores are few numbers: all processes see all of them, compute all credit and keep their share.
    """
    group, columns = rollout.plan.group, rollout.columns
    everyone = Scores(
        torch.cat(gather_object([scores.values])),
        torch.cat(gather_object([scores.scored])),
        scores.names,
    )
    context = Context(columns, session.weights, edge_logp(session, rollout))
    advantage, mask = session.algorithm.advantage(everyone, context)
    handle_failures(session, everyone, mask.any(1).view(-1, group).any(1))
    mine = session.mine(draws)
    own = slice(mine.start * group, mine.stop * group)
    device = rollout.x0.device
    return (advantage[own].to(device), mask[own].to(device)), _score_metrics(
        everyone, session.weights, group
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
    return metrics


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
