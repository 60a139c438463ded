"""Laws of advantage transforms."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.credit.advantages import Estimator, Sum
from flowrl.credit.values import (
    REFERENCE,
    SAMPLE_TURNS,
    TRACKED,
    Context,
    Credit,
    ReferenceRatios,
    SampleTurns,
    TrackedStatistics,
    Transform,
)
from flowrl.errors import UserError
from flowrl.laws.trial import TRIAL_LEVELS, normals, part_title, tried
from flowrl.table import Table, columns_read
from rewards.types import IntermediateScores, Scores
from samplers import Chain, Columns, FlowSDE

_DRAWS = 6
_KNOWN = (SAMPLE_TURNS, REFERENCE, TRACKED)
_COLUMNS = Chain(FlowSDE(), 4)(TRIAL_LEVELS, 0, 0)[0].columns


@runtime_checkable
class KeepsMask(Protocol):
    """A transform that says whether entries that are masked before it are masked behind it. One
    that says nothing keeps them."""

    @property
    def keeps_mask(self) -> bool: ...


def fills_mask(transform: Transform) -> bool:
    """Whether a transform says that it fills masked entries."""
    return isinstance(transform, KeepsMask) and not transform.keeps_mask


def check_transform(
    transform: Transform,
    columns: Columns = _COLUMNS,
    before: Sequence[Transform] = (),
    rewards: Sequence[str] = ("reward",),
) -> bool:
    """Check a transform on credit [n k r] with gaps, of a plan's decision points.

    It returns Credit of the same samples and rewards, finite, with 0 where it is masked. It changes
    neither credit nor context, and equal calls are equal. Unless it says `keeps_mask = False`,
    entries that are masked before it are masked behind it: they have no score, or an earlier
    transform left them out of training. UserError for a transform that breaks one of these laws,
    and for one that fills masked entries behind transforms that select.

    before   the transforms of the chain before it; without a `Sum` among them it gets one column
             per reward
    rewards  labels of the rewards

    Returns False if it could not be checked: it reads columns of features which a trial cannot
    make, or it refuses the trial's scores (by a ValueError).
    """
    if set(columns_read((transform,))) - {*_KNOWN}:
        return False
    summed = len(rewards) == 1 or any(isinstance(earlier, Sum) for earlier in before)
    checked = False
    for trial in trial_credits(columns, rewards, summed):
        checked = _check(transform, trial, columns, before) or checked
    return checked


def _check(
    transform: Transform, trial: "CreditTrial", columns: Columns, before: Sequence[Transform]
) -> bool:
    """Check one trial. False if the transform refuses its scores."""
    name, (credit, context) = part_title(transform), trial
    before_call = Credit(*(part.clone() for part in credit))
    try:
        result = tried(name, "transform", lambda: transform(credit, context))
    except ValueError as error:
        if error.__cause__ is None or isinstance(error.__cause__, ValueError):
            return False
        raise
    _check_form(name, result, before_call)
    if not all(torch.equal(a, b) for a, b in zip(credit, before_call, strict=True)):
        raise UserError(f"{name} changes the credit that it is given: return another one")
    again = tried(name, "transform", lambda: transform(credit, context))
    if not all(torch.equal(a, b) for a, b in zip(result, again, strict=True)):
        raise UserError(
            f"{name} returns other credit for the same scores: all processes compute the same "
            "advantages, so draw no random numbers, and keep nothing between calls"
        )
    if result.value[~result.mask].any():
        raise UserError(f"{name}: the value of a masked entry must be 0: return value * mask")
    if fills_mask(transform):
        _check_filled(name, before, columns)
    elif result.mask.shape == before_call.mask.shape and (result.mask & ~before_call.mask).any():
        raise UserError(
            f"{name} fills masked entries, which have no score or were left out of training: "
            "return Credit(value * credit.mask, credit.mask), or set keeps_mask = False"
        )
    return True


def _check_form(name: str, result: object, before_call: Credit) -> None:
    if not isinstance(result, Credit) or not all(isinstance(part, Tensor) for part in result):
        raise UserError(f"{name} must return flowrl.credit.values.Credit(value, mask)")
    shape = tuple(before_call.value.shape)
    if result.value.shape != result.mask.shape or result.mask.dtype != torch.bool:
        raise UserError(f"{name}: value and mask must have one shape, and the mask be of booleans")
    if result.value.shape[0] != shape[0] or result.value.shape[-1] not in (1, shape[-1]):
        raise UserError(
            f"{name} returns credit {list(result.value.shape)} for credit {list(shape)}: it needs "
            "a row for every sample, a column for every decision point, and the same rewards"
        )
    if not result.value.isfinite().all():
        raise UserError(f"{name} returns credit that is not finite")


def _check_filled(name: str, before: Sequence[Transform], columns: Columns) -> None:
    """UserError if earlier transforms leave entries out that would come back."""
    credit, context = trial_credit(columns, ("reward",), summed=True, gaps=False)
    for transform in before:
        if isinstance(transform, Sum) or set(columns_read((transform,))) - {*_KNOWN}:
            continue
        earlier = part_title(transform)
        after = tried(earlier, "transform", lambda part=transform: part(credit, context))
        if after.mask.shape == credit.mask.shape and (credit.mask & ~after.mask).any():
            raise UserError(
                f"{name} fills masked entries (keeps_mask = False), but {earlier} before it leaves "
                f"entries out of training: put {name} before {earlier}, or leave one of them out"
            )


def can_teach(advantage: Estimator, group: int, rewards: Sequence[str]) -> bool:
    """Whether a sample gets credit where it alone is the best of its group: a transform that gives
    0 to some groups whose scores differ (pass@k, the best's lead) gives some to these.

    group    samples of a group
    rewards  labels of the rewards

    True also if a trial cannot make what a transform reads.
    """
    if set(columns_read(advantage.transforms)) - {*_KNOWN}:
        return True
    scores = torch.zeros(_DRAWS * group, len(rewards), dtype=torch.float64)
    scores[::group] = 1.0
    columns = Chain(FlowSDE(), group)(TRIAL_LEVELS, 0, 0)[0].columns
    _, context = trial_credit(columns, rewards, summed=False, gaps=False)
    assert context.scores is not None
    try:
        value, _ = advantage(replace(context.scores, values=scores), context)
    except ValueError:  # it refuses such scores
        return True
    return bool(value.any())


CreditTrial = tuple[Credit, Context]


def trial_credits(columns: Columns, rewards: Sequence[str], summed: bool) -> Iterator[CreditTrial]:
    """Credit with gaps whose scores are drawn at random, or 0 and 1, and credit without gaps."""
    yield trial_credit(columns, rewards, summed)
    yield trial_credit(columns, rewards, summed, binary=True)
    yield trial_credit(columns, rewards, summed, gaps=False)


def trial_credit(
    columns: Columns,
    rewards: Sequence[str],
    summed: bool,
    gaps: bool = True,
    binary: bool = False,
) -> CreditTrial:
    """Credit of a few draws and its context, with every column that a trial can make. Samples of a
    node have equal values. With `gaps` some samples have no score; the last draw's are all equal.
    `summed`: credit has one column, the sum of all rewards."""
    k, group, count = len(columns.nodes), columns.group, len(rewards)
    n, r = _DRAWS * group, 1 if summed else count
    scores = normals(n, count)
    scores = (scores > 0).double() if binary else scores
    scores[-group:] = 1.0
    scored_rewards = torch.ones(n, count, dtype=torch.bool)
    if gaps:
        scored_rewards[0] = False
        scored_rewards[group : 2 * group] = False  # a group without any score
    leaves = scores.sum(1, keepdim=True) if summed else scores
    scored = scored_rewards[:, :r]
    values, masks = list[Tensor](), list[Tensor]()
    for nodes in columns.nodes:
        shape = (_DRAWS * nodes, -1, r)
        have = scored.view(shape)
        mean = (leaves.view(shape) * have).sum(1) / have.sum(1).clamp(min=1)
        values.append(mean.repeat_interleave(group // nodes, 0))
        masks.append(have.any(1).repeat_interleave(group // nodes, 0))
    value, mask = torch.stack(values, 1), torch.stack(masks, 1)
    state_mask = scored_rewards[:, None].expand(n, k, count)
    states = IntermediateScores(normals(n, k, count, seed=1) * state_mask, state_mask)
    table = Table(
        {
            SAMPLE_TURNS: SampleTurns(torch.ones(n, k).bool(), torch.zeros(n, k).long()),
            REFERENCE: ReferenceRatios(0.1 * normals(n, k, seed=2), torch.arange(k).expand(n, k)),
            TRACKED: TrackedStatistics(torch.zeros(_DRAWS).double()),
        }
    )
    context = Context(
        columns,
        torch.ones(count),
        {step: normals(_DRAWS * nodes, seed=3) for step, nodes in enumerate(columns.nodes)},
        lengths=torch.arange(1, n + 1),
        prompts=torch.arange(_DRAWS),
        scores=Scores(scores * scored_rewards, scored_rewards, tuple(rewards), states),
        table=table,
    )
    return Credit(value * mask, mask), context
