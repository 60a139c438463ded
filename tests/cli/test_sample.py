"""Samples are saved whatever their rewards do."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from flowrl.errors import UserError
from flowrl.paths import PROJECT
from rewards.perception.media import LUMA
from tests.support import runs
from tests.support.advice import advice
from tests.support.warm import small

OWN = """
def sided(samples):
    return [float(row["side"] == "left") for row in samples.meta]
"""


@pytest.fixture(scope="module")
def run(pipeline, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("sided")
    (place / "own.py").write_text(OWN)
    tree = small(pipeline, place) | {"rewards": [{"name": f"{place / 'own.py'}:sided"}]}
    rows = [{"prompt": f"a {c} ball", "side": s} for c, s in (("red", "left"), ("blue", "right"))]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree["train"]["iterations"] = 1
    assert runs.flowrl("train", runs.write(tree, place), "--folder", place / "run") == 0
    return place / "run"


@pytest.mark.slow
def test_a_reward_that_reads_a_column_scores_the_prompts_of_the_files(run, tmp_path, capsys):
    words = ("--count", "1", "--out", tmp_path / "out")
    assert runs.flowrl("sample", run, "a red ball", "a blue ball", *words) == 0
    said = capsys.readouterr()
    assert "unscored" not in said.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "000.png",
        "001.png",
        "grid.png",
        "prompts.jsonl",
    }


@pytest.mark.slow
def test_other_prompts_are_saved_and_unscored_with_the_reason(run, tmp_path, capsys):
    words = ("--count", "1", "--out", tmp_path / "out")
    assert runs.flowrl("sample", run, "a green cube", *words) == 0
    said = capsys.readouterr()
    assert "unscored: the reward sided raised KeyError: 'side'" in said.err
    assert "not in the run's prompt files have no columns" in said.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "000.png",
        "grid.png",
        "prompts.jsonl",
    }


@pytest.fixture(scope="module")
def joint(tmp_path_factory) -> Path:
    """A run that trained the language model alone, for one iteration."""
    place = tmp_path_factory.mktemp("joint")
    tree = yaml.safe_load((PROJECT / "configs" / "demo_joint.yaml").read_text())
    tree["recipe"]["train"] = "text"
    tree["model"]["device"] = "cpu"
    tree["prompts"]["per_iteration"] = 2
    tree["train"] = {"iterations": 1}
    tree["evaluate"] = {"every": 1, "samples": 4, "per_prompt": 2, "steps": 3}
    tree["track"] = {"images": 0, "training": 0, "panel": False}
    assert runs.flowrl("train", runs.write(tree, place), "--folder", place / "run") == 0
    return place / "run"


def pixels(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB")) / 255


def lightness(image: np.ndarray) -> float:
    return float((image @ np.asarray(LUMA)).mean())


@pytest.mark.slow
def test_the_best_rewriting_is_the_best_of_as_many_samples(joint, tmp_path, capsys):
    prompt, one, all_ = "a scarlet block west of an inky disk", tmp_path / "1", tmp_path / "8"
    given = ("sample", joint, prompt, "--rewards", "brightness")
    assert runs.flowrl(*given, "--count", "8", "--out", all_) == 0
    capsys.readouterr()
    assert runs.flowrl(*given, "--count", "1", "--rewrite", "8", "--out", one) == 0
    said = re.search(rf"^'{prompt}': '([a-z ]+)', (0\.\d+)$", capsys.readouterr().out, re.MULTILINE)
    each = [pixels(all_ / f"{i:03}.png") for i in range(8)]
    best = max(each, key=lightness)
    assert said is not None and float(said[2]) == pytest.approx(lightness(best), abs=2e-3)
    gaps = [np.abs(image - pixels(one / "000.png")).max() for image in each]
    assert min(gaps) < 2.5 / 255 < max(gaps)  # rounding of a smaller call
    assert each[int(np.argmin(gaps))] is best
    assert {path.name for path in one.iterdir()} == {
        "000.png",
        "grid.png",
        "prompts.jsonl",
    }


@pytest.mark.slow
def test_rewritings_without_a_score_are_said_to_be_the_first(joint, tmp_path, capsys):
    words = ("--rewrite", "2", "--count", "1", "--out", tmp_path / "out")
    assert runs.flowrl("sample", joint, "a scarlet block", *words) == 0
    assert "scored no image: the first rewriting of each prompt is kept" in capsys.readouterr().out


@pytest.mark.slow
def test_the_export_of_a_language_model_alone_says_how_to_use_it(joint, tmp_path):
    advice(
        "export: --merged is for runs with one model, but a joint run has two: leave it out",
        lambda: runs.ended("export", joint, "--merged", "--out", tmp_path / "export"),
        lambda: runs.ended("export", joint, "--out", tmp_path / "export"),
    )
    card = (tmp_path / "export" / "README.md").read_text()
    assert "All weights of `flowrl/demo/everyday-lm`" in card and "DiffusionPipeline" not in card
    assert "prompts of `flowrl/demo/shapes-sd3`" in card and "weights in `rewriter/`" in card
    assert "continues `{prompt} =` by at most 12 tokens" in card
    assert (tmp_path / "export" / "rewriter" / "model.safetensors").is_file()


@pytest.mark.slow
def test_rewritings_of_a_run_from_elsewhere_are_chosen_by_rewards_that_are_named(joint, tmp_path):
    """Its own rewards are not loaded. Without a rewriter no reward would help."""
    shutil.copytree(joint, tmp_path / "run")
    words = ("--count", "1", "--out", tmp_path / "out", "--rewrite", "2")
    advice(
        "sample: --rewrite needs rewards for the selection, and {}: add --rewards",
        lambda: runs.ended("sample", tmp_path / "run", "a scarlet block", *words),
        lambda: runs.ended(
            "sample", tmp_path / "run", "a scarlet block", *words, "--rewards", "brightness"
        ),
    )
    with pytest.raises(UserError, match="--rewrite is for runs of the recipe joint: leave it out"):
        runs.ended("sample", "--model", "flowrl/demo/shapes-sd3", "a", "--rewrite", "2")
