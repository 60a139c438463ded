"""`flowrl prove`, and starts of `train` that find what it has kept."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.whole import proof_cache as proof_cache
from tests.support import runs

torch.set_num_threads(1)


@pytest.fixture
def file(pipeline: Path, tmp_path: Path) -> Path:
    return runs.write(runs.tree(pipeline, tmp_path, runs.FLOW_GRPO, iterations=1), tmp_path)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of steps of all proofs that are made."""
    steps: list[int] = []
    real = PipelinePolicy._prove

    def counted(self: PipelinePolicy, subject: Any):
        steps.append(subject.steps)
        return real(self, subject)

    monkeypatch.setattr(PipelinePolicy, "_prove", counted)
    return steps


def test_prove_prints_sentences_and_the_table(file: Path, capsys: Any, made: list[int]) -> None:
    assert runs.flowrl("prove", file) == 0
    first = capsys.readouterr().out
    assert "equal the pipeline's own call to the bit" in first
    assert first.count(" latents ") >= 2  # at the steps of sampling and of evaluations
    assert made == [4, 3]
    assert runs.flowrl("prove", file) == 0
    second = capsys.readouterr().out
    assert second.startswith(first) and "proven at load and over whole samples on" in second
    assert made == [4, 3]
    assert runs.flowrl("prove", file, "--no-cache") == 0
    assert "proven" not in capsys.readouterr().out
    assert made == [4, 3, 4, 3]


@pytest.mark.slow
def test_a_start_does_not_repeat_a_proof(file: Path, tmp_path: Path, capsys: Any, made) -> None:
    assert runs.flowrl("train", file, "--folder", tmp_path / "one") == 0
    assert made == [4, 3]
    assert "--no-cache" not in capsys.readouterr().out
    assert runs.flowrl("train", file, "--folder", tmp_path / "two") == 0
    assert made == [4, 3]
    assert "proven at load on" in capsys.readouterr().out
    assert runs.flowrl("train", file, "--folder", tmp_path / "three", "--no-cache") == 0
    assert made == [4, 3, 4, 3]
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("one", "two", "three")]
    kept = [[without_times(line) for line in log.splitlines()] for log in logs]
    assert kept[0] == kept[1] == kept[2]  # the same bits with a kept proof
    for entry in proof_cache.folder().iterdir():
        entry.write_text("damaged")
    assert runs.flowrl("train", file, "--folder", tmp_path / "four") == 0
    assert made == [4, 3] * 3


def without_times(line: str) -> dict[str, float]:
    return {k: v for k, v in json.loads(line).items() if not k.startswith(("seconds", "memory"))}


@pytest.mark.slow
def test_other_weights_are_proven_again(file: Path, pipeline: Path, tmp_path: Path, made) -> None:
    other = shutil.copytree(pipeline, tmp_path / "other")
    assert runs.flowrl("prove", file, "--model", other) == 0
    count = len(made)
    weights = other / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert runs.flowrl("prove", file, "--model", other) == 0
    assert len(made) == 2 * count


@pytest.mark.slow
def test_a_model_without_a_file(pipeline: Path, capsys: Any) -> None:
    assert runs.flowrl("prove", "--model", pipeline, "--recipe.steps", "3", "--model.height", "16",
                       "--model.width", "16") == 0  # fmt: skip
    assert "StableDiffusion3Pipeline" in capsys.readouterr().out


def test_a_pipeline_that_is_refused(file: Path, capsys: Any) -> None:
    """Guidance without effect: refused at load, with exit code 1, and nothing is kept."""
    assert runs.flowrl("prove", file, "--model.call", "{clip_skip: 99}") == 1
    assert "refused: StableDiffusion3Pipeline" in capsys.readouterr().err
    assert not proof_cache.folder().exists()


@pytest.mark.slow
def test_a_whole_sample_that_differs_is_refused(
    file: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = PipelinePolicy.begin
    monkeypatch.setattr(PipelinePolicy, "begin", lambda *given: lambda noise, prompt: 1.01 * noise)
    assert runs.flowrl("prove", file) == 1
    printed = capsys.readouterr()
    assert "away from the pipeline's own" in printed.err and "latents" in printed.out
    assert not proof_cache.folder().exists() and begin is not PipelinePolicy.begin


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "prove: give a run file"),
        (["missing.yaml"], "missing.yaml"),
        (["--model", "no/where/at/all"], "no/where/at/all"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, capsys: Any) -> None:
    assert runs.flowrl("prove", *words) == 2
    assert sentence in capsys.readouterr().err


def test_a_language_model_is_proven_as_a_run_does(capsys: Any) -> None:
    assert runs.flowrl("prove", "configs/text_demo.yaml") == 0
    assert "left padding changes" in capsys.readouterr().out
