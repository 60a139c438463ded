"""Self-check before the first update: the trainer must reproduce the sampler's densities."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from flowrl.errors import UserError
from flowrl.iteration.minibatches import share_of
from flowrl.iteration.records import TrainingRows
from flowrl.likelihoods.rows import without_old
from flowrl.losses.base import ClipsRatio
from flowrl.models import savings
from flowrl.session.learner import Learner
from flowrl.session.record import Terminal

FAR_ABOVE_CLIP = 10.0  # a noise floor of this many clip ranges would train on noise alone
UNCLIPPED = 0.01  # noise of log-ratios that a loss without a clip range takes without a warning
REPEATED = 0.1  # share of the floor that two evaluations of the same rows never reach by rounding
MOST_ROUNDING = 0.03  # log-densities of float32 differ by less through the shape of a batch
RECOMPUTE = "train.recompute_old: true (old log-densities at the training batch's shape)"


@torch.no_grad()
def noise_floor(learner: Learner, training: TrainingRows) -> float | None:
    """Largest |log-ratio| between recomputed and stored densities in the first step.

    None if rows have no stored densities: matching losses evaluate old and new together. The
    processes share calls, and what they find is gathered after it.
    """
    largest = None
    likelihood = learner.algorithm.likelihood
    with learner.parallel.together():
        for chunk in share_of(learner, training, 0, 0):
            rows = chunk.rows()
            if rows.old is None:  # in a mix, given samples have none
                continue
            with learner.policies.using(learner.sampler):
                again = likelihood.evaluate(training.policy, rows)
            difference = float(likelihood.log_ratio(again, rows.old, rows).abs().max())
            largest = max(difference, largest or 0.0)
    return largest


def uncompiled_above(learner: Learner, training: TrainingRows, terminal: Terminal) -> TrainingRows:
    """Switch off compilation (`model.compile: auto`) if the noise floor is above the clip range.

    The rows of this iteration, which were sampled with compiled blocks, then lose their stored
    densities: the update recomputes them.
    """
    roots = learner.policy.roots().values()
    if learner.run.model.compiles != "auto" or not savings.are_compiled(roots):
        return training
    local_floor = noise_floor(learner, training)
    floor = max(
        (value for value in learner.parallel.every(local_floor) if value is not None), default=0.0
    )
    loss = learner.algorithm.loss
    most = min(loss.clip) if isinstance(loss, ClipsRatio) else UNCLIPPED
    most *= FAR_ABOVE_CLIP if learner.run.recomputes_old else 1
    if floor <= most:
        return training
    savings.uncompile(roots)
    terminal.say(
        f"model.compile: auto: off, since compiled blocks change log-densities by {floor:.1e}, "
        "which "
        f"is above {most:g}; this iteration's old log-densities are recomputed"
    )
    return replace(training, rows=tuple(without_old(rows) for rows in training.rows))


class Cause(NamedTuple):
    """Why stored and recomputed log-densities differ, and what helps.

    rounding  whether the same function was evaluated: densities that are recomputed for the update
              are then those of the policy that sampled
    """

    finding: str
    advice: str
    rounding: bool = True


def coarse(learner: Learner) -> bool:
    """Whether the model's arithmetic rounds so much that a floor of any size may be rounding."""
    model = learner.run.model
    return model.dtype in ("bfloat16", "float16") or bool(model.tf32)


@torch.no_grad()
def cause_of_floor(learner: Learner, training: TrainingRows, floor: float) -> Cause:
    """The cause of a noise floor. Evaluates the first rows twice more, which happens only where a
    floor is too large. Collective."""
    model = learner.run.model
    if repeated_floor(learner, training) > REPEATED * floor:
        return Cause(
            "two evaluations of the same rows differ as much, so the model's forward is random "
            "(dropout, or noise of its own)",
            "switch its randomness off in evaluation mode, where flowrl calls it",
            rounding=False,
        )
    if savings.are_compiled(learner.policy.roots().values()):
        return Cause(
            "compiled blocks round otherwise at another shape",
            f"set model.compile: false, or {RECOMPUTE}",
        )
    if coarse(learner):
        kind = "TF32" if model.tf32 else model.dtype
        return Cause(
            f"{kind} rounds otherwise at the training batch's shape",
            f"set {RECOMPUTE}, or a model.dtype with higher precision",
        )
    if floor <= MOST_ROUNDING:
        return Cause(
            "arithmetic rounds otherwise at the training batch's shape",
            f"set {RECOMPUTE}, or a wider clip",
        )
    return Cause(
        f"rounding of {model.dtype} is below {MOST_ROUNDING:g}, so the update evaluates something "
        "else than sampling did",
        "run `flowrl prove` on this file, and take out settings that act on one of the two alone "
        "(model.call, model.adapters, your own kernel or solver)",
        rounding=False,
    )


def repeated_floor(learner: Learner, training: TrainingRows) -> float:
    """Largest |log-ratio| between two evaluations of the first step's rows, over all processes."""
    likelihood, largest = learner.algorithm.likelihood, 0.0
    with learner.parallel.together():
        for chunk in share_of(learner, training, 0, 0):
            rows = chunk.rows()
            if rows.old is None:
                continue
            with learner.policies.using(learner.sampler):
                first, second = (likelihood.evaluate(training.policy, rows) for _ in range(2))
            largest = max(largest, float(likelihood.log_ratio(first, second, rows).abs().max()))
    return max(learner.parallel.every(largest))


def check_ratio(learner: Learner, training: TrainingRows, terminal: Terminal) -> float | None:
    """Print the noise floor and the clip range. Warns above that range; UserError far above it, and
    for densities that differ by more than rounding, whatever the update does with them."""
    # a process may have no rows in the first step, and waits for the others all the same
    floors = [f for f in learner.parallel.every(noise_floor(learner, training)) if f is not None]
    if not floors:
        terminal.say("self-check: old and new are computed on the same rows, ratio 1")
        return None
    floor = max(floors)
    loss, recomputed = learner.algorithm.loss, learner.run.recomputes_old
    clip = loss.clip if isinstance(loss, ClipsRatio) else None
    beside = "" if clip is None else f" (clip range {clip[0]:g} below, {clip[1]:g} above 1)"
    remark = (
        ("; the update uses the recomputed densities, so the first ratio is 1")
        if recomputed
        else ""
    )
    if lag := learner.run.workers.lag:
        remark += f"; later samples come from weights that are {lag} iterations older (workers.lag)"
    terminal.say(
        f"self-check: stored log-densities recomputed, largest difference {floor:.1e}"
        f"{beside}{remark}"
    )
    bound = UNCLIPPED if clip is None else min(clip)
    matters = clip is not None or "old" in loss.roles
    if recomputed:  # rounding is repaired; densities of something else are not
        bound = max(bound, math.inf if coarse(learner) else MOST_ROUNDING)
    if not matters or floor <= bound:
        return floor
    cause = cause_of_floor(learner, training, floor)
    if recomputed and cause.rounding:
        return floor
    if recomputed:
        raise UserError(
            f"stored and recomputed log-densities differ by {floor:.1e}, which "
            f"train.recompute_old cannot repair: {cause.finding}; {cause.advice}"
        )
    if clip is None:
        terminal.warn(
            f"the noise floor {floor:.1e} scales ratios that are not clipped: {cause.finding}; "
            f"{cause.advice}"
        )
    elif floor > FAR_ABOVE_CLIP * bound:
        raise UserError(
            f"the noise floor of log-densities, {floor:.1e}, is far above the clip range "
            f"{bound:g}, so ratios would be noise: {cause.finding}; {cause.advice}"
        )
    else:
        terminal.warn(
            f"the noise floor {floor:.1e} is above {bound:g}: {cause.finding}; {cause.advice}"
        )
    return floor


def checked_ratio(learner: Learner, training: TrainingRows, terminal: Terminal) -> TrainingRows:
    """Check the first rows' ratios; compilation that changes them too much is switched off."""
    training = uncompiled_above(learner, training, terminal)
    check_ratio(learner, training, terminal)
    return training
