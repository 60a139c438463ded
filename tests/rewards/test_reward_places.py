"""Where a reward model computes, which need not be where the samples are."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from accelerate.state import AcceleratorState

from flowrl.paths import PROJECT
from flowrl.session.progress import Progress
from rewards import load
from rewards.checks.settings import settings_of
from rewards.perception.embedding import Placement, tokenize
from rewards.perception.media import to_pil
from tests.support import runs
from tests.support.iterations import iterate
from tests.support.reward_contract import images

CLIP = str(PROJECT / "flowrl" / "demo" / "shapes-clip")
MODELS = (
    "aesthetic", "clip", "geneval", "hps", "imagereward", "pickscore", "sequence_classifier",
    "similarity",
)  # fmt: skip


def places(reward) -> set[str]:
    return {p.device.type for p in reward.reward.towers.model.parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_every_reward_with_a_model_may_be_put_elsewhere(name):
    given = settings_of(import_module(f"rewards.catalogue.{name}").load)
    assert given["device"].default == "auto"


def test_the_model_and_its_inputs_go_where_they_are_told():
    """meta stands for a device where the samples are not: its tensors have no numbers."""
    towers = load("clip", model=CLIP, device="cpu").reward.towers
    placement = Placement.of("meta")
    moved = replace(towers, model=placement.put(towers.model), placement=placement)
    assert {p.device.type for p in moved.model.parameters()} == {"meta"}
    found = moved.images([to_pil(torch.zeros(3, 32, 32))])
    assert found.device.type == "meta" and found.shape[0] == 1
    words = tokenize(moved.tokenizer, ["a red ball"], moved.limit, moved.placement.device)
    assert {part.device.type for part in words.values()} == {"meta"}


@pytest.mark.parametrize(
    ("device", "sentence"),
    [("gpu", "device must be auto, cpu, cuda or cuda:0"), ("cuda:99", r"\d+ GPUs are vis")],
)
def test_a_device_that_is_not_there_is_an_error(device, sentence):
    with pytest.raises(ValueError, match=sentence):
        Placement.of(device)


def clip_run(pipeline, folder, device):
    settings = runs.tree(pipeline, folder, runs.FLOW_GRPO, self_test="off")
    settings["rewards"] = [{"name": "clip", "model": CLIP, "device": device}]
    settings["model"]["device"] = "auto"
    return runs.opened(settings, folder)


@pytest.mark.slow
def test_a_run_with_its_reward_model_on_the_cpu(pipeline, tmp_path):
    """Beside a GPU where there is one."""
    kept = clip_run(pipeline, tmp_path, "cpu")
    assert places(kept.rewards["clip"]) == {"cpu"}
    metrics = iterate(kept, Progress()).metrics
    assert metrics["unscored"] == 0 and -1 <= metrics["reward/clip"] <= 1


@pytest.mark.gpu
def test_a_reward_model_on_the_cpu_scores_samples_of_the_gpu(pipeline, tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)  # keeps to its first device
    kept = clip_run(pipeline, tmp_path, "cpu")
    assert kept.accelerator.device.type == "cuda" and places(kept.rewards["clip"]) == {"cpu"}
    assert iterate(kept, Progress()).metrics["unscored"] == 0
    shown = images(["a red ball"] * 4)
    moved = replace(shown, media=shown.media.cuda())
    here, there = (load("clip", model=CLIP, device=d)(moved) for d in ("cpu", "cuda"))
    assert here.device.type == there.device.type == "cpu"
    torch.testing.assert_close(here, there, atol=1e-3, rtol=0)
