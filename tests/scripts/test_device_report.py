"""Iterations on a pretended CUDA device: no mix of devices, few waits and copies."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flowrl.paths import PROJECT
from flowrl.recipes.table import IMAGE_RECIPES, TEXT_RECIPES
from tests.support import every_recipe, runs, tiny_lm, tiny_pipelines_video
from tests.support.pretended_cuda import compiled
from tests.support.pretended_cuda.tensors import HOST

Reported = Callable[[str], dict[str, Any]]
ALL_WEIGHTS = {"lora": None}
IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # recipe, changes of the model
    "chain": ({"name": "flow_grpo", "steps": 3, "group": 2, "kl": 0.01}, {}),
    "tree": ({"name": "branch_grpo", "steps": 3, "at": [0, 1]}, ALL_WEIGHTS),
    "matching": ({"name": "nft", "steps": 2, "group": 2, "levels_per_sample": 1}, {}),
    "gradient": ({"name": "draft", "steps": 3, "group": 2, "last": 1}, ALL_WEIGHTS),
}
KINDS = (*IMAGES, "text")
FORMULAS = """
from tests.support.pretended_cuda import compiled
compiled.load()
import torch
from dataclasses import replace
from tests.support.pretended_cuda.runtime import install
ledger = install()
from flowrl.likelihoods.rows import TransitionRows
from flowrl.likelihoods.transition import Transition, scaled_by_step
from samplers import mean_log_prob
from samplers.counter_noise import counter_normal
from flowrl.models.diffusers.call.inputs.conditioning import Conditioning, EncodingLayout, Slot
from samplers.host import host_copy, picked, sent, sent_together
from flowrl.contrib.fdfo import Churn
from samplers.kernels import CPS, FlowSDE, step
from samplers.noise import row_keys
from samplers.tokens import AHEAD, draw_tokens, token_noise

draw = torch.Generator().manual_seed(0)
x, v, after = (torch.randn(4, 3, 2, 2, generator=draw) for _ in range(3))
at, to = torch.tensor([0.9, 0.9, 0.5, 0.3]), torch.tensor([0.7, 0.7, 0.3, 0.1])
number = torch.tensor([0, 0, 1, 2])

def rows(kernel, send):
    zero = send(torch.zeros(4, 1))
    places = send(torch.arange(4))
    return TransitionRows(
        prompt=places, advantage=zero, mask=zero > 1, old=None, x=send(x), x_next=send(after),
        sigma=send(at), sigma_next=send(to), kernel=kernel, state=number,
    )

def found(kernel, send):
    g = step(kernel, send(x), send(v), send(at), send(to))
    moved = send(torch.full((4, 1), 0.3))
    made = rows(kernel, send)
    forms = ("exact", "published", "velocity", "mean")
    kl = [scaled_by_step(form, moved, made) for form in forms]
    likelihood = Transition()
    def policy(x, sigma, prompt):
        return x * 0.5
    whole = likelihood.evaluate(policy, made)
    return [g.mean, g.std, mean_log_prob(g, send(after)), *kl, whole.logp, whole.out]

for kernel in (FlowSDE(0.7), CPS(0.8), Churn(0.2)):
    here = found(kernel, lambda value: value)
    with ledger.counting():
        there = found(kernel, lambda value: sent(value, "cuda"))
    assert ledger.total("sync") == 0 and ledger.total("upload") == 0, ledger.counts
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=2e-5, atol=2e-6)
same, index = sent(torch.full((4,), 0.5), "cuda"), sent(torch.tensor([2, 0]), "cuda")
assert picked(same, index).cpu().tolist() == host_copy(picked(same, index)).tolist() == [0.5] * 2
levels = sent(at, "cuda")
assert picked(levels, index).cpu().tolist() == at[[2, 0]].tolist()
near = picked(levels, sent(torch.tensor([1, 2]), "cuda"))
assert near.host.data_ptr() == levels[1:].host.data_ptr()  # a view
assert near.cpu().tolist() == host_copy(near).tolist() == at[1:3].tolist()
mixed = [at, number, number > 0, to.view(2, 2)[:1]]  # two sizes of one dtype
with ledger.counting():
    moved = sent_together(mixed, "cuda")
assert ledger.total("pinned") == 3 and ledger.total("upload") == 0, ledger.counts  # of 3 dtypes
for one, other in zip(mixed, moved, strict=True):
    assert other.is_cuda and torch.equal(one, other.cpu()) and torch.equal(one, host_copy(other))

texts = torch.randn(3, 2, generator=draw)
layout = EncodingLayout((1,), (Slot(axis=0),))
encoded = Conditioning(layout, (sent(texts, "cuda"),), ("a", "b", "c"))
taken = encoded.take([2, 0])
assert encoded.take([2, 0]) is taken and encoded.take([0, 2]) is not taken
for _ in range(2):  # a pipeline may write into what it is given
    encoded.take([1, 1]).values[0].add_(1)
assert torch.equal(encoded.take([1, 1]).values[0].cpu(), texts[[1, 1]])
other = replace(encoded, values=(sent(-texts, "cuda"),))
assert torch.equal(other.take([1, 1]).values[0].cpu(), -texts[[1, 1]])
keys = row_keys([(0, 1), (0, 2)])
for most, drawn in ((1, 1), (5, 5), (2**20, AHEAD // 16)):  # 2 rows of 7 blocks and 1 token
    ahead = token_noise(sent(keys, "cuda"), 3, 7, most)
    assert len(ahead) == drawn
    for place in {0, drawn - 1}:
        assert torch.equal(ahead[place].cpu(), token_noise(keys, 3 + place, 7)[0])
said = torch.randn(2, 40, generator=draw).softmax(1)
(noise,) = token_noise(keys, 3, 40)
with ledger.counting():
    there = draw_tokens(sent(said, "cuda"), sent(noise, "cuda"))
assert ledger.total("sync") == 0, ledger.counts
assert torch.equal(there.cpu(), draw_tokens(said, noise))

numbers = sent(torch.ones(1000), "cuda")
with ledger.counting():
    numbers + numbers
    numbers.expand(5, 1000) * 2.0
    numbers[sent(torch.arange(3), "cuda")]
    numbers.scatter_(0, sent(torch.arange(5), "cuda"), 2.0)
added, expanded, moved, taken = 2 * 4000, 4000 + 20000, 2 * (24 + 40), 2 * 12
placed = 5 * (8 + 4)
assert ledger.total("kernel_bytes") == added + expanded + moved + taken + placed, ledger.counts

for noise in (counter_normal(row_keys([(0, 1), (0, 2)]), (3, 37), at) for at in ("cpu", "cuda")):
    drawn = noise.cpu() if noise.device.type == "cpu" else torch.testing.assert_close(
        noise.cpu(), drawn, rtol=0, atol=0
    )
print("equal")
"""


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    try:
        compiled.library()
    except compiled.NoCompiler as error:
        pytest.skip(str(error))


def written(folder: Path, tree: dict[str, Any], name: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def settings(folder: Path, pipeline: Path, kind: str) -> dict[str, Any]:
    if kind == "text":
        tree = yaml.safe_load((PROJECT / "configs/text_demo.yaml").read_text())
        tree["recipe"] |= {"group": 4}
        tree["prompts"] |= {"per_iteration": 2}
        return tree
    recipe, model = IMAGES[kind]
    # the chain is drawn and scored in parts
    train = {"updates": 2, "rows_per_call": 2} if kind == "chain" else {"updates": 1}
    tree = runs.tree(pipeline, folder, recipe, self_test="off", **train)
    tree["model"] |= model
    return tree


def command_of(*paths: Path) -> list[str]:
    return [sys.executable, "scripts/benchmarks/device_report.py", "--json", *map(str, paths)]


def reports(*paths: Path) -> dict[str, dict[str, Any]]:
    """The reports of runs by their names, of one process."""
    command = command_of(*paths)
    done = subprocess.run(
        command, cwd=PROJECT, env=runs.environment(), capture_output=True, text=True, check=False
    )
    lines = map(json.loads, (line for line in done.stdout.splitlines() if line.startswith("{")))
    found = {Path(each["run"]).stem: each for each in lines}
    assert len(found) == len(paths), f"after {list(found)}: {done.stderr[-3000:]}"
    return found


@pytest.fixture(scope="module")
def reported(pipeline, tmp_path_factory) -> Reported:
    """The report of a kind's run. One process does a run of each kind: its start takes longest."""
    folder, kept = tmp_path_factory.mktemp("reports"), {}

    def report(kind: str) -> dict[str, Any]:
        if not kept:
            kept.update(
                reports(*(written(folder, settings(folder, pipeline, k), k) for k in KINDS))
            )
        return kept[kind]

    return report


def whole(found: dict[str, Any]) -> None:
    """No operation mixes devices, and the report has seen an iteration."""
    assert found["mixes"] == 0, found["mixed"]
    assert found["calls"]["sampling"] > 0 and found["calls"]["training"] > 0
    assert found["live_bytes"] > 1e5
    assert all(found["kernel_bytes_per_call"][phase] > 100 for phase in found["calls"])
    assert found["whole_iteration"]["float64"] == 0  # mps has none, and others are slow


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_operation_mixes_devices(reported, kind):
    whole(reported(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", IMAGES)
def test_sampling_waits_for_nothing_and_an_optimizer_step_once(reported, kind):
    """The step waits for the norm of its gradient, with its metrics. An iteration that samples by
    an average asks once whether that is still the trained weights."""
    report = reported(kind)
    assert report["syncs_per_call"]["sampling"] == 0, report["by_line"]
    assert report["uploads_per_call"]["sampling"] == 0, report["by_line"]
    averaged = kind == "matching"
    assert report["syncs_per_update"] <= 1 + averaged / report["updates"], report["by_line"]
    assert report["pinned_per_call"]["sampling"] > 0  # noise does not block


@pytest.mark.slow
def test_texts_wait_once_a_call_of_generate(reported):
    """For five checks of arguments in transformers' `generate` and a copy of the tokens; not for
    the stopping check of each. In training transformers asks once a call whether texts are packed.
    """
    report = reported("text")
    calls = report["calls"]
    waits = {phase: round(report["syncs_per_call"][phase] * calls[phase]) for phase in calls}
    assert waits["sampling"] == 6, report["by_line"]
    assert waits["training"] == calls["training"] + report["updates"], report["by_line"]
    assert report["uploads_per_call"]["training"] == 0
    mine = [each for each in report["by_line"] if " > transformers" not in each["line"]]
    assert not any("upload" in each for each in mine), mine


@pytest.mark.slow
def test_densities_and_divergences_are_those_of_the_cpu():
    """A GPU computes them by fewer operations, with factors of the host, and waits for nothing."""
    command = [sys.executable, "-c", FORMULAS]
    done = subprocess.run(
        command, cwd=PROJECT, env=runs.environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout == "equal\n", done.stderr[-3000:]


TEXTS = """
import sys
from tests.support.pretended_cuda import compiled
compiled.load()
import torch
from tests.support.pretended_cuda.runtime import install
install()
from flowrl.models.language.generation import Generation
from flowrl.models.language.policy import CausalPolicy
from samplers.generate import TokenRequest
from samplers.noise import row_keys

def written(device, room):
    policy = CausalPolicy.load(sys.argv[1], dtype=torch.float32, device=torch.device(device))
    contexts, rows = [[3, 4, 5], [6, 7], [8]], 3
    keys = row_keys([(0, row) for row in range(rows)])
    asked = TokenRequest(contexts, keys, torch.full((rows,), room), 1.0, 0.9, spread=True)
    seen = []
    policy.model.register_forward_pre_hook(lambda *_: seen.append(1))
    stop = [*policy.stops.tokens, *range(8, 14)]  # likely ones, so that all texts end early
    return Generation(policy.model, stop)(asked), len(seen)

for room in (1, 24):
    (here, calls), (there, more) = written("cpu", room), written("cuda", room)
    assert here.ids.shape == there.ids.shape and torch.equal(here.lengths, there.lengths)
    told = torch.arange(here.ids.shape[1]) < here.lengths[:, None]
    assert torch.equal(here.ids[told], there.ids[told])
    torch.testing.assert_close(here.logp[told], there.logp[told])
    torch.testing.assert_close(here.spread[told], there.spread[told])
    assert torch.equal(here.stopped, there.stopped)
    late = here.ids.shape[1] < room
    assert more == calls + late, (calls, more)
assert late, "no text ended early"
print("equal")
"""


@pytest.mark.slow
def test_texts_are_those_of_the_cpu_by_one_call_more(tmp_path):
    """Whether all have ended is read a token late, and the token beyond the end is dropped."""
    command = [sys.executable, "-c", TEXTS, str(tiny_lm.write(tmp_path / "model"))]
    done = subprocess.run(
        command, cwd=PROJECT, env=runs.environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout == "equal\n", done.stderr[-3000:]


MOST = {"chain": 24, "matching": 24, "gradient": 16}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MOST)
def test_a_sampling_call_has_few_operations_outside_of_the_network(reported, kind):
    found = reported(kind)
    assert found["kernels_per_call"]["sampling"] <= MOST[kind], found["by_line"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_call_has_at_most_40_operations_outside_of_the_network(reported, kind):
    """Those of the decoder and of the reward count where the reward's gradient trains."""
    found = reported(kind)
    assert found["kernels_per_call"]["training"] <= 40, found["by_line"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", IMAGES)
def test_media_leave_the_device_once(reported, kind):
    found = reported(kind)
    (media,) = (line for line in found["by_line"] if line["line"].startswith("rewards/types.py:"))
    parts = found["calls"]["sampling"] // 3 if kind == "chain" else 1  # of 3 steps; beside sampling
    assert media["download"] == parts > (kind == "chain")
    most = max(line.get("download_bytes", 0) for line in found["by_line"])
    assert (
        media["download_bytes"]
        == most
        == sum(
            line["download_bytes"]
            for line in found["by_line"]
            if line.get("download_bytes", 0) > most / 4
        )
    )
    assert not any(line["line"].startswith("rewards/guard.py") for line in found["by_line"])


@pytest.mark.slow
@pytest.mark.parametrize("names", [IMAGE_RECIPES, TEXT_RECIPES], ids=["images", "texts"])
def test_no_recipe_mixes_devices(names, pipeline, tmp_path):
    language = tiny_lm.write(tmp_path / "model")
    paths = []
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        tree = every_recipe.settings(name, folder, pipeline=pipeline, language=language)
        if name == "opd":
            tree["teachers"] = {"folders": {"all": str(every_recipe.teacher(pipeline, folder))}}
        paths.append(written(folder, tree, name))
    for found in reports(*paths).values():
        whole(found)


@pytest.mark.slow
def test_a_video_run_mixes_no_devices(tmp_path):
    pipeline = tmp_path / "model"
    tiny_pipelines_video.wan().save_pretrained(pipeline)
    recipe = {"name": "flow_grpo", "steps": 3, "group": 2}
    tree = runs.tree(pipeline, tmp_path, recipe, self_test="off")
    tree["model"]["call"] = {"height": 16, "width": 16, "num_frames": 5}
    whole(reports(written(tmp_path, tree, "video"))["video"])


@pytest.mark.slow
def test_two_processes_mix_no_devices(pipeline, tmp_path):
    """With DDP, whose collectives gloo does in the host's memory of the pretended device: each
    process counts the same, with one wait more for the other process's checks."""
    path = written(tmp_path, settings(tmp_path, pipeline, "chain"), "chain")
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(runs.free_port())}
    started = [
        subprocess.Popen(
            command_of(path),
            cwd=PROJECT,
            env=runs.environment() | shared | address | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [each.communicate(timeout=300) for each in started]
    found = []
    for out, errors in ended:
        lines = [line for line in out.splitlines() if line.startswith("{")]
        assert len(lines) == 1, errors[-3000:]
        found.append(json.loads(lines[0]))
    for each in found:
        whole(each)
        assert each["syncs_per_call"]["sampling"] == 0, each["by_line"]
        assert each["syncs_per_update"] <= 2 + 2 / each["updates"], each["by_line"]
    assert found[0]["calls"] == found[1]["calls"]


@pytest.mark.parametrize("weighted", [True, False])
def test_the_backward_pass_of_rms_norm_is_autograd_s(weighted):
    """torch has it for a GPU only, and chooses it where it is built with CUDA."""
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.linspace(-1, 2, 8, requires_grad=True) if weighted else None
    out = torch.nn.functional.rms_norm(x, [8], weight, 1e-6)
    gradient = torch.linspace(-1, 1, out.numel()).view_as(out)
    inputs = [x] if weight is None else [x, weight]
    wanted = torch.autograd.grad(out, inputs, gradient)
    _, inverse = torch.ops.aten._fused_rms_norm(x.detach(), [8], weight, 1e-6)
    backward = HOST["_fused_rms_norm_backward"]
    made = backward(gradient, x.detach(), [8], inverse.detach(), weight, [True, True])
    for one, other in zip(made, wanted, strict=False):
        torch.testing.assert_close(one, other)
    assert backward(gradient, x.detach(), [8], inverse, weight, [False, False]) == (None, None)
