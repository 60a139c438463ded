"""Processes that share each call of the denoiser: the weights of one that makes them whole."""

from functools import partial

import pytest

from tests import process_runs, runs, tiny_pipelines
from tests.process_runs import DDP, FSDP2, Job, alone, apart, together, told
from tests.test_processes import REWARDS, job

OWN = """

def other_elsewhere(samples):
    return light(samples) + float(os.environ.get("RANK", "0"))
"""
CALL = {"num_frames": 5, "max_sequence_length": tiny_pipelines.TOKENS}


def shared(pipeline, folder, recipe, **train) -> Job:
    made = job(pipeline, folder, recipe, **{"self_test": "off", **train})
    settings = made["settings"]
    settings["model"] |= {"height": 16, "width": 16, "context_parallel": 2}
    settings["rewards"] = [{"name": f"{folder / 'own.py'}:other_elsewhere"}]
    del settings["prompts"]["held_out"]
    return made


def whole(job: Job) -> Job:
    model = {**job["settings"]["model"], "context_parallel": 1}
    return {**job, "settings": {**job["settings"], "model": model}}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "own.py").write_text(REWARDS + OWN)
    made: dict[str, Job] = {}
    for name, pipe in {"wan": partial(tiny_pipelines.wan, 2), "flux": tiny_pipelines.flux}.items():
        place = tmp_path_factory.mktemp(name)
        pipe().save_pretrained(place)
        made[f"{name} flow_grpo"] = shared(place, folder, runs.FLOW_GRPO | {"kl": 0.01})
        made[f"{name} nft"] = shared(place, folder, runs.NFT, updates=1, gradient_checkpointing=True)
        call = {"max_sequence_length": tiny_pipelines.TOKENS}
        for each in ("flow_grpo", "nft"):
            model = made[f"{name} {each}"]["settings"]["model"]
            model["call"] = call | ({"num_frames": 5} if name == "wan" else {})
            if each == "nft" and name == "flux":
                model["lora"] = None
    return made


@pytest.fixture(scope="module")
def pair(jobs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return folder, together(DDP, jobs, folder)


@pytest.mark.parametrize("name", ["wan flow_grpo", "wan nft", "flux flow_grpo", "flux nft"])
def test_shared_calls_end_in_the_weights_of_whole_ones(jobs, pair, tmp_path, name):
    folder, weights = pair
    assert told(folder, name)["processes"].endswith("; 2 share each call")
    here = alone(whole(jobs[name]), tmp_path)
    print(name, apart(here, weights[name]), told(folder, name)["moved"])
    assert apart(here, weights[name]) < 1e-6
    assert told(folder, name)["moved"] > 1e-4
