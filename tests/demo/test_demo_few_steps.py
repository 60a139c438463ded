"""The demo of few steps: its folder, its script, and a step of training in two steps and in one."""

import importlib
from itertools import pairwise

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from flowrl.errors import UserError
from flowrl.iteration import ratio_check
from flowrl.paths import PROJECT
from flowrl.settings.read import dump, read_run, run_from
from samplers import Scheduler
from tests.support import demo_folders, runs
from tests.support.iterations import collect

torch.set_num_threads(1)
FOLDER = PROJECT / "flowrl" / "demo" / "shapes-few"
CONFIG = PROJECT / "configs" / "demo_few_steps.yaml"
OWN = {"kernel": "scheduler"}


def small(recipe: dict, **train) -> dict:
    tree = dump(read_run(CONFIG))
    tree["recipe"] = recipe
    tree["prompts"]["per_iteration"] = 2
    tree["evaluate"] |= {"samples": 4, "steps": 2}
    tree["model"]["device"] = "cpu"
    tree["train"] |= train
    return tree


def test_the_folder_is_small_and_its_scheduler_draws_noise():
    demo_folders.check_small_and_halved(FOLDER, 3.5e6, 5)
    pipe = demo_folders.loaded(FOLDER)
    assert type(pipe) is StableDiffusion3Pipeline and pipe.scheduler.config.stochastic_sampling


def test_targets_are_the_ends_of_the_teachers_euler_steps(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "scripts" / "demo_models"))
    script = importlib.import_module("distill_few_steps")
    seen = []

    def teacher(x, *, timestep, return_dict):
        assert not return_dict
        seen.append(float(timestep[0]))
        return (x,)  # dx / ds = x, so that a step from a to b multiplies by 1 - (a - b)

    x = torch.ones(2, 1, 1, 1)
    for sigma in script.LEVELS:
        seen.clear()
        found = script.reached(teacher, x, sigma, ())
        count = round(script.TEACHER_STEPS * sigma)
        levels = [sigma * (1 - k / count) for k in range(count + 1)]
        assert seen == pytest.approx([1000 * level for level in levels[:-1]], rel=1e-5)
        wanted = 1.0
        for a, b in pairwise(levels):
            wanted *= 1 - (a - b)
        torch.testing.assert_close(found, wanted * x)


def test_two_steps_have_a_density_and_its_first_ratio_is_one(tmp_path):
    recipe = {"name": "flow_grpo", "steps": 2, "group": 2, "clip": 1e-3, "plan": OWN}
    session = runs.opened(small(recipe), tmp_path)
    experience = collect(session, 0)
    said = str(session.learner.policy.known_proofs[2, 1.0])
    assert "steps are FlowMatchEulerDiscreteScheduler's own" in said
    floor = ratio_check.check_ratio(session.learner, experience, session.terminal)
    assert floor is not None and floor < 1e-4
    (plan,) = session.learner.policy.plain(1)((1.0, 0.5, 0.0), 0, 0)
    assert isinstance(plan.kernel, Scheduler)  # evaluations take the same steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        {"name": "flow_grpo", "steps": 2, "group": 2, "plan": OWN},
        {"name": "nft", "steps": 1, "group": 2, "levels_per_sample": 1, "plan": OWN},
    ],
)
def test_policy_gradients_train_from_two_steps_and_matching_from_one(tmp_path, recipe):
    tree = small(recipe, iterations=1)
    assert runs.flowrl("train", runs.write(tree, tmp_path), "--folder", tmp_path / "run") == 0
    assert runs.lines(tmp_path / "run")[-1]["grad_norm"] > 0


def test_what_has_no_such_steps_is_refused_before_weights_load():
    one = {"name": "flow_grpo", "steps": 1, "plan": OWN}
    with pytest.raises(UserError, match="at least two steps"):
        run_from(small(one), "run").algorithm()
    gradients = {"name": "draft_lv", "steps": 4, "plan": OWN}
    with pytest.raises(UserError, match="the Euler steps that reward gradients need"):
        run_from(small(gradients), "run").algorithm()
