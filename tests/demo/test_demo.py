"""The demo's own pipeline through the product: what a run saves is what plain diffusers paints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl.paths import PROJECT
from flowrl.run.evaluate.evaluate import HeldOutResult, Trial, evaluate_held_out
from flowrl.run.save import checkpoint
from flowrl.session.progress import Progress
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings.read import dump, read_run, run_from
from tests.support.iterations import iterate

PLAIN = """
import json, sys
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
base, adapter, given, out = sys.argv[1:5]
pipe = DiffusionPipeline.from_pretrained(base)
if adapter:
    pipe.load_lora_weights(adapter)
images = pipe(
    json.loads(sys.argv[5]), latents=load_file(given)["latents"], num_inference_steps=5,
    sigmas=[1 - i / 5 for i in range(5)], guidance_scale=1.0, max_sequence_length=1,
    output_type="pt",
).images
assert not any(name.startswith(("flowrl", "samplers", "rewards")) for name in sys.modules)
save_file({"images": images.contiguous()}, out)
"""


def opened(name: str, folder: Path, **changes: dict) -> Session:
    """A demo configuration, cut down to a few seconds."""
    tree = dump(read_run(PROJECT / "configs" / name))
    tree["prompts"]["per_iteration"] = 4
    tree["evaluate"] |= {"samples": 8, "steps": 5}
    tree["model"]["device"] = "cpu"
    for section, values in changes.items():
        tree[section] |= values
    run = run_from(tree, "test")
    return open_session(run, folder, open_accelerator(run, folder))


def painted_without_flowrl(
    session: Session, result: HeldOutResult, folder: Path, *, adapter: bool
) -> torch.Tensor:
    assert session.held_out is not None
    e = session.run.evaluate
    trial = Trial.of(session.held_out, e.samples, e.per_prompt, e.steps, e.seed)
    latents = trial.noise(session.learner.policy.shape(e.steps))
    save_file({"latents": latents}, folder / "latents.safetensors")
    base = PROJECT / "flowrl" / "demo" / "shapes-sd3" if adapter else folder / "weights"
    words = [base, folder / "weights" if adapter else "", folder / "latents.safetensors"]
    words += [folder / "images.safetensors", json.dumps(list(result.samples.prompts))]
    command = [sys.executable, "-c", PLAIN, *map(str, words)]
    subprocess.run(command, check=True, cwd=folder, capture_output=True)
    return load_file(folder / "images.safetensors")["images"]


@pytest.mark.parametrize(
    "name", [pytest.param(f"{name}.yaml", marks=pytest.mark.slow) for name in ("demo_lora", "demo")]
)
def test_plain_diffusers_paints_the_last_evaluation(tmp_path, name):
    session = opened(name, tmp_path)
    before = evaluate_held_out(session.learner, session.held_out, session.judges)
    progress = Progress()
    for _ in range(2):
        iterate(session, progress)
    result = evaluate_held_out(session.learner, session.held_out, session.judges)
    assert result is not None
    assert before is not None
    checkpoint.export(session.learner, tmp_path / "weights")
    plain = painted_without_flowrl(session, result, tmp_path, adapter=name == "demo_lora.yaml")
    assert (result.samples.media - before.samples.media).abs().max() > 1e-3  # it has learned
    torch.testing.assert_close(plain, result.samples.media, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_demo_climbs_a_reward_in_a_few_iterations(tmp_path):
    """Dark pictures are easy to learn: the loop as a whole works on a real model."""
    changes = {"train": {"lr": 5e-4}, "recipe": {"group": 8}}
    session = opened("demo.yaml", tmp_path, **changes)
    run = run_from(
        dump(session.run) | {"rewards": [{"name": "brightness", "kind": "dark"}]}, "test"
    )
    session = open_session(run, tmp_path, session.accelerator)
    progress = Progress()
    rewards = [iterate(session, progress).metrics["reward"] for _ in range(8)]
    spread = 0.03  # of one sample's brightness; a mean of 32 has a sixth of it
    assert sum(rewards[-2:]) / 2 - sum(rewards[:2]) / 2 > 0.5 * spread, rewards
