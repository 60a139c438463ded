"""What every demo's pipeline folder promises, and a trained demo for plain diffusers to repeat."""

from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from flowrl.run.evaluate.evaluate import HeldOutResult, Trial, evaluate_held_out
from flowrl.run.save import checkpoint
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from tests.support.iterations import iterate


def loaded(folder: Path) -> DiffusionPipeline:
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def check_small_and_halved(folder: Path, most_bytes: float, weights: int) -> None:
    """At most so many bytes, so many files of weights in half precision, nothing to execute."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= most_bytes
    assert {file.suffix for file in files} == {".safetensors", ".json"}
    halved = [file for file in files if file.suffix == ".safetensors"]
    assert len(halved) == weights
    for file in halved:
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float16}


def evaluated_after_training(session: Session, steps: int, folder: Path) -> HeldOutResult:
    """Two iterations that change the evaluation's samples, and that evaluation. The weights are in
    `folder`/weights, the evaluation's noise in `folder`/latents.safetensors."""
    assert session.held_out is not None
    judged = session.held_out, session.judges
    before = evaluate_held_out(session.learner, *judged).samples.media
    progress = Progress()
    for _ in range(2):
        iterate(session, progress)
    result = evaluate_held_out(session.learner, *judged)
    assert (result.samples.media - before).abs().max() > 1e-4  # it has learned
    checkpoint.export(session.learner, folder / "weights")
    e = session.run.evaluate
    trial = Trial.of(session.held_out, e.samples, e.per_prompt, steps, e.seed)
    noise = trial.noise(session.learner.policy.shape(steps))
    save_file({"latents": noise}, folder / "latents.safetensors")
    return result
