"""Two processes spend as one does: the same rounds, the same prompts, the same weights."""

import pytest

from tests.budget.test_budget_run import EVERYTHING, picture_tree, text_tree
from tests.language.test_replay import KL, OFF
from tests.language.test_replay import settings as turns_tree
from tests.support import tiny_lm
from tests.support.process_runs import DDP, Job, alone, apart, together, told


@pytest.fixture(scope="module")
def jobs(pipeline, tmp_path_factory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("jobs")
    model = tiny_lm.write(folder / "lm")
    pictured = picture_tree(pipeline, folder / "pictures", EVERYTHING | {"spread": 0.0018})
    written = text_tree(model, folder / "texts", EVERYTHING, updates=2)
    pictured["prompts"]["per_iteration"] = 3
    made: dict[str, Job] = {}
    turns = turns_tree(model, folder / "turns", KL | OFF, EVERYTHING, updates=2)
    turns["train"]["seed"] = 4  # whose draws are stored and replayed within four iterations
    for name, settings in (("pictures", pictured), ("texts", written), ("turns", turns)):
        settings["model"]["dtype"] = "float64"
        settings["train"]["self_test"] = "off"  # its reward is too rare for a few shown texts
        made[name] = {"settings": settings, "iterations": 4}
    return made


@pytest.mark.slow
def test_two_processes_spend_as_one(jobs, tmp_path):
    folder = tmp_path / "pair"
    weights = together(DDP, jobs, folder)
    for name, job in jobs.items():
        single = alone(job, tmp_path / name)
        assert apart(single, weights[name]) < 1e-9
        one, two = told(tmp_path / name, "alone")["metrics"], told(folder, name)["metrics"]
        spent = {key for key in one if key.startswith("budget/")}
        assert {key: one[key] for key in spent} == {key: two[key] for key in spent}
        assert one["reward"] == pytest.approx(two["reward"]) and "budget/rounds" in spent
    assert one["kl_sample"] == pytest.approx(two["kl_sample"]) and abs(one["kl_sample"]) > 1e-3
    assert told(folder, "turns")["replayed"] > 0
