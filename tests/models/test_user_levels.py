"""Noise levels as a setting: what they are, where they are used, and what is refused."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)

from flowrl.cli.plan import describe_run
from flowrl.errors import UserError
from flowrl.models.diffusers.call.levels import user_levels
from flowrl.models.diffusers.call.levels.schedule import PipelineSchedule
from flowrl.models.diffusers.call.levels.user_levels import UserLevels
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.whole import proof_cache as proof_cache
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from flowrl.paths import PROJECT
from flowrl.run.watch.start_check import refusals
from flowrl.session.start_record import StartRecord
from flowrl.settings.model.levels import LevelShift, falling, levels_of
from flowrl.settings.read import check_plan, dump, override, read_run, run_from
from samplers import Chain, FlowSDE, Ode
from tests.support import runs
from tests.support.advice import advice
from tests.support.driving import PROMPTS, STEPS, noise, own, sample
from tests.support.runs import flowrl
from tests.support.tiny_pipelines import FAMILIES, NAMED, SQUARE, sd3

GOLDEN = PROJECT / "tests" / "golden" / "dance_flow_step.npz"
LIST = (1.0, 0.9, 0.6, 0.2)
FLOWS = {"sd3": FAMILIES["sd3"], "flux": FAMILIES["flux"], "qwen": FAMILIES["qwen"]}
FLOWS["hunyuan"] = (NAMED["HunyuanVideo"].build, NAMED["HunyuanVideo"].call)
NEAR_ZERO = ("1", "0.5", "0.2", "0.001")  # one noisy step less than four even levels have
QUADRATIC = "def quadratic(steps):\n    return [(1 - i / steps) ** 2 for i in range(steps + 1)]\n"


def levelled(pipe: Any, call: Any, sigmas: Any = LIST) -> PipelinePolicy:
    return PipelinePolicy(pipe, call=call, levels=UserLevels(partial(levels_of, sigmas), STEPS))


def as_given(pipe: Any) -> Any:
    """A copy of the pipeline whose scheduler, by the page's own lines, has no shift."""
    plain, off = copy.deepcopy(pipe), {"shift": 1.0, "use_dynamic_shifting": False}
    config = pipe.scheduler.config
    plain.scheduler = FlowMatchEulerDiscreteScheduler.from_config(
        config, shift_terminal=None, **off
    )
    return plain


@pytest.mark.parametrize(("name", "shift"), [("flux", 3.0), ("hunyuan", 5.0)])
def test_a_shift_makes_dance_grpos_own_list(name: str, shift: float) -> None:
    """`sigmas_*` are sd3_time_shift's own outputs for 16 steps."""
    published = np.load(GOLDEN)[f"sigmas_{name}"]
    np.testing.assert_allclose([*LevelShift(shift=shift).levels(16), 0.0], published, atol=1e-7)


@pytest.mark.quick_cases("sd3")
@pytest.mark.parametrize("family", FLOWS)
def test_the_pipelines_own_call_with_the_list_is_the_driven_one_to_the_bit(family: str) -> None:
    build, call = FLOWS[family]
    pipe = build()
    plain, before = as_given(pipe), copy.deepcopy(dict(pipe.scheduler.config))
    made = levelled(pipe, call)
    assert made.schedule(STEPS).sigmas[:-1] == pytest.approx(LIST, abs=1e-7)
    latents = noise(made)
    theirs = own(plain, latents, call, sigmas=list(LIST))
    assert torch.equal(sample(made, latents, None), theirs)
    assert not torch.equal(own(pipe, latents, call), theirs), "the list changes the sample"
    assert dict(pipe.scheduler.config) == before, "what is exported stays as it was"


def test_a_proof_over_whole_samples_hands_the_list_to_the_call() -> None:
    made = levelled(FAMILIES["flux"][0](), SQUARE, LevelShift(shift=3.0))
    proof = made.prove(PROMPTS, steps=STEPS, guidance=2.0)
    assert "4 steps at the levels of model.sigmas, guidance 2.0: velocity and" in str(proof)
    whole = prove_whole(made, PROMPTS, (), proof)
    assert whole.failure() is None and whole.own_steps
    assert whole.own is not None and (whole.own.latents, whole.flowrl.latents) == (0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Chain(FlowSDE(0.7), 2), Ode(2)])
def test_rollouts_walk_the_levels(plan: Any) -> None:
    """Training and evaluations both sample by rollouts, and train at their levels."""
    made = levelled(sd3(), SQUARE)
    batch = made.open(PROMPTS[:1], (), STEPS)
    (rollout,) = batch.rollouts(plan, (0,), seed=0, iteration=0)
    assert rollout.plan.sigmas == pytest.approx((*LIST, 0.0), abs=1e-7)


def test_a_scheduler_that_shifts_the_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_levels, "_AS_GIVEN", {})
    pipe = sd3(shift=3.0)
    advice(
        "model.sigmas: {} visits the levels {} instead of {}: leave sigmas out",
        lambda: levelled(pipe, SQUARE).schedule(STEPS),
        lambda: PipelinePolicy(pipe, call=SQUARE).schedule(STEPS),
    )
    with pytest.raises(UserError, match=r"levels 1, 0.9643, .* instead of 1, 0.9, 0.6, 0.2"):
        levelled(pipe, SQUARE).schedule(STEPS)


def test_other_pipelines_have_levels_of_their_own_once_those_of_the_user_are_left_out() -> None:
    def without(pipe: Any, call: Any) -> PipelineSchedule:
        return PipelinePolicy(pipe, call=call).schedule(STEPS)

    wan, sd15, heun = (NAMED[name] for name in ("Wan 2.1", "SD1.5", "SD3"))
    pipes = [family.build() for family in (wan, sd15, heun)]
    pipes[2].scheduler = FlowMatchHeunDiscreteScheduler()
    advice(
        "model.sigmas: the call of {} takes no `sigmas`, so its levels come from its scheduler",
        lambda: levelled(pipes[0], wan.call),
        lambda: without(pipes[0], wan.call),
    )
    advice(
        "model.sigmas: {} predicts {}, so its levels come from its {}: leave sigmas out",
        lambda: levelled(pipes[1], sd15.call),
        lambda: without(pipes[1], sd15.call),
    )
    advice(
        "model.sigmas: the {} of {} takes no levels: leave it out",
        lambda: levelled(pipes[2], heun.call),
        lambda: without(pipes[2], heun.call),
    )


def test_levels_in_call_name_the_setting() -> None:
    with pytest.raises(UserError, match=r"'sigmas' of .* is set by model.sigmas"):
        PipelinePolicy(sd3(), call=SQUARE | {"sigmas": [1.0, 0.5]})


@pytest.mark.slow
def test_other_levels_are_another_proof() -> None:
    made = [levelled(sd3(), SQUARE, s) for s in (LIST, LevelShift(shift=2.0))]
    made.append(PipelinePolicy(sd3(), call=SQUARE))
    digests = {proof_cache.digest(each, {}, PROMPTS, ()) for each in made}
    assert len(digests) == len(made)


def run(sigmas: Any, *words: str) -> Any:
    tree = dump(read_run(PROJECT / "configs" / "demo_flow_grpo.yaml"))
    tree["model"]["sigmas"] = sigmas
    tree["recipe"] |= {"steps": 4}
    tree["evaluate"] |= {"steps": None}
    made = override(run_from(tree, "run.yaml"), list(words))
    assert run_from(dump(made), "again") == made
    return made


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ({"shft": 3}, "model.sigmas: 'shft' is not known; did you mean 'shift'"),
        ({"shift": 0}, "model.sigmas: shift must be a number above 0, not 0"),
        ({}, "model.sigmas: shift must be a number above 0, not None"),
        (
            "linear",
            r"expected \{shift: NUMBER\}, a list of levels or FILE.py:FUNCTION",
        ),
        (3.0, r"model.sigmas: expected a list of levels such as \[1.0, 0.75, 0.5\], not 3.0"),
        ([], "expected a list of levels"),
        ([1.0, "x"], "'x' is not a number"),
        ([1.0, 0.5, 0.7], "levels must decrease, but 0.7 follows 0.5"),
        ([1.0, 1.0], "but 1.0 follows 1.0"),
        ([1.5, 0.5], "above 0 and at most 1, not 1.5"),
        ([1.0, 0.0, 0.0], "above 0 and at most 1, not 0.0"),
        ([1.0, float("nan")], "at most 1, not nan"),
    ],
)
def test_levels_that_are_none_are_refused_in_a_sentence(sigmas: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run(sigmas)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("inverted", [True, False])
def test_times_rise_or_fall_as_the_lists_own_where_it_begins_in_the_middle(inverted: bool) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=inverted)
    scheduler.set_timesteps(sigmas=[0.6, 0.3])
    kind = "inverted" if inverted else "flow"
    schedule = PipelineSchedule.of(scheduler, list(scheduler.timesteps), kind, "a pipeline")
    between = 550.0 if inverted else 450.0
    assert schedule.times(torch.tensor([0.6, 0.45])).tolist() == [scheduler.timesteps[0], between]


def test_a_final_zero_may_be_given() -> None:
    assert falling([*LIST, 0]) == LIST
    assert run([*LIST, 0.0]) == run(LIST)
    assert run(None, "--model.sigmas", "1", "0.9", "0.6", "0.2") == run(LIST)
    assert run(None, "--model.sigmas", "{shift: 3}").model.sigmas == LevelShift(shift=3.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe.steps", "5"], "lists 4 levels, but a sample has 5 steps: use 4 steps in"),
        (["--evaluate.steps", "5"], "lists 4 levels, but a sample has 5 steps: use 4 steps"),
        (
            ["--recipe.name", "mix_grpo", "--recipe.window", "2", "--model.sigmas", *NEAR_ZERO],
            "the plan does not fit model.sigmas: a window of 2",
        ),
    ],
)
def test_a_list_fits_the_steps_and_the_plan(words: list[str], message: str) -> None:
    made = run(LIST)
    check_plan(made)
    made = override(made, words)
    with pytest.raises(UserError, match=message):
        check_plan(made)


OWN = """
def two(steps):
    return [1.0, 0.5]

def raises(steps):
    return steps / 0
"""


def test_a_function_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(QUADRATIC + OWN)
    made = run("mine.py:quadratic")
    check_plan(made)
    assert made.levels(4) == (1.0, 0.5625, 0.25, 0.0625, 0.0)
    assert "mine.py" in StartRecord.of(made, 1).sources
    assert "(levels of model.sigmas)" in describe_run(made, 0, None)
    for name, message in (
        ("mine.py:two", "must return 4 levels for 4 steps"),
        (
            "mine.py:raises",
            r"model.sigmas: mine.py:raises raised ZeroDivisionError: .*py, line \d+\)",
        ),
        ("mine.py:three", "has no function or class 'three'"),
        ("none.py:two", "no such file: none.py"),
    ):
        with pytest.raises(UserError, match=message):
            check_plan(run(name))


def test_plan_names_a_call_without_sigmas(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(
        '{"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}'
    )
    (tmp_path / "transformer").mkdir()
    config = '{"_class_name": "WanTransformer3DModel", "num_layers": 1}'
    (tmp_path / "transformer" / "config.json").write_text(config)
    made = run(LIST, "--model.pipeline", str(tmp_path))
    assert any("WanPipeline takes no `sigmas`" in point for point in refusals(made))


@pytest.mark.slow
def test_a_run_on_levels_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = runs.tree(runs.write_pipeline(tmp_path / "pipeline"), tmp_path, runs.FLOW_GRPO)
    tree["model"]["sigmas"] = [*LIST]
    tree["evaluate"] |= {"steps": 4}
    tree["train"]["iterations"] = 1
    assert flowrl("train", runs.write(tree, tmp_path), "--folder", tmp_path / "run") == 0
    words = ["--train.iterations", "2", "--model.sigmas", "{shift: 2.0}"]
    assert flowrl("train", "--resume", tmp_path / "run", *words) == 0
    assert "model.sigmas [1.0, 0.9, 0.6, 0.2] -> " in capsys.readouterr().out
