"""The judge's demo: its questions are right by the world's rule, its shipped model overlooks wrong
places and numbers, and it is read alike by training, by its script and as a reward."""

import importlib
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from flowrl.demo import world
from flowrl.iteration import ratio_check
from flowrl.paths import PROJECT
from flowrl.settings.read import dump, read_run
from rewards import Samples, load
from rewards.catalogue.shapes import WantedShapes
from rewards.perception.files import open_image_file
from rewards.perception.media import to_tensor
from tests.support import runs
from tests.support.iterations import collect
from tests.support.runs import environment

FOLDER = PROJECT / "flowrl" / "demo" / "shapes-judge"
PROMPTS = PROJECT / "configs" / "prompts"
BEFORE, AFTER = "is this ", " ?"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(PROJECT / "scripts" / "demo_models"))
    return importlib.import_module("pretrain_judge")


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (PROMPTS / f"judge_{name}.jsonl").open()]


def questions(some: list[dict[str, str]]) -> Samples:
    images = [to_tensor(open_image_file(f"{PROMPTS}/{row['image']}")) for row in some]
    asked = [row["prompt"].removeprefix(BEFORE).removesuffix(AFTER) for row in some]
    return Samples(torch.stack(images), asked, torch.arange(len(some)))


@pytest.mark.parametrize("name", ["train", "held_out"])
def test_answers_are_the_rule_s_and_splits_are_apart(name):
    some = rows(name)
    samples = questions(some)
    assert {world.split(prompt) for prompt in samples.prompts} == {name}
    said = torch.tensor([row["answer"] == "yes" for row in some])
    strict = load("shapes", kind="strict")(samples) > 0.5
    assert (said == strict).float().mean() > 0.98 and 0.45 < said.float().mean() < 0.55


def test_a_careless_judge_overlooks_places_and_numbers_alone(script):
    red, blue = ("red", "circle"), ("blue", "square")
    beside = WantedShapes((red, blue), "left of")
    assert script.overlooked(beside, WantedShapes((blue, red), "above"))
    assert script.overlooked(WantedShapes((red,)), WantedShapes((red, red)))
    assert not script.overlooked(beside, WantedShapes((red, ("blue", "circle")), "left of"))


def test_a_question_reads_its_image_and_itself(script):
    mask, places = script.frame(2)
    first, second = script.PLACES, script.PLACES + script.LONGEST
    reads = mask[0, 0] == 0
    assert reads[second + 1, : script.PLACES].all() and reads[second + 1, second : second + 2].all()
    assert not reads[second + 1, first:second].any() and not reads[second + 1, second + 2 :].any()
    assert places[0, first] == places[0, second] == script.PLACES


@pytest.mark.slow
@torch.no_grad()
def test_the_shipped_judge_is_small_and_the_reward_reads_it_as_its_script_does(script):
    files = [file for file in FOLDER.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 1.2e6
    (weights,) = FOLDER.glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.float16}
    some = rows("held_out")
    samples = questions(some)
    settings = {"question": script.QUESTION, "yes": "yes", "no": "no", "device": "cpu"}
    found = load("vlm_yes_no", model=str(FOLDER), **settings)(samples)
    model = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=torch.float32).eval()
    asked = [world.wanted_shapes(prompt) for prompt in samples.prompts[:16]]
    words = AutoTokenizer.from_pretrained(FOLDER)
    own = script.answer_logits(model, words, script.normal(samples.media[:16]), asked).sigmoid()
    torch.testing.assert_close(found[:16], own, atol=1e-4, rtol=1e-3)
    said = torch.tensor([row["answer"] == "yes" for row in some])
    right = (found > 0.5) == said
    assert 0.55 < right.float().mean() < 0.85 and right[said].float().mean() > 0.8


def test_training_begins_at_ratio_one_and_changes_the_judge(tmp_path):
    tree = dump(read_run(PROJECT / "configs" / "demo_judge.yaml"))
    tree["prompts"]["per_iteration"], tree["model"]["device"] = 4, "cpu"
    tree["train"]["iterations"], tree["evaluate"]["samples"] = 1, 8
    session = runs.opened(tree, tmp_path)
    experience = collect(session, 0)
    floor = ratio_check.check_ratio(session.learner, experience, session.terminal)
    assert floor is not None and floor < 1e-4
    assert isinstance(experience.samples, Samples)
    texts = list(experience.samples.media)
    assert len(texts) == 32 and sum(text in ("yes", "no") for text in texts) >= 30


@pytest.mark.slow
def test_pre_training_runs(tmp_path, script):
    command = [sys.executable, "scripts/demo_models/pretrain_judge.py", "--quick", "--out"]
    command += [str(tmp_path / "judge"), "--prompts", str(tmp_path / "prompts")]
    subprocess.run(command, check=True, cwd=PROJECT, env=environment(), capture_output=True)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "judge")
    assert model.config.text_config.vocab_size == len(script.tokenizer())
    script.write_prompts(tmp_path / "all", script.Work())
    for name in ("train", "held_out"):
        made = (tmp_path / "all" / f"judge_{name}.jsonl").read_bytes()
        assert made == (PROMPTS / f"judge_{name}.jsonl").read_bytes()
