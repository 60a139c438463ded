"""Settings edited before a resume: the same bits in silence, one line, or one sentence and exit 2.

A run of three iterations is put back to its second checkpoint, one setting of its run.yaml is
changed, and it is resumed.
"""

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flowrl.settings.read import dump, run_of
from tests.support import runs, text_runs, tiny_lm
from tests.support.runs import flowrl, lines
from tests.support.warm import small

OWN = """
def bright(samples):
    return samples.media.flatten(1).mean(1)


def dark(samples):
    return -samples.media.flatten(1).mean(1)
"""
HELD_OUT: list[tuple[str, Any]] = [
    ("held_out_rewards", []),
    ("held_out_rewards", [{"name": "brightness"}]),
    ("held_out_rewards", [{"name": "jpeg", "label": "colour"}]),
    ("held_out_rewards", [{"name": "jpeg"}, {"name": "brightness"}]),
    ("held_out_rewards", [{"name": "own.py:dark"}]),
    ("held_out_rewards", [{"name": "own.py:missing"}]),
    ("held_out_rewards", [{"name": "nowhere"}]),
    ("held_out_rewards", None),
    ("rewards", [{"name": "brightness", "label": "light"}]),
    ("rewards", [{"name": "brightness", "weight": 2.0}]),
    ("rewards", [{"name": "brightness"}, {"name": "jpeg"}]),
    ("rewards", [{"name": "jpeg"}]),
    ("rewards", [{"name": "brightness", "kind": "none"}]),
    ("rewards", [{"name": "brightness", "label": ""}]),
    ("rewards", []),
    ("intermediate_rewards", [{"name": "jpeg"}]),
    ("prompts.held_out", None),
    ("prompts.held_out", "other.jsonl"),
    ("prompts.held_out", ["prompts.jsonl", "other.jsonl"]),
    ("prompts.held_out", "nowhere.jsonl"),
    ("prompts.train", "other.jsonl"),
    ("prompts.column", "text"),
    ("prompts.per_iteration", 3),
    ("prompts.per_iteration", 0),
    ("checkpoint.best", "jpeg"),
    ("checkpoint.best", "nowhere"),
    ("evaluate.every", 1),
    ("evaluate.every", 7),
    ("evaluate.every", 0),
    ("evaluate.steps", 3),
    ("evaluate.steps", None),
    ("evaluate.steps", "many"),
    ("evaluate.temperature", 0.5),
    ("evaluate.temperature", -1),
    ("evaluate.guidance", 2.0),
    ("evaluate.guidance", -1),
    ("evaluate.height", 32),
    ("evaluate.height", 7),
    ("evaluate.width", 32),
    ("evaluate.width", 7),
    ("evaluate.samples", 4),
    ("evaluate.samples", 0),
    ("evaluate.per_prompt", 2),
    ("evaluate.per_prompt", 0),
    ("evaluate.pass_at", [1]),
    ("evaluate.pass_at", [4]),
    ("evaluate.majority", True),
    ("evaluate.majority", "maybe"),
    ("evaluate.success", 0.1),
    ("evaluate.seed", 5),
    ("evaluate.average", None),
    ("train.share_prompts", True),
    ("model.call", {"max_sequence_length": 7}),
    ("model.call", {"nowhere": 1}),
    ("model.height", 7),
    ("model.dtype", "bfloat16"),
    ("model.device", "cuda"),
    ("model.guidance", {"sample": 2.0, "train": 1.0}),
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with a run of three iterations, its weights, and its second checkpoint newest."""
    place = tmp_path_factory.mktemp("edited")
    pipeline = runs.write_pipeline(place / "pipeline")
    (place / "own.py").write_text(OWN)
    tree = small(pipeline, place)
    tree["train"]["iterations"] = 3
    tree["held_out_rewards"] = [{"name": "jpeg"}, {"name": f"{place / 'own.py'}:bright"}]
    tree["evaluate"] |= {"every": 1, "samples": 4, "per_prompt": 1}
    rows = ("a green cube", "two red balls", "a cat", "a blue ball right of a dog")
    lines = [json.dumps({"prompt": text, "text": text}) + "\n" for text in rows]
    (place / "other.jsonl").write_text("".join(lines))
    assert flowrl("train", runs.write(tree, place), "--folder", place / "run") == 0
    shutil.copytree(place / "run" / "adapter", place / "end")
    shutil.rmtree(place / "run" / "adapter")
    for folder in place.glob("run/**/000003"):
        shutil.rmtree(folder)
    return place


def edited(tree: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(dict(tree))
    *parts, last = path.split(".")
    inner = made
    for part in parts:
        inner = inner[part]
    inner[last] = value
    return made


def placed(value: Any, place: Path) -> Any:
    """The value with the names of files beside the run."""
    if isinstance(value, dict):
        return {key: placed(each, place) for key, each in value.items()}
    if isinstance(value, list):
        return [placed(each, place) for each in value]
    ours = isinstance(value, str) and value.partition(":")[0].endswith((".py", ".jsonl"))
    return str(place / value) if ours else value


@pytest.mark.quick_cases("other.jsonl")
@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] * bool(place % 5))  # every fifth one
        for place, each in enumerate(HELD_OUT)
    ],
)
def test_an_edit_before_a_resume(finished: Path, tmp_path: Path, capsys, path: str, value: Any):
    check(finished, tmp_path / "run", path, placed(value, finished), capsys)


def check(finished: Path, run: Path, path: str, value: Any, capsys) -> None:
    runs.copied_run(finished / "run", run)
    before = yaml.safe_load((run / "run.yaml").read_text())
    (run / "run.yaml").write_text(yaml.safe_dump(edited(before, path, value)))
    code = flowrl("train", "--resume", run, "--trust")
    said = capsys.readouterr()
    text = said.out + said.err
    assert "Traceback" not in text and "was not updated" not in text, text
    if code == 2:
        errors = [line for line in said.err.splitlines() if line.startswith("flowrl: ")]
        assert len(errors) == 1 and "KeyError" not in errors[0], text
        return
    assert code == 0, text
    if "changed since checkpoint 000002" in said.out:
        return
    ends = (runs.weights(run), runs.weights(finished, "end"))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])


@pytest.mark.slow
def test_settings_that_are_refused_stay_out_of_run_yaml(finished, tmp_path, capsys):
    """By the model's own call, which is made after all other checks."""
    run = tmp_path / "run"
    runs.copied_run(finished / "run", run)
    before = (run / "run.yaml").read_bytes()
    assert flowrl("train", "--resume", run, "--model.height", "7", "--trust") == 2
    assert (run / "run.yaml").read_bytes() == before
    assert flowrl("train", "--resume", run, "--trust") == 0


@pytest.mark.slow
def test_another_judge_decides_anew_on_the_best_weights(finished, tmp_path, capsys):
    """JPEG sizes are above 1 here and brightness below it: no score of it would be a new best."""
    run = tmp_path / "run"
    runs.copied_run(finished / "run", run)
    assert flowrl("train", "--resume", run, "--checkpoint.best", "bright", "--trust") == 0
    assert "another held-out reward decides" in capsys.readouterr().out
    assert [path.name for path in (run / "best").glob("[0-9]*")] == ["000003"]


@pytest.mark.slow
def test_a_new_evaluation_is_not_compared_with_the_old_ones(finished, tmp_path, capsys):
    run = tmp_path / "run"
    runs.copied_run(finished / "run", run)
    options = ("--prompts.held_out", str(finished / "other.jsonl"), "--train.iterations", "4")
    assert flowrl("train", "--resume", run, *options, "--trust") == 0
    said = capsys.readouterr().out
    assert "the evaluation has changed" in said
    assert "held-out after 3: jpeg" in said and "held-out after 4 (against the base)" in said
    last = {line["iteration"]: line for line in lines(run)}
    assert "held_out_gain_error/jpeg" in last[4]


def test_shared_prompts_change_bits_and_are_said(tmp_path, capsys):
    model = tiny_lm.write(tmp_path / "lm")
    tree = text_runs.tree(model, tmp_path, text_runs.GRPO)
    tree["train"]["iterations"] = 1
    assert flowrl("train", runs.write(tree, tmp_path), "--folder", tmp_path / "run") == 0
    capsys.readouterr()
    words = ("--train.iterations", "2", "--train.share_prompts", "true")
    assert flowrl("train", "--resume", tmp_path / "run", *words) == 0
    assert "train.share_prompts false -> true" in capsys.readouterr().out


CANDIDATES = (None, True, False, 0, 1, 2, -1, 0.5, 3, "nonsense", [], {}, "cpu", [1], ["x"])
UNTRIED = {"model.compile", "track.with"}  # half a minute each; a tracker may be installed


def leaves(tree: Mapping[str, Any], at: str = "") -> list[str]:
    found = []
    for name, value in tree.items():
        found += leaves(value, f"{at}{name}.") if isinstance(value, Mapping) else [f"{at}{name}"]
    return found


@pytest.mark.slow
def test_every_leaf_with_every_candidate(finished, tmp_path, capsys):
    settings = dump(run_of(finished / "run"))
    paths = [path for path in leaves(settings) if path not in UNTRIED]
    assert len(paths) > 90
    wrong = []
    for path in paths:
        for value in CANDIDATES:
            run = tmp_path / "run"
            try:
                check(finished, run, path, value, capsys)
            except AssertionError as error:
                wrong.append(f"{path}: {value!r}: {str(error)[-600:]}")
            shutil.rmtree(run)
    assert not wrong, "\n\n".join(wrong)
