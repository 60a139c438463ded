"""Advantages by the distance of latents, which reaches credit as a column of a feature."""

from pathlib import Path

import pytest
import torch

from flowrl.credit.advantages import Estimator, Standardize
from flowrl.credit.novelty import LATENT_DISTANCE, Novelty
from flowrl.credit.values import Context
from flowrl.errors import UserError
from flowrl.iteration.features.latents import latent_distances
from flowrl.table import Table
from rewards import Scores
from samplers import Columns, Latents, Ode, roll
from samplers.mixed import MixedRollout
from tests.support import runs
from tests.support.iterations import collect
from tests.support.tiny import gaussian_velocity


def test_good_samples_far_away_count_more() -> None:
    values = torch.tensor([3.0, 1.0, -1.0, -3.0, 1.0, -1.0, 0.0, 0.0])[:, None]
    distance = torch.tensor([3.0, 1.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    context = Context(
        Columns((4,), (True,), (1.0,), (1.0,)), torch.ones(1),
        table=Table({LATENT_DISTANCE: distance}),
    )  # fmt: skip
    scores = Scores(values, torch.ones(8, 1, dtype=torch.bool), ("r",))
    got, _ = Estimator((Standardize(None), Novelty(0.5)))(scores, context)
    # the group's mean distance is 2: 3 (1 + 0.5 / 2) and 1 (1 - 0.5 / 2); equal samples stay
    assert got[:, 0].tolist() == [3.75, 0.75, -1.0, -3.0, 1.0, -1.0, 0.0, 0.0]


def test_texts_and_weights_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match="from 0 to 1"):
        Novelty(1.5)


def test_latents_of_several_sizes_are_measured_in_their_own_groups() -> None:
    parts = [
        roll(Ode(2)((1.0, 0.5, 0.0), 0, 0), gaussian_velocity, Latents((size,)), draws, seed=0,
             iteration=0)[0]
        for size, draws in ((3, [5]), (4, [6, 7]))
    ]  # fmt: skip
    alone = [latent_distances(part) for part in parts]
    found = latent_distances(MixedRollout(tuple(parts), ((1,), (0, 2)), (6, 5, 7)))
    assert found.tolist() == [*alone[1][:2], *alone[0], *alone[1][2:]] and found.min() > 0


@pytest.mark.long
def test_a_run_measures_its_latents(pipeline: Path, tmp_path: Path) -> None:
    advantage = ["standardize", {"name": "novelty", "weight": 1.0}]
    tree = runs.tree(pipeline, tmp_path, {**runs.FLOW_GRPO, "advantage": advantage})
    made = collect(runs.opened(tree, tmp_path), 0)
    rollout, table = made.sampled.rollouts[0], made.scored.plans[0].table
    groups = rollout.x0.double().view(-1, rollout.plan.group, rollout.x0[0].numel())
    want = [float((x - group.mean(0)).square().mean().sqrt()) for group in groups for x in group]
    assert table[LATENT_DISTANCE].tolist() == pytest.approx(want, rel=1e-5)
    assert min(want) < 0.99 * max(want)
