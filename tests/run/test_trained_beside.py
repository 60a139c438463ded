"""One's own reward is measured on held-out prompts beside the judge, and judges nothing."""

import math
from pathlib import Path

import pytest

from flowrl.pages.curves import RunCharts
from flowrl.pages.run_folder import RunFolder
from flowrl.pages.run_page import run_page
from flowrl.run.watch.alarms import Alarms
from flowrl.settings.read import run_from
from tests.support.runs import flowrl, lines, write
from tests.support.warm import small

OWN = """
import os


def moody(samples):
    return [float(os.environ["MOOD"])] * len(samples.media)


def dark(samples):
    return [-float(image.mean()) for image in samples.media]


def no_prompt_of_others(samples):
    of_training = "level" in samples.meta[0]
    return [float(i) if of_training else float("nan") for i in range(len(samples.meta))]


def needs_a_column(samples):
    of_training = "level" in samples.meta[0]
    return [float(i if of_training else row["nowhere"]) for i, row in enumerate(samples.meta)]
"""


def settings_of(pipeline: Path, folder: Path, reward: str) -> dict:
    (folder / "own.py").write_text(OWN)
    tree = small(pipeline, folder)
    tree["rewards"] = [{"name": f"{folder / 'own.py'}:{reward}"}]
    tree["held_out_rewards"] = [{"name": "brightness"}]
    tree["train"] |= {"iterations": 1, "self_test": "warn"}
    return tree


@pytest.fixture(scope="module")
def judged(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    file = write(settings_of(pipeline, folder, "dark"), folder)
    assert flowrl("train", file, "--folder", folder / "run") == 0
    return folder / "run"


@pytest.mark.slow
def test_the_own_reward_is_measured_and_marked(judged: Path) -> None:
    for line in lines(judged):
        brightness, dark = (line[f"held_out/{n}"] for n in ("brightness", "trained/dark"))
        assert math.isclose(brightness, -dark, abs_tol=0.05)  # the eye's weights
    run = RunFolder.read(judged)
    assert run.judges == ["brightness"] and run.key == "brightness"
    titles = [chart.title for chart in RunCharts.of(run).deciding]
    assert titles[:2] == ["brightness", "dark (trained)"]  # a chart a reward
    assert "held-out dark (trained)" in run_page(run)
    best = max(lines(judged), key=lambda line: line["held_out/brightness"])["iteration"]
    assert [int(each.name) for each in (judged / "best").iterdir()] == [best]


def test_a_setting_leaves_it_out_and_one_reward_is_measured_once(tmp_path: Path) -> None:
    tree = settings_of(Path("a/b"), tmp_path, "dark")
    tree["model"] = {"pipeline": "a/b"}
    assert [each.label for each in run_from(tree, "x").trained_beside] == ["trained/dark"]
    tree["evaluate"]["trained"] = False
    assert not run_from(tree, "x").trained_beside
    tree["evaluate"]["trained"], tree["held_out_rewards"] = True, tree["rewards"]
    assert not run_from(tree, "x").trained_beside


@pytest.mark.slow
@pytest.mark.parametrize("name", ["needs_a_column", "no_prompt_of_others"])
def test_a_reward_that_cannot_score_held_out_prompts_ends_no_run(
    pipeline: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    tree = settings_of(pipeline, tmp_path, name)
    rows = "".join(f'{{"prompt": "a {animal}", "level": 1}}\n' for animal in ("cat", "dog"))
    (tmp_path / "rows.jsonl").write_text(rows)
    tree["prompts"]["train"] = str(tmp_path / "rows.jsonl")
    assert flowrl("train", write(tree, tmp_path), "--folder", tmp_path / "run") == 0
    assert f"{name} (trained) is not measured on held-out prompts" in capfd.readouterr().err
    assert not any(f"held_out/trained/{name}" in line for line in lines(tmp_path / "run"))


def test_a_trained_reward_that_falls_raises_no_alarm_as_a_judge_would() -> None:
    def evaluation(name: str, score: float) -> dict[str, float]:
        error = {f"held_out_gain_error/{name}": 0.001}
        return {f"held_out/{name}": score, f"held_out_std/{name}": 0.1, **error}

    for name, signs in (("taste", 1), ("trained/taste", 0)):
        alarms = Alarms()
        alarms.compare(evaluation(name, 0.9), 0)
        assert len(alarms.compare(evaluation(name, 0.1), 1)) == signs


def test_the_last_lines_of_a_collapsed_run_say_what_happened(
    pipeline: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The judge falls by itself: how far random weights move differs between processors."""
    tree = settings_of(pipeline, tmp_path, "dark")
    tree["held_out_rewards"] = [{"name": f"{tmp_path / 'own.py'}:moody"}]
    monkeypatch.setenv("MOOD", "0.9")
    assert flowrl("train", write(tree, tmp_path), "--folder", tmp_path / "run") == 0
    monkeypatch.setenv("MOOD", "0.1")
    more = ("--train.iterations", "2")
    capfd.readouterr()
    assert flowrl("train", "--resume", tmp_path / "run", *more) == 0
    said = capfd.readouterr().out.splitlines()
    run = RunFolder.read(tmp_path / "run")
    (happened,) = [
        i for i, line in enumerate(said)
        if f"the last after iteration {run.alarms[-1].iteration}: " in line
    ]  # fmt: skip
    best = said[happened + 1]
    assert run.raised and said[happened + 2].startswith("samples: ")  # the run's last lines
    assert best.startswith("The best weights are ") and best.endswith("--weights best")
    page = run_page(run)
    assert "<summary>What to do</summary>" in page and run.alarms[-1].sentence in page
