"""Self-check before the first update: the trainer must reproduce the sampler's densities."""

from dataclasses import replace

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


@torch.no_grad()
def noise_floor(learner: Learner, made: TrainingRows) -> float | None:
    """Largest |log-ratio| between recomputed and stored densities in the first step.

    None if rows have no stored densities: matching losses evaluate old and new together.
    """
    largest = None
    likelihood = learner.algorithm.likelihood
    for chunk in share_of(learner, made, 0, 0):
        rows = chunk.rows()
        if rows.old is None:  # in a mix, given samples have none
            continue
        with learner.policies.using(learner.sampler):
            again = likelihood.evaluate(made.policy, rows)
        difference = float(likelihood.log_ratio(again, rows.old, rows).abs().max())
        largest = max(difference, largest or 0.0)
    return largest


def uncompiled_above(learner: Learner, made: TrainingRows, terminal: Terminal) -> TrainingRows:
    """Switch off compilation (`model.compile: auto`) if the noise floor is above the clip range.

    The rows of this iteration, which were sampled with compiled blocks, then lose their stored
    densities: the update recomputes them.
    """
    roots = learner.policy.roots().values()
    if learner.run.model.compile != "auto" or not savings.are_compiled(roots):
        return made
    own = noise_floor(learner, made)
    floor = max((each for each in learner.parallel.every(own) if each is not None), default=0.0)
    loss = learner.algorithm.loss
    most = min(loss.clip) if isinstance(loss, ClipsRatio) else UNCLIPPED
    most *= FAR_ABOVE_CLIP if learner.run.recomputes_old else 1
    if floor <= most:
        return made
    savings.uncompile(roots)
    terminal.say(
        f"model.compile: auto: off, since compiled blocks change log-densities by {floor:.1e}, "
        "which "
        f"is above {most:g}; this iteration's old log-densities are recomputed"
    )
    return replace(made, rows=tuple(without_old(rows) for rows in made.rows))


def check_ratio(learner: Learner, made: TrainingRows, terminal: Terminal) -> float | None:
    """Print the noise floor and the clip range. Warns above that range; UserError far above it."""
    floor = noise_floor(learner, made)
    if floor is None:
        terminal.say("self-check: old and new are computed on the same rows, ratio 1")
        return None
    loss, recomputed = learner.algorithm.loss, learner.run.recomputes_old
    clip = loss.clip if isinstance(loss, ClipsRatio) else None
    beside = "" if clip is None else f" (clip range {clip[0]:g} below, {clip[1]:g} above 1)"
    then = (
        ("; the update uses the recomputed densities, so the first ratio is 1")
        if recomputed
        else ""
    )
    if lag := learner.run.workers.lag:
        then += f"; later samples come from weights that are {lag} iterations older (workers.lag)"
    terminal.say(
        f"self-check: stored log-densities recomputed, largest difference {floor:.1e}{beside}{then}"
    )
    if recomputed:
        return floor
    advice = (
        "set train.recompute_old: true (old log-densities at the training batch's shape), a "
        "model.dtype with higher precision, or a wider clip"
    )
    if clip is None:
        if floor > UNCLIPPED and "old" in loss.roles:
            terminal.warn(
                f"the noise floor {floor:.1e} scales ratios that are not clipped; {advice}"
            )
        return floor
    if floor > FAR_ABOVE_CLIP * min(clip):
        raise UserError(
            f"the noise floor of log-densities, {floor:.1e}, is far above the clip range "
            f"{min(clip):g}, so ratios would be noise; {advice}"
        )
    if floor > min(clip):
        terminal.warn(
            f"the noise floor {floor:.1e} is above the clip range {min(clip):g}; {advice}"
        )
    return floor


def checked_ratio(learner: Learner, made: TrainingRows, terminal: Terminal) -> TrainingRows:
    """Check the first rows' ratios; compilation that changes them too much is switched off."""
    made = uncompiled_above(learner, made, terminal)
    check_ratio(learner, made, terminal)
    return made
