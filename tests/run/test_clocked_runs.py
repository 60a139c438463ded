"""Whole runs of pipelines whose frames are at levels of their own: interrupted, on two processes,
and with a worker, beside the run in one go in one process."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support import process_runs
from tests.support.runs import flowrl
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.calls_videos import VIDEO_SPECIALS
from tests.support.zoo.pipelines import tiny

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
WAVE = "SkyReelsV2DiffusionForcingPipeline", {"ar_step": 1, "causal_block_size": 1}
CHUNKS = "HeliosPipeline", {"num_frames": 9}
CASES: dict[str, tuple[str, dict[str, Any]]] = {"wave": WAVE, "chunks": CHUNKS}
ADAPTER = Path("adapter") / "pytorch_lora_weights.safetensors"


def settings(name: str, at: Path, **recipe: Any) -> dict[str, Any]:
    at.mkdir(exist_ok=True)
    kind, call = CASES[name]
    made = tiny(getattr(diffusers, kind), SPECIALS | VIDEO_SPECIALS, SIZES)
    made.pipe.save_pretrained(str(at / "pipeline"))
    (at / "prompts.txt").write_text("a red cube\ntwo blue cat\n")
    prompts = {"train": str(at / "prompts.txt"), "held_out": str(at / "prompts.txt")}
    return {
        "recipe": {"name": "flow_grpo", "steps": 3, "group": 2, **recipe},
        "model": {
            "pipeline": str(at / "pipeline"),
            "guidance": 3.0,
            "call": made.call | call,
            "lora": {"rank": 2},
        },
        "prompts": prompts | {"per_iteration": 2},
        "rewards": ["brightness"],
        "train": {"iterations": 2, "lr": 1e-3},
        "evaluate": {"steps": 3, "every": 2, "samples": 2},
    }


@pytest.fixture(scope="module", params=CASES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the settings, and the run in one go."""
    place = tmp_path_factory.mktemp(request.param)
    (place / "run.yaml").write_text(yaml.safe_dump(settings(request.param, place)))
    assert flowrl("train", place / "run.yaml", "--folder", place / "whole") == 0
    return place


def check_same(run: Path, whole: Path) -> None:
    ours, theirs = load_file(run / ADAPTER), load_file(whole / "whole" / ADAPTER)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert any(value.abs().max() > 0 for name, value in theirs.items() if "lora_B" in name)


def test_a_resume_has_the_bits_of_the_run_in_one_go(whole: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    assert flowrl("train", whole / "run.yaml", "--folder", cut, "--train.iterations", "1") == 0
    assert flowrl("train", "--resume", cut, "--train.iterations", "2") == 0
    check_same(cut, whole)


def test_a_worker_changes_no_bit(whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run = tmp_path / "run"
    assert flowrl("train", whole / "run.yaml", "--folder", run, "--workers.sampling", "1") == 0
    check_same(run, whole)


def test_a_recipe_that_needs_one_level_is_refused(tmp_path: Path, capsys: Any) -> None:
    given = settings("chunks", tmp_path)
    given["recipe"] = {"name": "nft", "steps": 3, "group": 2}
    given["model"]["guidance"] = "none"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    assert flowrl("train", tmp_path / "run.yaml", "--folder", tmp_path / "run") != 0
    said = capsys.readouterr()
    assert "trains on densities of steps, such as flow_grpo" in said.out + said.err


def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    jobs: dict[str, process_runs.Job] = {
        name: {"settings": settings(name, tmp_path / name), "iterations": 1} for name in CASES
    }
    both = process_runs.together(process_runs.DDP, jobs, tmp_path / "both")
    for name, job in jobs.items():
        one = process_runs.alone(job, tmp_path / f"{name}_alone", rows_per_call=3)
        told, wanted = (
            process_runs.told(tmp_path / place, file)
            for place, file in (("both", name), (f"{name}_alone", "alone"))
        )
        assert told["processes"].startswith("2 processes") and told["moved"] > 1e-5
        assert told["norms"] == pytest.approx(wanted["norms"], rel=1e-3) and wanted["norms"][0] > 0
        # the first step of Adam has one size, and the sign of a gradient near 0 is of its rounding
        away = torch.cat([(one[key] - both[name][key]).abs().flatten() for key in one])
        assert float((away > 1e-5).float().mean()) < 0.1, name
