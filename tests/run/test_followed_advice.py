"""Advice of messages on a run's own folder is followed: the next command is not refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import flowrl
from flowrl.settings.read import check_run, read_run
from tests.run.test_own_runs import tree
from tests.support import runs
from tests.support.advice import advice

REWARD = """
def near(samples):
    return [-float(abs(x).sum()) for x in samples.media]
"""


def begun(folder: Path, **given: Any) -> Path:
    """A finished run of points in the plane."""
    settings = tree(folder, iterations=1)
    if given:
        del settings["rewards"]
    flowrl.train(settings=settings, folder=folder / "run", **given)
    return folder / "run"


@pytest.mark.parametrize("way", ["python", "file"])
def test_a_run_of_a_reward_in_python_resumes_there_or_gets_a_file(tmp_path: Path, way: str) -> None:
    def near(samples: Any) -> list[float]:
        return [-float(abs(x).sum()) for x in samples.media]

    run = begun(tmp_path, rewards=[near])

    def followed() -> None:
        if way == "python":
            flowrl.train(resume=run, rewards=[near], iterations=2, trust=True)
            return
        (tmp_path / "mine.py").write_text(REWARD)
        settings = yaml.safe_load((run / "run.yaml").read_text())
        settings["rewards"][0]["name"] = f"{tmp_path}/mine.py:near"
        (run / "run.yaml").write_text(yaml.safe_dump(settings))
        resumed = ("train", "--resume", run, "--train.iterations", "2", "--trust")
        assert runs.flowrl(*resumed) == 0

    advice(
        "it is a Python object, which run.yaml cannot store: resume from Python with "
        "flowrl.train(resume=RUN, rewards=[{}]), or set its name to FILE.py:FUNCTION in run.yaml",
        lambda: check_run(read_run(run / "run.yaml")),
        followed,
    )


def test_samples_go_into_a_folder_in_place_of_a_link_or_elsewhere(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (run / "samples").rename(tmp_path / "outside")
    (run / "samples").symlink_to(tmp_path / "outside")
    before = sorted((tmp_path / "outside").rglob("*"))

    def sampled(**more: Any) -> None:
        flowrl.Run.open(run, trust=True).sample("a point", written=True, **more)

    def replaced() -> None:
        (run / "samples").unlink()
        (run / "samples").mkdir()
        sampled()

    for follow in (lambda: sampled(out=tmp_path / "new"), replaced):
        advice(
            "{} is a link, and a command writes into a run's own folders alone: replace it with a "
            "folder, or set",
            sampled,
            follow,
        )
    assert sorted((tmp_path / "outside").rglob("*")) == before
