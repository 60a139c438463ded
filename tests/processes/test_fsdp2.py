"""FSDP2 on two CPU processes, as the product runs it: what is trained, saved and brought back."""

import copy
import shutil
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from transformers import LlamaForCausalLM

from flowrl.errors import UserError
from flowrl.models.language.head import float32_head
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.language.use import TextUse
from flowrl.models.shards import GatheredCalls
from flowrl.processes.sharding import replicated
from tests.processes.test_processes import KL, REWARDS, job
from tests.support import process_runs, runs, text_runs, tiny_lm, tiny_pipelines, tiny_vlm
from tests.support import warm as warm_up
from tests.support.advice import advice
from tests.support.completion_servers import CompletionsServer
from tests.support.completion_servers import tree as server_tree
from tests.support.process_runs import FSDP2, Job, alone, apart, launch, together, told


@pytest.fixture(scope="module")
def jobs(pipeline, tmp_path_factory) -> dict[str, Job]:
    """Some wants more calls of one process than of the other, and of other modules."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "own.py").write_text(REWARDS)
    wan = tmp_path_factory.mktemp("wan")
    partial(tiny_pipelines.wan, 2)().save_pretrained(wan)
    full = job(pipeline, folder, runs.FLOW_GRPO | {"kl": 0.01}, rows_per_call=2)
    full["settings"]["model"]["lora"] = None
    full["settings"]["train"]["max_grad_norm"] = 1e-3  # so that all steps are cut
    made = {"full": full}
    for name in ("experts", "fails"):
        recipe = runs.NFT if name == "experts" else runs.FLOW_GRPO
        made[name] = job(wan, folder, recipe, rows_per_call=3, updates=1, self_test="off")
        call = {"num_frames": 5, "max_sequence_length": tiny_pipelines.TOKENS}
        settings = made[name]["settings"]
        settings["model"] |= {"height": 16, "width": 16, "call": call}
        reward = "light" if name == "experts" else "fails_on_second"
        settings["rewards"] = [{"name": f"{folder / 'own.py'}:{reward}"}]
        del settings["prompts"]["held_out"]
    made["fails"]["stops"] = True
    made["experts unrounded"] = made["experts"] | {"unrounded": True}
    return made


@pytest.fixture(scope="module")
def pair(jobs, warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return folder, warm_up.together(
        warm, FSDP2, {name: jobs[name] for name in ("full", "fails")}, folder
    )


@pytest.fixture(scope="module")
def experts(jobs, tmp_path_factory):
    folder, names = tmp_path_factory.mktemp("experts"), ("experts", "experts unrounded")
    return folder, together(FSDP2, {name: jobs[name] for name in names}, folder)


@pytest.mark.slow
def test_shared_weights_end_as_whole_ones_do(jobs, pair, tmp_path):
    check(jobs, pair, tmp_path, "full", 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "near"), [("experts", 2e-6), ("experts unrounded", 1e-10)])
def test_so_do_those_of_two_experts(jobs, experts, tmp_path, name, near):
    """With NFT every row has levels of its own: one process's may all lie on one of the experts.

    Wan's norms, and the sums of its blocks, are float32 whatever the model's dtype is. The rest is
    as exact as elsewhere: without that rounding the weights agree to 1e-10."""
    check(jobs, experts, tmp_path, name, near)


def check(jobs, pair, tmp_path, name: str, near: float) -> None:
    folder, weights = pair
    assert told(folder, name)["processes"].startswith("2 processes, FSDP2: this one holds 0.0")
    assert max(told(folder, name)["company"]) > 0  # or this test would not try unequal work
    assert apart(alone(jobs[name], tmp_path), weights[name]) < near
    assert told(folder, name)["moved"] > 1e-4
    norms = [
        told(*place)["metrics"]["grad_norm"] for place in ((folder, name), (tmp_path, "alone"))
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 1e-3


@pytest.mark.slow
def test_an_error_on_one_process_ends_the_calls_of_the_other(pair):
    folder, _ = pair
    assert (folder / "fails.0.txt").read_text().startswith("UserError: process 1 stopped: Runtime")
    assert (folder / "fails.1.txt").read_text().startswith("RuntimeError: the checker ran out")


@pytest.mark.slow
def test_texts_of_different_lengths_need_different_numbers_of_calls(tmp_path):
    """With a KL in the loss, and with one that is taken off the reward: there the start is asked
    while experience is collected, of each process's own completions."""
    model = tiny_lm.write(tmp_path / "lm")
    jobs = {name: text_job(model, tmp_path, RECIPES[name]) for name in ("text", "text kl")}
    jobs["cramped"] = jobs["text"] | {"cramped": True, "stops": True}
    found = together(FSDP2, jobs, tmp_path / "pair")
    check_texts(jobs, found, tmp_path)
    for name in found:
        assert max(told(tmp_path / "pair", name)["company"]) > 0
    for rank in range(2):
        said = (tmp_path / f"pair/cramped.{rank}.txt").read_text()
        assert said.startswith("UserError: FSDP2: text sampling gathers all weights once")
        assert "let a server sample that keeps its weights (model.server" in said
    kl = told(tmp_path, "alone")["metrics"]["kl_sample"]
    assert told(tmp_path / "pair", "text kl")["metrics"]["kl_sample"] == pytest.approx(kl)
    assert abs(kl) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embeddings", "images"])
def test_so_do_weights_outside_of_blocks(tmp_path, name):
    """Tied embeddings are one shard. A head has more calls on one process than on the other, and
    only some calls have images."""
    folder = tmp_path / "lm"
    jobs: dict[str, Job] = {}
    if name == "images":
        model = tiny_vlm.write(folder)
        for lora in (None, {"rank": 2}):
            settings = tiny_vlm.tree(model, tmp_path, updates=2, lr=1e-3, rows_per_call=4)
            settings["model"] |= {"dtype": "float64", "lora": lora}
            settings["train"]["weight_decay"] = 0.0  # LLaVA has weights that no call uses
            jobs[f"images {lora}"] = {"settings": settings, "iterations": 2}
        settings = copy.deepcopy(settings)
        settings["model"]["lora"] = {"rank": 2, "vision": True}
        jobs["vision"] = {"settings": settings, "iterations": 1, "stops": True}
    else:
        tiny_lm.llama(tied=True).save_pretrained(folder)
        tiny_lm.tokenizer().save_pretrained(folder)
        for which, lora in (("text", None), ("adapters", {"rank": 2}), ("start", None)):
            jobs[which] = text_job(folder, tmp_path, RECIPES.get(which, RECIPES["text"]))
            jobs[which]["settings"]["model"]["lora"] = lora
            jobs[which]["logits"] = 5 * 14
    found = together(FSDP2, jobs, tmp_path / "pair")
    check_texts(jobs, found, tmp_path)
    if name == "images":
        refused = (tmp_path / "pair/vision.1.txt").read_text()
        assert refused.startswith("UserError: model.lora.vision: FSDP2 shards adapters only")
    for each in found:
        said = told(tmp_path / "pair", each)
        assert sum(said["held"]) == said["bytes"] and max(said["held"]) < 0.51 * said["bytes"]


def test_what_is_outside_of_blocks_is_one_shard_of_one_dtype():
    """A float32 head beside bfloat16 embeddings stays whole. Adapters that only calls with images
    use are refused."""
    for tied, whole_ones in ((False, ["lm_head.weight"]), (True, [])):
        model = tiny_lm.llama(tied=tied).to(torch.bfloat16)
        float32_head(model)
        calls = GatheredCalls(model, model)
        assert [n for n, p in model.named_parameters() if p in replicated(calls)] == whole_ones
        head: Any = model.get_output_embeddings()
        whole = head(torch.ones(1, 16))
        assert head.copy is None, "the gathered weights are gone after a call"
        model.requires_grad_(False)
        assert not replicated(calls) and torch.equal(head(torch.ones(1, 16)), whole)
        assert head.copy is None
    use = TextUse(adapt_vision=True)
    policy = CausalPolicy(tiny_vlm.llava(), tiny_lm.tokenizer(), use=use)
    policy.model.requires_grad_(False)
    policy.add_lora(rank=2, alpha=2, targets=None, seed=0)
    with pytest.raises(UserError, match=r"model\.lora\.vision: FSDP2"):
        replicated(GatheredCalls(policy.model, policy.model.get_decoder()))


RECIPES = {
    "text": text_runs.GRPO | {"kl": 0.01},
    "text kl": KL,
    "start": {"name": "text_a_star_po", "length": 6},  # the initial weights sample, too
}


def text_job(model, folder, recipe) -> Job:
    settings = text_runs.tree(model, folder, recipe, updates=2, lr=1e-3)
    settings["model"]["dtype"], settings["train"]["rows_per_call"] = "float64", 4
    settings["prompts"]["per_iteration"] = 3
    return {"settings": settings, "iterations": 2}


def check_texts(jobs, found, folder) -> None:
    for name, weights in found.items():
        assert apart(alone(jobs[name], folder), weights) < 1e-10
        assert told(folder / "pair", name)["moved"] > 1e-5


@pytest.mark.slow
def test_a_server_gets_the_weights_of_all_shards(tmp_path):
    """After each update the sampled log-probabilities are the learner's."""
    model = tiny_lm.write(tmp_path / "lm")
    with CompletionsServer(model) as server:
        settings = server_tree(server, tmp_path, sync="weights")
        settings["model"]["lora"] = None
        together(FSDP2, {"served": {"settings": settings, "iterations": 3}}, tmp_path / "pair")
        loads = sum(path == "/collective_rpc" for path, _ in server.told)
    assert told(tmp_path / "pair", "served")["processes"].startswith("2 processes, FSDP2")
    assert told(tmp_path / "pair", "served")["metrics"]["mismatch_max"] < 1e-5
    assert told(tmp_path / "pair", "served")["moved"] > 1e-4 and loads >= 3


@pytest.mark.slow
def test_a_server_samples_where_whole_weights_have_no_room(tmp_path):
    model = tiny_lm.write(tmp_path / "lm")
    with CompletionsServer(model, lora=False) as server:
        jobs: dict[str, Job] = {
            "alone": text_job(model, tmp_path, RECIPES["text"]) | {"cramped": True, "stops": True},
            "served": {"settings": server_tree(server, tmp_path), "iterations": 2, "cramped": True},
        }
        del jobs["served"]["settings"]["prompts"]["held_out"]
        together(FSDP2, jobs, tmp_path / "pair")

    def refused() -> None:
        raise UserError((tmp_path / "pair/alone.0.txt").read_text())

    said = advice(
        "FSDP2: text sampling gathers all weights once, which needs {} GiB more on each process "
        "and does not fit: let a server sample that keeps its weights (model.server with sync: "
        "none, without prompts.held_out)",
        refused,
        lambda: told(tmp_path / "pair", "served"),
    )
    assert said["processes"].startswith("2 processes, FSDP2") and said["moved"] > 1e-4


@pytest.mark.slow
def test_blocks_that_stay_gathered_follow_their_weights(jobs, tmp_path):
    """The policy before, and that of before the step, must not be called once more."""
    config = tmp_path / "kept.yaml"
    config.write_text(FSDP2.read_text().replace("forward: true", "forward: false"))
    weights = together(config, {"full": jobs["full"]}, tmp_path / "pair")["full"]
    assert apart(alone(jobs["full"], tmp_path), weights) < 1e-10


@pytest.mark.slow
def test_half_precision_and_gradient_checkpointing_go_with_shared_weights(pipeline, tmp_path):
    """float32 masters of shared bfloat16 weights, and frozen bfloat16 blocks with adapters."""
    jobs = {}
    for name, lora in (("full", None), ("adapters", {"rank": 4, "alpha": 8})):
        jobs[name] = job(pipeline, tmp_path, runs.NFT, "bfloat16", gradient_checkpointing=True)
        jobs[name]["settings"]["model"]["lora"] = lora
    found = together(FSDP2, jobs, tmp_path / "pair")
    for name, weights in found.items():
        assert all(bool(w.isfinite().all()) for w in weights.values())
        assert {w.dtype for w in weights.values()} == {torch.float32}
        metrics = told(tmp_path / "pair", name)["metrics"]
        assert metrics["skipped"] == 0 and metrics["grad_norm"] > 0
        assert 1e-4 < told(tmp_path / "pair", name)["moved"] < 1e-2


@pytest.fixture(scope="module")
def trained(pipeline, tmp_path_factory):
    """`accelerate launch ... -m flowrl train ...`: what it said, and its folder."""
    folder = tmp_path_factory.mktemp("product")
    settings = runs.tree(pipeline, folder, runs.NFT, updates=2)
    settings["evaluate"]["average"] = 0.5
    settings["checkpoint"] = {"every": 1, "keep": 3}
    config = runs.write(settings, folder)
    ended = launch(FSDP2, "-m", "flowrl", "train", config, "--folder", folder / "run")
    assert ended.returncode == 0, ended.stdout[-6000:]
    return ended.stdout, folder / "run"


@pytest.mark.slow
def test_the_product_says_what_it_got_and_its_adapter_loads_in_plain_diffusers(
    pipeline, trained, tmp_path
):
    said, folder = trained
    assert "2 processes, FSDP2: this one holds" in said
    assert "equal the pipeline's own call to the bit" in said
    assert [line["iteration"] for line in runs.lines(folder)] == [0, 1, 2, 3]
    pipe = StableDiffusion3Pipeline.from_pretrained(pipeline, text_encoder_3=None, tokenizer_3=None)
    call = partial(pipe, "a red ball", height=16, width=16, num_inference_steps=2, output_type="pt")
    given = {"max_sequence_length": tiny_pipelines.TOKENS, "guidance_scale": 1.0}
    before = call(**given, generator=torch.Generator().manual_seed(0)).images
    pipe.load_lora_weights(folder / "adapter")
    after = call(**given, generator=torch.Generator().manual_seed(0)).images
    assert not torch.equal(before, after)


@pytest.mark.slow
def test_another_number_of_processes_goes_on_from_the_same_checkpoint(trained, tmp_path):
    """The last of three iterations again: on two processes to the bit, on one to rounding."""
    _, folder = trained
    whole = runs.weights(folder)
    for name in ("two", "one"):
        again = tmp_path / name
        runs.copied_run(folder, again)
        shutil.rmtree(again / "adapter")
        shutil.rmtree(again / "checkpoints/000003")
        if name == "two":
            ended = launch(process_runs.FSDP2, "-m", "flowrl", "train", "--resume", again)
            assert ended.returncode == 0, ended.stdout[-6000:]
        else:
            assert runs.flowrl("train", "--resume", again) == 0
        found = runs.weights(again)
        assert found.keys() == whole.keys()
        away = max(float((found[n] - whole[n]).abs().max()) for n in whole)
        assert away == 0 if name == "two" else away < 1e-5


@pytest.mark.slow
def test_tied_embeddings_are_saved_once_and_resumed(tmp_path):
    """Another run of the last of three iterations, with averages: on two processes to the bit, on
    one to rounding. Plain transformers loads the model."""
    tiny_lm.llama(tied=True).save_pretrained(tmp_path / "lm")
    tiny_lm.tokenizer().save_pretrained(tmp_path / "lm")
    settings = text_job(tmp_path / "lm", tmp_path, RECIPES["text"])["settings"]
    settings["model"]["dtype"], settings["evaluate"]["average"] = "float32", 0.5
    settings["checkpoint"] = {"every": 1, "keep": 3}
    ended = launch(
        FSDP2, "-m", "flowrl", "train", runs.write(settings, tmp_path), "--folder", tmp_path / "run"
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    model = LlamaForCausalLM.from_pretrained(tmp_path / "run/model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    whole = model.state_dict()
    for name in ("two", "one"):
        again = tmp_path / name
        runs.copied_run(tmp_path / "run", again)
        for each in ("model", "model_raw", "checkpoints/000003"):
            shutil.rmtree(again / each)
        if name == "two":
            ended = launch(FSDP2, "-m", "flowrl", "train", "--resume", again, "--trust")
            assert ended.returncode == 0, ended.stdout[-6000:]
        else:
            assert runs.flowrl("train", "--resume", again, "--trust") == 0
        found = LlamaForCausalLM.from_pretrained(again / "model").state_dict()
        assert found.keys() == whole.keys()
        away = max(float((found[n] - whole[n]).abs().max()) for n in whole)
        assert away == 0 if name == "two" else away < 1e-5
