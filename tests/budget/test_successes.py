"""Stored successes by the columns of their rollouts, also under the names of earlier versions."""

from dataclasses import fields, replace

import pytest
import torch

from flowrl.budget.successes import Success, Successes, cut, put
from samplers.completions import (
    DecisionPoints,
    ForkPoints,
    SegmentPoints,
    StepPoints,
    TextPlan,
    TextRollout,
    TurnPoints,
)
from samplers.forks import Forking

N, T, K = 3, 6, 2
ROWS = torch.arange(N)
AT = ROWS[:, None] == torch.arange(T)  # a mask that differs in each row
POINTS: dict[str, DecisionPoints] = {
    "segments": SegmentPoints(),
    "forks": ForkPoints(torch.eye(N, dtype=torch.int64) * (T + 1) + ROWS[:, None]),
    "turns": TurnPoints(AT, ROWS[:, None].expand(N, K) + 5, torch.randn(N, K).double()),
    "steps": StepPoints(AT),
}
OLD = {".points.from_environment": ".told"}  # two versions ago; others lost their first part


def rollout(points: DecisionPoints) -> TextRollout:
    forks = Forking(1, N - 1) if isinstance(points, ForkPoints) else None
    turns = K if isinstance(points, TurnPoints | StepPoints) else 1
    return TextRollout(
        plan=TextPlan(T, (1 if forks else N,), forking=forks, turns=turns),
        ids=torch.arange(N * T).view(N, T),
        logp=-torch.arange(N * T).view(N, T).float(),
        lengths=ROWS + 2,
        stopped=ROWS > 0,
        kept=None,
        prompt=torch.zeros(N, dtype=torch.int64),
        draws=(0,),
        seed=0,
        iteration=0,
        index=0,
        points=points,
        replayed=torch.zeros(N, dtype=torch.bool),
    )


def plain(name: str) -> str:
    return name.replace(".points.", ".")


@pytest.mark.parametrize("named", [str, plain, lambda name: OLD.get(name, plain(name))])
@pytest.mark.parametrize("kind", POINTS)
def test_a_success_brings_all_its_columns_along(kind: str, named) -> None:
    """The last sample takes the first one's place, read from a checkpoint of any version."""
    whole = rollout(POINTS[kind])
    pieces = {named(name): value for name, value in cut(whole, N - 1).items()}
    store = Successes(4)
    store.restore([[7, "plan", *Success(torch.ones(1), torch.ones(1).bool(), pieces)]])
    success = store.of(7, "plan")
    assert success is not None
    swapped = put(whole, {0: success.pieces})
    assert swapped.replayed.tolist() == [True, False, False]
    order = torch.tensor([N - 1, 1, 2])
    pairs = [(whole, swapped), (whole.points, swapped.points)]
    for before, after in pairs:
        for column in fields(before):
            value = getattr(before, column.name)
            if isinstance(value, torch.Tensor) and column.name not in ("prompt", "replayed"):
                assert torch.equal(getattr(after, column.name), value[order]), column.name
    assert torch.equal(swapped.written, whole.written[order])


def test_samples_that_were_replayed_before_stay_so() -> None:
    whole = rollout(SegmentPoints())
    once = put(whole, {0: cut(whole, 1)})
    assert put(once, {2: cut(whole, 1)}).replayed.tolist() == [True, False, True]
    assert put(replace(whole), {}).replayed.tolist() == [False] * N
