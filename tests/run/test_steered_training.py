"""Particles as the samples of a window of iterations: `steer` of a run's file."""

import pytest
import torch

from flowrl.errors import UserError
from flowrl.settings.read import run_from
from tests.support import runs
from tests.support.iterations import collect
from tests.support.runs import session


def steered(pipeline, folder, recipe=runs.NFT, **settings):
    tree = runs.tree(pipeline, folder, recipe)
    tree["steer"] = {"iterations": [0, 1], "strength": 200.0, "adaptive": False, **settings}
    return tree


@pytest.mark.slow
def test_particles_have_a_higher_reward_and_are_trained_on(pipeline, tmp_path):
    plain = collect(session(pipeline, tmp_path, runs.NFT), 0)
    open_run = runs.opened(steered(pipeline, tmp_path), tmp_path)
    experience = collect(open_run, 0)
    assert experience.metrics["reward"] > plain.metrics["reward"]
    assert len(experience.rows[0].mask) == len(plain.rows[0].mask)
    assert experience.metrics["count/sampling"] == plain.metrics["count/sampling"]
    looks = len(range(1, runs.NFT["steps"] - 1, 2))
    assert experience.metrics["count/scored"] == (1 + looks) * plain.metrics["count/scored"]
    x0 = experience.rows[0].x0
    assert len({tuple(row.flatten().tolist()) for row in x0}) == len(x0)  # no copies


@pytest.mark.slow
def test_outside_the_window_the_recipe_samples(pipeline, tmp_path):
    plain = collect(session(pipeline, tmp_path, runs.NFT), 1)
    after = collect(runs.opened(steered(pipeline, tmp_path), tmp_path), 1)
    assert torch.equal(plain.rows[0].x0, after.rows[0].x0)


def test_a_transition_has_no_density_for_particles(pipeline, tmp_path):
    with pytest.raises(UserError, match="steer: particles are not the policy's own samples"):
        run_from(steered(pipeline, tmp_path, runs.FLOW_GRPO), "a file").algorithm()
    with pytest.raises(UserError, match="before the steps"):
        run_from(steered(pipeline, tmp_path, at=[3]), "a file").algorithm()
