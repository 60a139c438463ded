"""Run files that an older version has written out, with all its defaults: `older_runs` are those of
five demos at commit 26ca889. A run that was begun with them resumes."""

from pathlib import Path

import pytest
import yaml

from flowrl.errors import UserError
from flowrl.settings.read import dump, run_from
from tests.support import runs, text_runs, tiny_lm
from tests.support.runs import flowrl

OLDER = sorted((Path(__file__).parent / "older_runs").glob("*.yaml"))


@pytest.mark.parametrize("path", OLDER, ids=[path.stem for path in OLDER])
def test_run_files_of_an_older_version_are_read(path: Path) -> None:
    run = run_from(yaml.safe_load(path.read_text(encoding="utf-8")), "checkpoint")
    assert dump(run_from(dump(run), "again")) == dump(run)


def test_a_text_run_of_an_older_version_resumes(tmp_path: Path) -> None:
    """Its run file has the guidance that had no effect on texts."""
    model = tiny_lm.write(tmp_path / "model")
    tree = text_runs.tree(model, tmp_path, text_runs.GRPO, iterations=1)
    run = tmp_path / "run"
    assert flowrl("train", runs.write(tree, tmp_path), "--folder", run) == 0
    settings = yaml.safe_load((run / "run.yaml").read_text())
    settings["model"]["guidance"] = {"sample": 1.0, "train": 1.0}
    (run / "run.yaml").write_text(yaml.safe_dump(settings))
    assert flowrl("train", "--resume", run, "--train.iterations", "2") == 0
    settings["model"]["guidance"]["sample"] = 2.0
    with pytest.raises(UserError, match="guidance is a setting of pipeline models"):
        run_from(settings, "run")
