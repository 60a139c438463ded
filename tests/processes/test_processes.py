"""Two processes do what one does: the same weights, and nobody waits for ever for another."""

from pathlib import Path

import pytest

from flowrl.paths import PROJECT
from tests.support import (
    environments,
    process_runs,
    runs,
    text_runs,
    tiny_lm,
    tiny_pipelines,
    tiny_vlm,
)
from tests.support.process_runs import DDP, Job, Weights, alone, apart, told
from tests.support.warm import together

NEAR = {"float64": 1e-10, "float32": 2e-5}  # 3e-6 was seen, of weights that moved by 1e-2
RECIPES = {
    "flow_grpo": runs.FLOW_GRPO | {"kl": 0.01},
    "mix_grpo": {"name": "mix_grpo", "steps": 4, "group": 4, "window": 2, "every": 1, "clip": 0.2},
    "branch_grpo": {"name": "branch_grpo", "steps": 4, "at": [0, 1], "fusion": "path", "clip": 0.2},
    "awm": {"name": "awm", "steps": 4, "group": 4, "levels_per_sample": 2},
    "nft": runs.NFT,
    "gardo": {
        "name": "gardo", "steps": 4, "group": 4, "clip": 0.2, "kl": 0.5, "auxiliary": ["jpeg"],
        "distance": "colour", "share": 0.5, "refresh": 1,
    },
}  # fmt: skip
TURNS = {"name": "text_gigpo", "length": 24, "group": 4, "kl": 0.0}
KL = {"name": "text_reinforce", "length": 6, "group": 4, "kl": 10.0, "kl_in": "reward"}
LATER = ("nft", "mix_grpo", "branch_grpo", "awm", "float32", "one draw")
LATER += ("own model", "sizes", "gardo")
LATER += ("text kl", "text tree", "text forking", "turns", "images")
POINTS = PROJECT / "examples" / "own" / "points.py"
Ran = tuple[Path, dict[str, Weights]]
REWARDS = """
import os


def light(samples):
    return samples.media.flatten(1).double().mean(1)


def fails_on_second(samples):
    if os.environ.get("RANK") == "1":
        raise RuntimeError("the checker ran out of paper")
    return light(samples)


def silent_on_second(samples):
    return light(samples) * (float("nan") if os.environ.get("RANK") == "1" else 1)


def abstains_on_second(samples):
    return [None] * len(samples.prompts) if os.environ.get("RANK") == "1" else light(samples)
"""


def job(pipeline, folder, recipe, dtype="float64", **train) -> Job:
    settings = runs.tree(pipeline, folder, recipe, **{"updates": 2, "lr": 1e-3, **train})
    settings["model"]["dtype"] = dtype
    settings["prompts"]["per_iteration"] = 3  # two for the first process, one for the second
    return {"settings": settings, "iterations": 2}


@pytest.fixture(scope="module")
def jobs(pipeline, tmp_path_factory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("jobs")
    made = {name: job(pipeline, folder, recipe) for name, recipe in RECIPES.items()}
    made["float32"] = job(pipeline, folder, RECIPES["flow_grpo"], "float32")
    made["one draw"] = job(pipeline, folder, RECIPES["flow_grpo"])
    made["one draw"]["settings"]["prompts"]["per_iteration"] = 1
    made["own model"] = job(pipeline, folder, RECIPES["flow_grpo"])
    own = {"own": f"{POINTS}:Points", "lora": None, "device": "cpu", "dtype": "float64"}
    made["own model"]["settings"] |= {"model": own, "rewards": [f"{POINTS}:Closeness"]}
    made["gardo"]["settings"]["rewards"] += [{"name": n, "weight": 0} for n in ("jpeg", "colour")]
    flux = tmp_path_factory.mktemp("flux")
    tiny_pipelines.flux().save_pretrained(flux)
    made["sizes"] = job(flux, tmp_path_factory.mktemp("sizes"), RECIPES["flow_grpo"])
    # two sizes for the first process, and one for the second
    rows = [{"height": 16, "width": 12}, {}, {"height": 12}, {"width": 12, "height": 12}]
    runs.sized(made["sizes"]["settings"], rows)["prompts"]["per_iteration"] = 3
    made["poisoned"] = job(pipeline, folder, RECIPES["nft"], updates=1) | {"poison": True}
    made["poisoned thrice"] = made["poisoned"] | {"iterations": 3, "stops": True}
    own = folder / "own.py"
    for name in ("fails", "silent", "abstains"):
        made[name] = job(pipeline, folder, RECIPES["nft"], self_test="off")
        made[name]["settings"]["rewards"] = [{"name": f"{own}:{name}_on_second"}]
    made["fails"]["stops"] = True
    made["silent"]["settings"]["train"]["on_failure"] = "skip_group"
    model = tiny_lm.write(tmp_path_factory.mktemp("lm"))
    words = tmp_path_factory.mktemp("words")
    texts = {"text": text_runs.GRPO | {"kl": 0.01}, "text tree": text_runs.TREE, "text kl": KL}
    texts["text forking"] = {"name": "text_forking", "length": 6, "group": 6, "share": 0.3}
    for name, recipe in texts.items():
        settings = text_runs.tree(model, words, recipe, updates=2, lr=1e-3)
        settings["model"]["dtype"] = "float64"
        made[name] = {"settings": settings, "iterations": 2}
    pictures = tiny_vlm.write(tmp_path_factory.mktemp("vlm"))
    settings = tiny_vlm.tree(pictures, tmp_path_factory.mktemp("seen"), updates=2, lr=1e-3)
    settings["model"]["dtype"] = "float64"
    made["images"] = {"settings": settings, "iterations": 2}
    talk = tmp_path_factory.mktemp("talk")
    settings = environments.tree(model, talk, "named", TURNS, updates=2, lr=1e-3, self_test="off")
    settings["model"]["dtype"] = "float64"
    made["turns"] = {"settings": settings, "iterations": 2}
    own.write_text(REWARDS)
    return made


@pytest.fixture(scope="module")
def pair(jobs, warm, tmp_path_factory):
    """By one launch of two processes: its folder, and the weights."""
    folder = tmp_path_factory.mktemp("pair")
    now = {name: job for name, job in jobs.items() if name not in LATER}
    return folder, together(warm, DDP, now, folder)


@pytest.fixture(scope="module")
def later(jobs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("later")
    return folder, process_runs.together(DDP, {name: jobs[name] for name in LATER}, folder)


def check(job: Job, name: str, ran: Ran, here: Path) -> None:
    """Two processes and large chunks against one process and small ones."""
    folder, weights = ran
    assert told(folder, name)["processes"].startswith("2 processes, DDP")
    near = NEAR["float32" if name == "float32" else "float64"]
    assert apart(alone(job, here, rows_per_call=3), weights[name]) < near
    assert told(folder, name)["moved"] > 1e-4
    # Adam's step is blind to a factor of all gradients; their norm before the step is not.
    one, two = told(here, "alone")["norms"], told(folder, name)["norms"]
    assert max(one) > 0
    assert two == pytest.approx(one, rel=1e-3 if name == "float32" else 1e-8)


@pytest.mark.parametrize("name", ["flow_grpo", "text"])
def test_processes_and_chunks_change_nothing_but_rounding(jobs, pair, tmp_path, name):
    check(jobs[name], name, pair, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", LATER)
def test_nor_do_they_for_other_recipes(jobs, later, tmp_path, name):
    check(jobs[name], name, later, tmp_path)


def test_a_reward_that_raises_on_one_process_stops_all_with_its_sentence(pair):
    folder, _ = pair
    assert (folder / "fails.1.txt").read_text() == "RuntimeError: the checker ran out of paper"
    said = (folder / "fails.0.txt").read_text()
    assert said.startswith("UserError: process 1 stopped: RuntimeError: the checker ran out")


def test_a_process_without_scores_waits_for_nobody(pair):
    folder, weights = pair
    assert told(folder, "silent")["metrics"]["unscored"] == 4  # one draw of three
    assert weights["silent"]


def test_a_reward_that_abstains_on_one_process_is_no_failure_on_any(pair):
    folder, weights = pair
    metrics = told(folder, "abstains")["metrics"]
    assert metrics["abstained"] == metrics["unscored"] == 4  # one draw of three
    assert metrics["applies/abstains_on_second"] == pytest.approx(2 / 3)
    assert apart(weights["silent"], weights["abstains"]) == 0, "the same samples are left out"


def test_a_gradient_that_is_no_number_on_one_process_skips_the_step_on_all(pair):
    folder, _ = pair
    assert told(folder, "poisoned")["metrics"]["skipped"] == 1
    assert told(folder, "poisoned")["moved"] == 0


def test_the_third_step_without_a_finite_gradient_stops_both(pair):
    folder, _ = pair
    said = [(folder / f"poisoned thrice.{rank}.txt").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    assert said[0].startswith(
        "NotFiniteError: no finite gradient in three consecutive optimizer steps"
    )


@pytest.mark.slow
def test_a_launch_that_starts_fewer_processes_than_it_says_is_an_error(jobs, tmp_path):
    """accelerate's own trap: --cpu starts one, whatever --num_processes is."""
    config = runs.write(jobs["nft"]["settings"], tmp_path)
    words = ("-m", "flowrl", "train", config, "--folder", tmp_path / "run")
    ended = process_runs.launch(DDP, "--cpu", "--num_processes", "2", *words)
    assert ended.returncode != 0
    assert "was given 2 processes, but this run has 1" in ended.stdout
