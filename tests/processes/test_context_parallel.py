"""Processes that share each call of the denoiser: the weights of one that makes them whole."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.errors import UserError
from flowrl.estimate import memory
from flowrl.processes import context_parallel
from flowrl.processes.parallel import Parallel
from flowrl.settings.read import run_from
from tests.budget.test_budget_run import EVERYTHING
from tests.processes.test_processes import REWARDS, job
from tests.support import process_runs, runs, tiny_pipelines
from tests.support import warm as warm_up
from tests.support.advice import advice
from tests.support.process_runs import DDP, FSDP2, Job, alone, apart, together, told
from tests.support.tiny_pipelines_image import flux2, qwen_image

# a reward that is another one on the process that shares the first one's calls
OWN = """

def other_elsewhere(samples):
    return light(samples) + float(os.environ.get("RANK", "0"))
"""
PIPES = {
    "wan": partial(tiny_pipelines.wan, 2),
    "flux": tiny_pipelines.flux,
    "flux2": flux2,
    "qwen": qwen_image,
}
FLUX2 = {"max_sequence_length": 32, "text_encoder_out_layers": [0, 1, 2]}
GUIDED = {"sample": 3.0, "train": 3.0}
NEAR = 1e-6  # in float64; Wan's own norms and FLUX's embeddings of positions are in float32
SAME = ("reward", "grad_norm", "count/", "budget/", "ratio_max")


@pytest.fixture(scope="module")
def pipes(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pipes")
    for name in ("wan", "flux"):
        PIPES[name]().save_pretrained(folder / name)
    return {name: folder / name for name in PIPES}


def shared(pipe: Path, folder: Path, recipe, reward="other_elsewhere", **train) -> Job:
    """Wan is a film of two latent frames."""
    made = job(pipe, folder, recipe, **{"self_test": "off", **train})
    settings, film = made["settings"], pipe.name == "wan"
    call = {"max_sequence_length": tiny_pipelines.TOKENS} | ({"num_frames": 5} if film else {})
    settings["model"] |= {"height": 16, "width": 16, "context_parallel": 2, "call": call}
    (folder / "own.py").write_text(REWARDS + OWN)
    settings["rewards"] = [{"name": f"{folder / 'own.py'}:{reward}"}]
    del settings["prompts"]["held_out"]
    return made


def whole(job: Job) -> Job:
    model = {**job["settings"]["model"], "context_parallel": 1}
    return {**job, "settings": {**job["settings"], "model": model}}


def check(jobs: Mapping[str, Job], name: str, folder: Path, weights, here: Path) -> None:
    """Weights do not tell a gradient from twice as much of it, since Adam does not: its norm does,
    and counts tell who was counted twice."""
    assert apart(alone(whole(jobs[name]), here), weights[name]) < NEAR
    two, one = told(folder, name), told(here, "alone")
    assert two["processes"].endswith("; 2 share each call")
    assert two["moved"] > 1e-4
    metrics = {key: one["metrics"][key] for key in one["metrics"] if key.startswith(SAME)}
    assert {key: two["metrics"][key] for key in metrics} == pytest.approx(metrics, rel=1e-5)


@pytest.fixture(scope="module")
def jobs(pipes, tmp_path_factory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("jobs")
    made = {
        "wan": shared(pipes["wan"], folder, runs.FLOW_GRPO | {"kl": 0.01}, rows_per_call=5),
        "flux": shared(pipes["flux"], folder, runs.NFT, gradient_checkpointing=True),
        "odd": shared(pipes["flux"], folder, runs.NFT) | {"stops": True},
    }
    made["wan"]["settings"]["model"]["lora"]["targets"] = ["to_q", "net.2", "proj_out"]
    made["flux"]["settings"]["model"]["lora"] = None
    made["odd"]["settings"]["model"]["call"]["max_sequence_length"] = 15
    return made


@pytest.fixture(scope="module")
def pair(jobs, warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return folder, warm_up.together(
        warm, DDP, {name: jobs[name] for name in ("flux", "odd")}, folder
    )


@pytest.fixture(scope="module")
def others(jobs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("others")
    return folder, together(DDP, {"wan": jobs["wan"]}, folder)


@pytest.mark.slow
def test_shared_calls_end_in_the_weights_of_whole_ones(jobs, pair, tmp_path):
    folder, weights = pair
    check(jobs, "flux", folder, weights, tmp_path)


@pytest.mark.slow
def test_so_do_those_of_a_video_model(jobs, others, tmp_path):
    folder, weights = others
    check(jobs, "wan", folder, weights, tmp_path)
    proven(folder, "transformer", "transformer_2")


@pytest.mark.slow
def test_calls_are_proven_against_whole_ones_and_the_pipelines_own(pair):
    proven(pair[0], "transformer")


def proven(folder: Path, *names: str) -> None:
    said = (folder / "log.txt").read_text()
    assert said.count("equal the pipeline's own call to the bit") == 1
    for name in names:
        assert f"\n{name}: a call shared by 2 processes differs " in said


@pytest.mark.slow
def test_tokens_that_cannot_be_parted_evenly_are_refused_by_number(pair):
    """The same run with an even number of them is "flux"."""

    def told_by(rank: int) -> None:
        raise UserError((pair[0] / f"odd.{rank}.txt").read_text())

    for rank in range(2):
        advice(
            "{}: {} processes cannot share {} tokens evenly: change height, width or num_frames "
            "(or max_sequence_length, for text tokens)",
            partial(told_by, rank),
            lambda: proven(pair[0], "transformer"),
        )


@pytest.mark.slow
def test_so_it_is_for_other_models_recipes_and_guidance(pipes, tmp_path):
    for name in ("flux2", "qwen"):
        PIPES[name]().save_pretrained(pipes[name])
    jobs = {
        "wan": shared(pipes["wan"], tmp_path, runs.NFT, gradient_checkpointing=True),
        "guided": shared(pipes["wan"], tmp_path, runs.FLOW_GRPO),
        "flux2": shared(pipes["flux2"], tmp_path, runs.FLOW_GRPO),
        "qwen": shared(pipes["qwen"], tmp_path, runs.FLOW_GRPO, gradient_checkpointing=True),
        "steered": shared(pipes["flux"], tmp_path, runs.NFT),
        "budget": shared(pipes["flux"], tmp_path, runs.FLOW_GRPO),
    }
    jobs["flux2"]["settings"]["model"]["call"] |= FLUX2
    jobs["guided"]["settings"]["model"] |= {"guidance": GUIDED}
    jobs["guided"]["settings"]["model"]["call"]["negative_prompt"] = "two small dogs"
    jobs["steered"]["settings"]["steer"] = {"iterations": [0, 2], "strength": 200.0}
    jobs["budget"]["settings"]["budget"] = EVERYTHING | {"spread": 0.0018}
    weights = together(DDP, jobs, tmp_path / "pair")
    for name in jobs:
        check(jobs, name, tmp_path / "pair", weights, tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("config", [DDP, FSDP2], ids=["ddp", "fsdp2"])
def test_two_circles_of_two_part_the_draws(pipes, tmp_path, config):
    """The first has two draws, the second one, and so other calls."""
    jobs = {"wan": shared(pipes["wan"], tmp_path, runs.NFT, "light", rows_per_call=3, updates=1)}
    four = tmp_path / "four.yaml"
    four.write_text(config.read_text().replace("num_processes: 2", "num_processes: 4"))
    weights = together(four, jobs, tmp_path / "four")
    check(jobs, "wan", tmp_path / "four", weights, tmp_path)
    assert told(tmp_path / "four", "wan")["processes"].startswith("4 processes")
    assert (max(told(tmp_path / "four", "wan")["company"]) > 0) == (config is FSDP2)


@pytest.mark.slow
def test_the_product_trains_saves_and_stops_together(pipes, tmp_path):
    """What the launcher was told is done; an error of one ends all, with its sentence."""
    settings = shared(pipes["wan"], tmp_path, runs.NFT)["settings"]
    settings["prompts"]["held_out"] = settings["prompts"]["train"]
    config = runs.write(settings, tmp_path)
    words = ("-m", "flowrl", "train", config, "--folder")
    ended = process_runs.launch(DDP, *words, tmp_path / "run")
    assert ended.returncode == 0, ended.stdout[-6000:]
    assert "2 processes, DDP: each holds all weights (cpu); 2 share each call" in ended.stdout
    assert runs.weights(tmp_path / "run")
    assert [line["iteration"] for line in runs.lines(tmp_path / "run")] == [0, 1, 2, 3]
    settings["rewards"] = [{"name": f"{tmp_path / 'own.py'}:fails_on_second"}]
    settings["held_out_rewards"] = [{"name": f"{tmp_path / 'own.py'}:light"}]
    own = tmp_path / "own.py"
    own.write_text(own.read_text().replace('== "1":\n        raise', '== "0":\n        raise'))
    runs.write(settings, tmp_path)
    ended = process_runs.launch(DDP, *words, tmp_path / "again", timeout=120)
    assert ended.returncode != 0
    assert "the checker ran out of paper" in ended.stdout


@pytest.mark.parametrize(
    ("more", "processes", "wanted"),
    [
        ({}, 1, "needs a multiple of 2 processes, but this run has 1"),
        ({}, 3, "needs a multiple of 2 processes, but this run has 3"),
        ({"context_parallel": 3}, 3, "transformer has 2 attention heads, which 3 processes"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_weights_load(
    pipes, tmp_path, more, processes, wanted
):
    settings = shared(pipes["flux"], tmp_path, runs.NFT)["settings"]
    settings["model"] |= more
    with pytest.raises(UserError, match=wanted):
        context_parallel.refuse_model(run_from(settings, "test").model, processes)


def test_a_model_without_a_plan_is_refused_with_those_that_have_one(pipeline, tmp_path):
    settings = shared(pipeline, tmp_path, runs.NFT)["settings"]
    with pytest.raises(UserError, match=r"SD3Transformer2DModel\).* supported: Wan, FLUX.1, FLUX"):
        context_parallel.refuse_model(run_from(settings, "test").model, 2)


def test_activations_are_estimated_for_a_part_of_the_tokens(pipes, tmp_path):
    made = shared(pipes["wan"], tmp_path, runs.NFT, rows_per_call=4)
    made["settings"]["model"]["dtype"] = "float32"
    found = [memory.estimate(run_from(each["settings"], "test")) for each in (made, whole(made))]
    parted, everything = (each.phases["training"] for each in found if each is not None)
    assert parted == pytest.approx(everything / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (
            {"compile": True},
            "without compilation: leave attention and compile out",
        ),
        ({"attention": "flash"}, "native attention without compilation"),
        ({"pipeline": None, "language": "x"}, "context_parallel is a setting of pipeline models"),
    ],
)
def test_settings_that_were_not_proven_with_it_are_refused(pipes, tmp_path, more, wanted):
    settings = shared(pipes["flux"], tmp_path, runs.NFT)["settings"]
    settings["model"] = {"pipeline": "x", "context_parallel": 2, **more}
    with pytest.raises(UserError, match=wanted):
        run_from(settings, "test")


def test_a_call_that_is_off_a_whole_one_stops_the_run():
    """As a wrong mask, or texts that were not parted, would make it."""
    shared = object.__new__(context_parallel.Shared)
    shared.denoiser, shared.degree, shared.away = torch.nn.Identity(), 2, None
    said = torch.linspace(-1, 1, 9)
    shared._compare((said,), (said + 1e-4,))
    assert shared.away == pytest.approx(1e-4, rel=1e-2)
    accelerator: Any = SimpleNamespace(num_processes=2, process_index=0, device=said.device)
    for wrong in (said + 0.01, said * float("nan")):
        opened = advice(
            "{}: a call of {} shared by {} processes differs from an unshared one by {} of its "
            "size: remove the setting",
            lambda wrong=wrong: shared._compare((wrong,), (said,)),
            lambda: Parallel.open(accelerator, {"x": torch.nn.Identity()}, None, members=1),
        )
        assert not opened.shared and not list(opened.proofs()), "no call is shared, so none differs"
