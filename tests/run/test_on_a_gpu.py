"""A real CUDA device: the CPU's numbers, the proof of every family, the same bits twice.

`pytest -m gpu -n 8`: processes may share the device.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.language.generation import Generation
from flowrl.models.language.policy import CausalPolicy
from flowrl.paths import PROJECT
from flowrl.recipes.table import IMAGE_RECIPES, TEXT_RECIPES
from flowrl.run.model_proof import StartProof
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from samplers.counter_noise import counter_normal
from samplers.generate import TokenRequest
from samplers.noise import row_keys
from tests.support import every_recipe, runs, text_runs, tiny_lm
from tests.support.iterations import iterate
from tests.support.tiny_pipelines import NAMED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
UNSAVED = ("Qwen-Image-Edit",)  # its tiny reader of prompts has no folder
# of an iteration, with how far they may lie apart on two devices: absolute and relative
SAME = {"reward": (1e-4, 1e-3), "loss": (1e-3, 1e-2), "grad_norm": (1e-4, 2e-2)}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def language(tmp_path_factory) -> Path:
    return tiny_lm.write(tmp_path_factory.mktemp("language") / "model")


def moved(tree: dict[str, Any], device: str, dtype: str = "float32") -> dict[str, Any]:
    return tree | {"model": tree["model"] | {"device": device, "dtype": dtype}}


def finite(metrics: dict[str, float]) -> None:
    assert metrics["count/training"] > 0
    assert all(map(math.isfinite, metrics.values())), metrics


def opened(tree: dict[str, Any], folder: Path, device: str, dtype: str = "float32") -> Session:
    place = folder / f"{device}-{dtype}"
    place.mkdir(parents=True)
    AcceleratorState._reset_state(reset_partial_state=True)  # keeps to its first device
    session = runs.opened(moved(tree, device, dtype), place)
    trained = next(iter(session.learner.policies.parameters.values()))
    assert session.accelerator.device.type == trained.device.type == device
    return session


def compared(tree: dict[str, Any], folder: Path) -> None:
    """An iteration on both devices; a second one on the GPU, which has updated weights."""
    here = iterate(opened(tree, folder, "cpu"), Progress()).metrics
    session, progress = opened(tree, folder, "cuda"), Progress()
    there = iterate(session, progress).metrics
    finite(there)
    for name, (absolute, relative) in SAME.items():
        assert there[name] == pytest.approx(here[name], abs=absolute, rel=relative), name
    if "mismatch_max" in there:
        assert there["mismatch_max"] < 1e-4
    finite(iterate(session, progress).metrics)


@pytest.mark.parametrize("name", [*IMAGE_RECIPES, *TEXT_RECIPES])
def test_every_recipe_has_the_numbers_of_the_cpu(name, pipeline, language, tmp_path):
    tree = every_recipe.settings(
        name, tmp_path, pipeline=pipeline, language=language, self_test="off"
    )
    if name == "opd":
        tree["teachers"] = {"folders": {"all": str(every_recipe.teacher(pipeline, tmp_path))}}
    compared(tree, tmp_path)


def family_run(name: str, folder: Path) -> dict[str, Any]:
    """Flow-GRPO of a family's tiny pipeline, with a picture in its prompts where it wants one."""
    family = NAMED[name]
    family.build().save_pretrained(folder / "model")
    tree = runs.tree(folder / "model", folder, runs.FLOW_GRPO, self_test="off")
    tree["model"]["call"] = family.call
    if family.images:
        columns.placeholder_images(["image"], 24, 20)["image"].save(folder / "some.png")
        file = Path(tree["prompts"]["train"])
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row | {"image": "some.png"}) + "\n" for row in rows))
    return tree


@pytest.mark.parametrize("name", [name for name in NAMED if name not in UNSAVED])
def test_every_family_is_proven_and_trained(name, tmp_path):
    tree = family_run(name, tmp_path)
    compared(tree, tmp_path)
    for dtype in ("float32", "bfloat16"):
        session = opened(tree, tmp_path / "again", "cuda", dtype)
        StartProof(session, cache=False).prove()
        found = iterate(session, Progress()).metrics
        if not math.isfinite(found["grad_norm"]):  # seen of FLUX.1 in bfloat16 on an H200
            with sdpa_kernel(SDPBackend.MATH):
                again = opened(tree, tmp_path / "plain", "cuda", dtype)
                norm = iterate(again, Progress()).metrics["grad_norm"]
            pytest.fail(f"{dtype}: the gradient's norm is {norm} with PyTorch's plain attention")
        finite(found)


@pytest.mark.parametrize("recipe", [runs.FLOW_GRPO, runs.NFT], ids=["flow_grpo", "nft"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_interruption_changes_no_bit_of_images(recipe, dtype, pipeline, tmp_path):
    tree = runs.tree(pipeline, tmp_path, recipe, iterations=2, self_test="off")
    runs.check_resumed_bits(moved(tree, "cuda", dtype), tmp_path)


def test_an_interruption_changes_no_bit_of_texts(language, tmp_path):
    tree = text_runs.tree(language, tmp_path, text_runs.GRPO, iterations=2)
    runs.check_resumed_bits(moved(tree, "cuda"), tmp_path)


def test_noise_of_the_device_is_the_cpus_to_the_bit():
    keys = row_keys([(0, 1), (0, 2), (3, 4)])
    here, there = (counter_normal(keys, (16, 37, 5), device) for device in ("cpu", "cuda"))
    assert there.is_cuda and torch.equal(here, there.cpu())


def written(model: Path, device: str, room: int) -> tuple[Any, int]:
    """Three texts that end at different places, and the calls of the model."""
    policy = CausalPolicy.load(str(model), dtype=torch.float32, device=torch.device(device))
    contexts, keys = [[3, 4, 5], [6, 7], [8]], row_keys([(0, row) for row in range(3)])
    asked = TokenRequest(contexts, keys, torch.full((3,), room), 1.0, 0.9)
    calls = list[int]()
    policy.model.register_forward_pre_hook(lambda *_: calls.append(1))
    return Generation(policy.model, [*policy.stops.tokens, *range(8, 14)])(asked), len(calls)


@pytest.mark.parametrize("room", [1, 24])
def test_texts_are_those_of_the_cpu(room, language):
    (here, calls), (there, more) = (written(language, device, room) for device in ("cpu", "cuda"))
    assert torch.equal(here.lengths, there.lengths) and torch.equal(here.stopped, there.stopped)
    told = torch.arange(here.ids.shape[1]) < here.lengths[:, None]
    assert torch.equal(here.ids[told], there.ids[told])
    torch.testing.assert_close(here.logp[told], there.logp[told], atol=1e-5, rtol=1e-5)
    assert more == calls + (here.ids.shape[1] < room)  # whether all have ended is read a token late


def test_a_launched_process_trains_the_same_weights(pipeline, tmp_path):
    """Under NCCL, with DDP; FSDP2 refuses a single process."""
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO, iterations=2, self_test="off")
    file = runs.write(moved(tree, "cuda"), tmp_path)
    start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file",
             "configs/accelerate/ddp.yaml", "--num_processes", "1",
             "--main_process_port", str(runs.free_port())]  # fmt: skip
    ends = list[dict[str, Tensor]]()
    for name, before in (("plain", [sys.executable]), ("launched", start)):
        words = ["-m", "flowrl", "train", str(file), "--folder", str(tmp_path / name)]
        done = subprocess.run(
            [*before, *words], cwd=PROJECT, env=runs.environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        ends.append(runs.weights(tmp_path / name))
    for key, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][key], atol=1e-5, rtol=1e-3)
