"""`flowrl evaluate` and `flowrl sample`: own guidance and size, the base beside, bare models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.cli.commands import split_settings
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.open import evaluation_policy
from flowrl.run.evaluate.evaluate import Trial, draw_trial
from flowrl.session.learner import load_policy
from flowrl.settings.read import run_from
from tests.models.test_pipeline_zoo import zoo
from tests.support import runs, text_runs, tiny_lm

SIZE = {"height": 24, "width": 16}
OWN = {"guidance": 2.0, **SIZE}
OPTIONS = ["--guidance", 2.0, "--height", 24, "--width", 16]


@pytest.fixture(scope="module")
def finished(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose evaluations have their own guidance and size."""
    folder = tmp_path_factory.mktemp("finished")
    tree = runs.tree(pipeline, folder, runs.NFT, iterations=1)
    tree["evaluate"] |= {**OWN, "pass_at": [2], "success": 0.4}
    assert runs.flowrl("train", runs.write(tree, folder), "--folder", folder / "run") == 0
    return folder / "run"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_it_repeats_the_evaluations_of_training(finished: Path, tmp_path: Path, capsys) -> None:
    assert runs.flowrl("evaluate", finished, "--out", tmp_path / "both.jsonl") == 0
    said, made = capsys.readouterr().out, rows(tmp_path / "both.jsonl")
    now, base = (np.array([r["brightness"] for r in s]) for s in (made, [r["base"] for r in made]))
    first, last = runs.lines(finished)
    assert base.mean() == pytest.approx(first["held_out/brightness"], abs=1e-7)
    assert now.mean() == pytest.approx(last["held_out/brightness"], abs=1e-7)
    assert np.abs(now - base).max() > 0
    assert f"difference {(now - base).mean():+.4f} (95 % interval" in said
    assert "over 4 prompts" in said and "pass@2/brightness: 1.0000" in said
    assert "diversity within a prompt" in said
    alone = ["evaluate", finished, "--weights", "base", "--out", tmp_path / "base.jsonl"]
    assert runs.flowrl(*alone) == 0
    assert [r["brightness"] for r in rows(tmp_path / "base.jsonl")] == base.tolist()
    assert "difference" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_without_a_run_has_the_same_scores(
    finished: Path, pipeline: Path, tmp_path: Path
) -> None:
    assert runs.flowrl("evaluate", finished, "--out", tmp_path / "run.jsonl") == 0
    prompts = finished.parent / "prompts.jsonl"
    words = ["--model", pipeline, "--adapter", finished / "adapter", "--prompts", prompts]
    words += ["--rewards", "brightness", "--steps", 3, "--samples", 8, "--per-prompt", 2]
    words += [*OPTIONS, "--model.device=cpu", "--out", tmp_path / "bare.jsonl"]
    assert runs.flowrl("evaluate", *words) == 0
    pairs = zip(rows(tmp_path / "run.jsonl"), rows(tmp_path / "bare.jsonl"), strict=True)
    for with_run, bare in pairs:
        assert bare["brightness"] == pytest.approx(with_run["brightness"], abs=1e-5)
        assert bare["base"]["brightness"] == pytest.approx(with_run["base"]["brightness"], abs=1e-5)


@pytest.mark.slow
def test_data_sets_are_scored_by_name(finished: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "one.txt").write_text("a red ball\na blue ball\n")
    (tmp_path / "two.txt").write_text("a cat\n")
    sets = [str(tmp_path / "one.txt"), f"{{source: {tmp_path / 'two.txt'}, name: cats}}"]
    out = tmp_path / "sets.jsonl"
    words = ["evaluate", finished, "--alone", "--per-prompt", 2, "--samples", 6, "--out", out]
    assert runs.flowrl(*words, "--prompts", *sets) == 0
    said = capsys.readouterr().out
    cats = [r["brightness"] for r in rows(out) if r["data_set"] == "cats"]
    assert len(cats) == 2 and len(rows(out)) == 6
    assert f"  cats: {np.mean(cats):.4f} +-" in said and "(standard error, 2 samples)" in said
    assert runs.flowrl(*words, "--prompts", sets[0], sets[0]) == 2
    assert "--prompts: " in capsys.readouterr().err


def test_samples_of_a_model_without_a_run(pipeline: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    words = ["sample", "--model", pipeline, "a red ball", "two dogs", "--count", 1, "--out", out]
    assert runs.flowrl(*words, "--steps", 2, "--model.device", "cpu") == 0
    written = {"000.png", "001.png", "grid.png", "prompts.jsonl"}
    assert {path.name for path in out.iterdir()} == written
    assert runs.flowrl(*words[:-1], tmp_path / "new", "--steer", "best") == 2
    assert "add --rewards" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--rewards", "brightness"), "give either a run's folder or, with --model"),
        (("--model", "nothing", "--rewards", "brightness"), "--model: nothing"),
        (("--model", "PIPE", "--prompts", "x.txt"), "add some with --rewards"),
        (("--model", "PIPE", "--rewards", "brightness"), "--model has no prompts"),
        (("--model", "PIPE", "--adapter", "none"), "--adapter: no folder none"),
        (("--model", "PIPE", "--model.hieght", "3"), "--model.hieght is not known"),
    ],
)
def test_a_mistake_is_a_sentence(words, sentence, pipeline, tmp_path, capsys) -> None:
    (tmp_path / "x.txt").write_text("a\n")
    given = [
        str(pipeline) if w == "PIPE" else w.replace("x.txt", f"{tmp_path}/x.txt") for w in words
    ]
    assert runs.flowrl("evaluate", *given) == 2
    assert sentence in capsys.readouterr().err


def test_settings_are_told_from_other_words() -> None:
    words = ["run", "--count", "2", "--model.call", "{a: 1}", "--evaluate.steps=3", "--seed=1.5"]
    assert split_settings(words) == (
        ["run", "--count", "2", "--seed=1.5"],
        ["--model.call", "{a: 1}", "--evaluate.steps=3"],
    )


@pytest.mark.slow
def test_another_size_is_that_of_a_model_loaded_at_it(pipeline: Path, tmp_path: Path) -> None:
    tree = runs.tree(pipeline, tmp_path, runs.NFT)
    plain = run_from(tree, "test")
    sized = run_from(tree | {"evaluate": tree["evaluate"] | OWN}, "test")
    model = tree["model"] | {**SIZE, "guidance": {"sample": 2.0, "train": 1.0}}
    loaded = load_policy(run_from(tree | {"model": model}, "test"), torch.device("cpu"))
    policy = load_policy(plain, torch.device("cpu"))
    assert evaluation_policy(policy, plain) is policy
    trial = Trial(plain.prompts.read("held_out"), (0, 1), 2, 3, 7)
    before = draw_trial(policy, trial).samples.media
    made = draw_trial(evaluation_policy(policy, sized), trial).samples.media
    assert made.shape[-2:] == (24, 16) and before.shape[-2:] != (24, 16)
    assert torch.equal(made, draw_trial(loaded, trial).samples.media)
    assert torch.equal(before, draw_trial(policy, trial).samples.media)


def test_another_size_keeps_the_images_of_the_model(pipeline: Path, tmp_path: Path) -> None:
    tree = runs.tree(pipeline, tmp_path, runs.NFT)
    sized = run_from(tree | {"evaluate": tree["evaluate"] | OWN}, "test")
    image = Image.new("RGB", (16, 16))
    pipe = zoo("StableDiffusion3Img2ImgPipeline").pipe
    policy = PipelinePolicy(pipe, call={"height": 16, "width": 16, "image": image})
    assert evaluation_policy(policy, sized).loop.traits.shared == {"image": image}


@pytest.mark.slow
def test_prove_covers_the_evaluations(pipeline: Path, tmp_path: Path, capsys) -> None:
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    tree["evaluate"] |= OWN
    assert runs.flowrl("prove", runs.write(tree, tmp_path)) == 0
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["4", "1.0", "latents"] in lines and ["3", "2.0", "latents"] in lines


def test_texts_have_pass_at_k_votes_and_lengths(tmp_path: Path, capsys) -> None:
    folder = tiny_lm.write(tmp_path / "model")
    tree = text_runs.tree(folder, tmp_path, text_runs.GRPO)
    prompts = tmp_path / "prompts.jsonl"
    words = ["--model", folder, "--prompts", prompts, "--model.device", "cpu", "--steps", 4]
    words += ["--rewards", "{name: exact_answer, kind: text}", "--samples", 12]
    assert tree and runs.flowrl("evaluate", *words, "--pass-at", 1, 4, "--majority") == 0
    said = capsys.readouterr().out
    for name in ("exact_answer.text", "pass@1/exact", "pass@4/exact", "majority/exact"):
        assert name in said
    assert "tokens per completion" in said
    assert runs.flowrl("evaluate", *words, "--guidance", 2) == 2
    assert "evaluate.guidance is only for images and videos" in capsys.readouterr().err
