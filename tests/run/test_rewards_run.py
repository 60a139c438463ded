"""Rewards in a run: the test at its start, the alarm for constant ones, weights that change."""

from pathlib import Path

import pytest
import torch

from flowrl.errors import UserError
from flowrl.run.evaluate.guard import raised_by_training
from flowrl.run.start import start
from flowrl.run.watch.alarms import Alarms, Thresholds
from flowrl.session.progress import Progress
from flowrl.session.session import load_rewards, open_accelerator, open_session, prove_rewards
from flowrl.settings import RewardSpec, RunSettings
from flowrl.settings.read import check_run, dump, run_from
from rewards.types import MediaForm
from tests.support import runs
from tests.support.iterations import iterate

OWN = """
def constant(samples, value: float = 0.25):
    return [value] * len(samples.prompts)


def red(samples):
    return samples.media[:, 0].flatten(1).mean(1)


def fails(samples):
    import json
    return json.loads(3)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def run_with(tmp_path: Path, *rewards: dict, **train: object) -> RunSettings:
    tree = runs.tree(tmp_path, tmp_path, runs.NFT, **train)
    return run_from(tree | {"rewards": list(rewards)}, "test")


def proven(run: RunSettings) -> list[str]:
    prompts = run.prompts.read("train")
    return list(prove_rewards(load_rewards(run.rewards), run, prompts, MediaForm("image")))


def test_a_constant_reward_is_refused_before_the_run(tmp_path, own):
    constant = {"name": f"{own}:constant"}
    with pytest.raises(
        UserError, match=r"reward constant: noise.* all score 0\.25.*self_test: warn"
    ):
        proven(run_with(tmp_path, constant))
    (said,) = proven(run_with(tmp_path, constant, self_test="warn"))
    assert said.startswith("warning: reward constant")
    assert proven(run_with(tmp_path, constant, self_test="off")) == []
    first, second = proven(run_with(tmp_path, {"name": f"{own}:red"}, {"name": "brightness"}))
    assert first.startswith("reward red: 0.4953, 0.7, 0.5") and second.startswith(
        "reward brightness: 0.75"
    )


def test_a_reward_that_fails_on_its_first_call_leaves_no_folder(pipeline, tmp_path, own):
    """With its own line, not that of the library that it called; no checkpoint, so no folder."""
    tree = runs.tree(pipeline, tmp_path, runs.NFT) | {"rewards": [{"name": f"{own}:fails"}]}
    with pytest.raises(UserError, match=r"^the reward fails raised .* \(own\.py, 12\)") as caught:
        start(run_from(tree, "test"), "test", tmp_path / "run")
    assert type(caught.value) is UserError and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import sys\nsys.exit(3)", r"^reward f: .*odd\.py, line 2: SystemExit: 3"),
        ("\n\n1 / 0", r"^reward f: .*odd\.py, line 3: ZeroDivisionError: division by zero"),
        (
            "def f(samples):\n    return float('x')",
            r"^the reward f raised ValueError: .* \(odd\.py, 2\); train\.self_test",
        ),
    ],
)
def test_what_a_users_file_raises_is_told_with_its_line(tmp_path, text, told):
    (tmp_path / "odd.py").write_text(text)
    run = run_with(tmp_path, {"name": f"{tmp_path / 'odd.py'}:f"})
    with pytest.raises(UserError, match=told):
        proven(run)


def test_a_slip_in_a_users_reward_is_told_with_its_place(tmp_path, own):
    run = run_with(tmp_path, {"name": f"{own}:rde"})
    with pytest.raises(
        UserError, match=r"^rewards: .*no function or class 'rde'; did you mean 'red'"
    ):
        check_run(run)
    nested = {"name": "gate", "reward": "brightness", "where": {"name": "jpeg", "knd": 1}}
    with pytest.raises(UserError, match=r"^rewards: .*gate.*where: .*no setting 'knd'.*'kind'"):
        check_run(run_with(tmp_path, nested))


def test_labels_tell_rewards_apart(tmp_path, own):
    gate = {"name": "gate", "reward": "brightness", "where": "jpeg"}
    with pytest.raises(UserError, match="give it a `label`"):
        run_with(tmp_path, gate, gate | {"above": 2.0})
    given = [
        gate,
        gate | {"above": 2.0, "label": "far"},
        {"name": f"{own}:red"},
        {"name": own},
        {"name": "shapes", "kind": "strict"},
    ]
    run = run_with(tmp_path, *given)
    labels = ["gate", "far", "red", "own", "shapes.strict"]
    assert [spec.label for spec in run.rewards] == labels
    assert run.rewards[1].settings["above"] == 2.0 and "label" not in run.rewards[1].settings
    assert run_from(dump(run), "again") == run


def test_a_weight_is_linear_between_its_points():
    spec = RewardSpec.model_validate({"name": "jpeg", "weight": [[10, 1.0], [20, 0.5], [30, 2]]})
    at = [spec.weight_at(i) for i in (0, 10, 15, 20, 25, 30, 99)]
    assert at == [1, 1, 0.75, 0.5, 1.25, 2, 2]
    assert RewardSpec(name="jpeg", weight=3).weight_at(7) == 3
    for points in ([], [[2, 1.0], [1, 1.0]], [[1, 1.0], [1, 2.0]]):
        with pytest.raises(ValueError, match="increasing iterations"):
            RewardSpec.model_validate({"name": "jpeg", "weight": points})


def test_a_run_credits_with_the_weights_of_its_iteration(pipeline, tmp_path):
    tree = runs.tree(pipeline, tmp_path, runs.NFT)
    tree["rewards"] = [
        {"name": "brightness", "weight": [[0, 1.0], [1, 0.25]]},
        {"name": "jpeg", "weight": [[0, 0.0], [1, 2.0]]},
    ]
    run = run_from(tree, "test")
    session = open_session(run, tmp_path, open_accelerator(run, tmp_path))
    progress = Progress()
    for weights in ((1.0, 0.0), (0.25, 2.0)):
        assert session.weights(progress.iteration).tolist() == list(weights)
        metrics = iterate(session, progress).metrics
        parts = [metrics["reward/brightness"], metrics["reward/jpeg"]]
        total = sum(w * part for w, part in zip(weights, parts, strict=True))
        assert metrics["reward"] == pytest.approx(total, rel=1e-6)
        assert metrics["reward_std/jpeg"] > 0


def test_a_constant_score_raises_an_alarm_once(pipeline, tmp_path):
    session = runs.session(pipeline, tmp_path, runs.NFT)
    alarms = Alarms()
    seen, said = [], []
    for i in range(8):
        spread = 0.1 if i == 1 else 0.0
        metrics = {"skipped": 0.0, "reward": 0.5, "reward_std": 0.2}
        metrics |= {"reward/ocr": 0.0, "reward_std/ocr": spread}
        metrics |= {"reward/jpeg": 1.0, "reward_std/jpeg": 0.3}
        said += raised_by_training(session, alarms, metrics, i).texts
        seen.append(metrics["alarms"])
        if i == 3:
            state = alarms.state()
            alarms = Alarms()
            alarms.restore(state)
    assert seen == [0, 0, 0, 0, 0, 0, 1, 0]
    assert len(said) == 1
    assert "the reward ocr gave every sample of 5 iterations the same score, 0.000" in said[0]


def test_rounding_is_no_spread():
    alarms = Alarms(Thresholds(window=1))
    spread = float(torch.full((96,), 0.1).double().std(correction=0))
    assert alarms.constant({"reward/a": 0.1, "reward_std/a": spread}) == ["a"]
    assert alarms.constant({"reward/b": 1e-3, "reward_std/b": 1e-6}) == []
    assert alarms.constant({"reward/c": float("nan"), "reward_std/c": float("nan")}) == []
