"""Run files that an older version has written out, with all its defaults: `older_runs` are those of
five demos at commit 26ca889. A run that was begun with them resumes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.errors import UserError
from flowrl.paths import run_file
from flowrl.session.start_record import StartRecord, changes
from flowrl.settings.read import dump, run_from
from tests.support import runs, text_runs, tiny_lm
from tests.support.runs import flowrl
from tests.support.tiny_modular import MODULAR

OLDER = sorted((Path(__file__).parent / "older_runs").glob("*.yaml"))


@pytest.mark.parametrize("path", OLDER, ids=[path.stem for path in OLDER])
def test_run_files_of_an_older_version_are_read(path: Path) -> None:
    run = run_from(yaml.safe_load(path.read_text(encoding="utf-8")), "checkpoint")
    assert dump(run_from(dump(run), "again")) == dump(run)


OTHER_NOISE = "drew tokens with other noise"
SERVER = {"url": "http://localhost:1/v1", "model": "m"}
ADAPTERS = {"model": {"server": SERVER, "lora": {"rank": 4}}}
WEIGHTS = {"model": {"server": {**SERVER, "sync": "weights"}}}
OLD_WEIGHTS = {"model": {"server": {**SERVER, "sync": "none"}}}
COLD = {"evaluate": {"temperature": 0.0}}
DRAWS: dict[str, tuple[str, dict[str, Any], bool]] = {  # a run, changes of it, is the rule its own
    "texts": ("text_demo", {}, True),
    "texts with cold evaluations": ("text_demo", COLD, True),
    "a conversation": ("maze_demo", {}, True),
    "a joint run": ("demo_joint", {}, True),
    "images by tokens": ("papers/text_grpo_janus_pro_7b", {}, True),
    "given texts alone": ("text_demo_given", {}, True),
    "given texts alone, with cold evaluations": ("text_demo_given", COLD, False),
    "a server with the run's adapters": ("text_demo", ADAPTERS, False),
    "a server with the run's weights": ("text_demo", WEIGHTS, False),
    "a server with weights of its own": ("text_demo", OLD_WEIGHTS, True),
    "the same, with cold evaluations": ("text_demo", OLD_WEIGHTS | COLD, False),
    "images": ("demo_lora", {}, False),
    "videos": ("demo_video", {}, False),
}  # fmt: skip


@pytest.mark.parametrize("case", DRAWS)
def test_a_run_that_draws_tokens_is_told_of_the_other_noise(case: str, tmp_path: Path) -> None:
    name, changed, told = DRAWS[case]
    tree = yaml.safe_load(run_file(name).read_text(encoding="utf-8"))
    for section, values in changed.items():
        tree[section] = tree.get(section, {}) | values
    run = run_from(tree, "test")
    record = StartRecord.of(run, 1).state()
    begun = tmp_path / "000001"
    begun.mkdir()

    def said(record: dict[str, Any]) -> list[str]:
        (begun / "state.json").write_text(json.dumps({"origin": record}))
        return [line for line in changes(run, tmp_path, begun, 1) if OTHER_NOISE in line]

    assert said(record) == []
    del record["tokens_by_blocks"]
    assert len(said(record)) == told


def test_a_run_of_segments_is_told_of_their_encodings(tmp_path: Path) -> None:
    MODULAR["wan_animate"]().save_pretrained(str(tmp_path / "pipe"), overwrite_modular_index=True)
    for pipeline, told in ((tmp_path / "pipe", True), (Path("flowrl/demo/shapes-sd3"), False)):
        run = run_from(runs.tree(pipeline, tmp_path, runs.NFT), "test")
        record = StartRecord.of(run, 1).state()
        begun = tmp_path / "000001"
        begun.mkdir(exist_ok=True)
        for known in (True, False):
            record["segments_encoded"] = known
            (begun / "state.json").write_text(json.dumps({"origin": record}))
            lines = changes(run, tmp_path, begun, 1)
            assert any("a segment of a video" in line for line in lines) == (told and not known)


def test_a_text_run_of_an_older_version_resumes(tmp_path: Path, capsys) -> None:
    """Its run file has the guidance that had no effect on texts, and its tokens came of other
    noise, which it says once."""
    model = tiny_lm.write(tmp_path / "model")
    tree = text_runs.tree(model, tmp_path, text_runs.GRPO, iterations=1)
    run = tmp_path / "run"
    assert flowrl("train", runs.write(tree, tmp_path), "--folder", run) == 0
    settings = yaml.safe_load((run / "run.yaml").read_text())
    settings["model"]["guidance"] = {"sample": 1.0, "train": 1.0}
    (run / "run.yaml").write_text(yaml.safe_dump(settings))
    runs.as_older(run, "tokens_by_blocks")
    capsys.readouterr()
    assert flowrl("train", "--resume", run, "--train.iterations", "2") == 0
    assert capsys.readouterr().out.count(OTHER_NOISE) == 1
    assert flowrl("train", "--resume", run, "--train.iterations", "3") == 0
    assert OTHER_NOISE not in capsys.readouterr().out
    settings["model"]["guidance"]["sample"] = 2.0
    with pytest.raises(UserError, match="guidance is a setting of pipeline models"):
        run_from(settings, "run")
