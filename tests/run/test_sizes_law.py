"""plan accepts => the start accepts, for sizes: what a pipeline's loop refuses at its load, plan, a
start, `prove` and `new` refuse before, in the same words, by one function, for every family of tiny
pipelines."""

import contextlib
import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.errors import UserError
from flowrl.models.description import describe
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.own_size_checks import OwnSizeChecks
from flowrl.run.watch.size_check import check_own_sizes, unknown_sizes
from flowrl.run.watch.start_check import check_start, refusals, unchecked
from flowrl.settings import PipelineSettings, RunSettings
from flowrl.settings.read import run_from
from tests.support import runs
from tests.support.advice import advice
from tests.support.tiny_pipelines import NAMED

QUICK = ("SD3", "FLUX.1")
SIDES, MORE_SIDES = (17, 36), (18, 20, 24)
FRAMES = (1, 2, 4, 5, 7, 8)
FAMILIES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK), id=name) for name in NAMED
]
ROUNDS = {"FLUX.1", "FLUX.1-Kontext", "FLUX.2", "Qwen-Image", "Qwen-Image-Edit"}


def written(name: str, folder: Path) -> Any:
    pipe = NAMED[name].build()
    with contextlib.redirect_stdout(io.StringIO()):
        pipe.save_pretrained(folder / "pipe")
    return pipe


def run_at(name: str, folder: Path, **sizes: int) -> RunSettings:
    """A run of this family at a size, of which the file's others are those of its tests."""
    call = {k: v for k, v in NAMED[name].call.items() if k not in ("height", "width")} | sizes
    sides = {k: NAMED[name].call[k] for k in ("height", "width") if k in NAMED[name].call}
    sides |= {k: call.pop(k) for k in ("height", "width") if k in call}
    tree = runs.tree(folder / "pipe", folder, dict(runs.FLOW_GRPO))
    tree["model"] |= {**sides, "call": call, "guidance": None}
    return run_from(tree, "run")


def tries(name: str) -> list[dict[str, int]]:
    sides = SIDES if name in QUICK else SIDES + MORE_SIDES
    sizes = [{"height": side} for side in sides]
    more = [{"num_frames": frames} for frames in FRAMES] if "num_frames" in NAMED[name].call else []
    return [*sizes, *more]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_size_that_plan_accepts_is_one_that_the_loop_takes(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    pipe = written(name, tmp_path)
    check_own_sizes(run_at(name, tmp_path))
    refused = set[int]()
    for sizes in tries(name):
        run = run_at(name, tmp_path, **sizes)
        try:
            check_own_sizes(run)
        except UserError as error:
            said = str(error)
            assert said.startswith("model: ") and said.endswith("; choose another size")
            assert str(next(iter(sizes.values()))) in said
            refused |= set(sizes.values())
            if "num_frames" in sizes:  # the loop refuses them too
                with pytest.raises(UserError):
                    PipelinePolicy(pipe, call=NAMED[name].call | sizes)
            continue
        PipelinePolicy(pipe, call=NAMED[name].call | sizes)  # the load's own trial calls
    # an odd side is refused but by pipelines that pack latents, which round it
    assert (17 in refused) == (name not in ROUNDS)


def test_a_start_and_every_place_use_the_same_words(tmp_path: Path) -> None:
    written("Wan 2.1", tmp_path)
    run = run_at("Wan 2.1", tmp_path, height=24)
    words = "WanPipeline refuses height 24, width 16, num_frames 5: `height` and `width` have to be"
    with pytest.raises(UserError, match=f"model: {words}"):
        check_start(run)
    whole = run_at("Wan 2.1", tmp_path)
    assert not [line for line in refusals(whole) if "refuses" in line]
    for change in ({"height": 24}, {"call": {"height": 24}}):
        evaluated = whole.model_copy(
            update={"evaluate": whole.evaluate.model_copy(update=change)}, deep=True
        )
        assert any(f"evaluate: {words}" in line for line in refusals(evaluated))
    rows = runs.tree(tmp_path / "pipe", tmp_path, dict(runs.FLOW_GRPO))
    Path(rows["prompts"]["train"]).write_text('{"prompt": "a", "height": 24, "width": 16}\n')
    rows["model"] |= {"height": 16, "width": 16, "call": {"num_frames": 5}, "guidance": None}
    said = list(refusals(run_from(rows, "run")))
    assert any("line 1: " in line and words in line for line in said), said


def test_a_longest_side_is_known_before_weights(pipeline: Path, tmp_path: Path) -> None:
    tree = runs.tree(pipeline, tmp_path, dict(runs.FLOW_GRPO))
    tree["model"] |= {"height": 36, "width": 32}
    smaller = copy.deepcopy(tree)
    smaller["model"]["height"] = 32
    advice(
        "{}: {}; choose another size",
        lambda: check_own_sizes(run_from(tree, "run")),
        lambda: check_own_sizes(run_from(smaller, "run")),
    )
    with pytest.raises(UserError, match="model: height 36 is above the model's longest side of 32"):
        check_own_sizes(run_from(tree, "run"))


def test_what_no_file_states_is_named(pipeline: Path, tmp_path: Path) -> None:
    written("LTX-Video", tmp_path)
    said = unknown_sizes(run_at("LTX-Video", tmp_path))
    assert said is not None and "of LTXPipeline says which numbers of frames it rounds" in said
    assert said in list(unchecked(run_at("LTX-Video", tmp_path)))
    assert (
        unknown_sizes(run_from(runs.tree(pipeline, tmp_path, dict(runs.FLOW_GRPO)), "run")) is None
    )


def test_a_pipeline_without_checks_of_sizes_answers_nothing(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    described = describe(PipelineSettings(pipeline=str(pipeline)))
    assert described is not None
    assert OwnSizeChecks(described, {}).answers
    monkeypatch.setattr(described.kind, "check_inputs", lambda self, prompt: None)
    without = OwnSizeChecks(described, {})
    assert not without.answers and without.refusal({"height": 17}) is None
    run = run_from(runs.tree(pipeline, tmp_path, dict(runs.FLOW_GRPO)), "run")
    assert "of what height and width are multiples" in str(unknown_sizes(run))
