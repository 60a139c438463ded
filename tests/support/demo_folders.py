"""What every demo's pipeline folder promises."""

from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file


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
