"""Files of a folder of votes that anybody may have made: only its own samples are ever shown."""

import json
import os

import pytest

from flowrl.errors import UserError
from flowrl.votes.answer import table_rows
from flowrl.votes.log import VoteLog
from flowrl.votes.plan import (
    MOST_SAMPLE,
    MOST_SHOWN_TEXT,
    VotePlan,
    check_sample_files,
    sample_bytes,
)
from tests.support.voting import written_media, written_plan

OUTSIDE = ("/etc/x{}", "../x{}", "samples/../x{}", "samples/../../x{}", "x{}", "samples/a/x{}",
           "samples/x{}\n", "file:///etc/x{}", "~/x{}", "samples//x{}", "samples/.x{}")  # fmt: skip
FIELDS = {
    "file": (".png", ".apng", ".wav", ".txt"),
    "source": (".png",),
    "sound": (".wav",),
    "drawing": (".png",),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_plan_that_names_files_elsewhere_is_damaged(field, tmp_path):
    written_plan(tmp_path, pairs=1)
    whole = json.loads((tmp_path / "plan.json").read_text())
    for suffix in FIELDS[field]:
        for name in (pattern.format(suffix) for pattern in OUTSIDE):
            whole["samples"][0] |= {"file": "samples/00000.png", field: name}
            (tmp_path / "plan.json").write_text(json.dumps(whole))
            with pytest.raises(UserError, match=r"plan\.json is damaged.*outside its folder"):
                VotePlan.read(tmp_path)
        whole["samples"][0] |= {"file": "samples/00000.png", field: f"samples/x{suffix}"}
        (tmp_path / "plan.json").write_text(json.dumps(whole))
        VotePlan.read(tmp_path)
        del whole["samples"][0][field]


@pytest.mark.parametrize("kind", ["image", "video", "sound", "text", "edit"])
@pytest.mark.parametrize("how", ["absent", "link", "folder", "pipe", "large", "linked folder"])
def test_a_file_that_is_no_plain_one_is_named_before_anybody_votes(how, kind, tmp_path):
    folder, secret = tmp_path / "votes", tmp_path / "secret"
    plan = written_plan(folder, pairs=1) if kind == "image" else written_media(folder, kind, 1)
    check_sample_files(folder, plan)
    secret.write_text("secret")
    names = [name for sample in plan.samples for name in sample.files]
    for name in dict.fromkeys(names):
        path, kept = folder / name, tmp_path / "kept"
        path.rename(kept)
        if how == "link":
            path.symlink_to(secret)
        elif how == "folder":
            path.mkdir()
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "large":  # has no blocks on disk
            path.touch()
            os.truncate(path, 1 + (MOST_SHOWN_TEXT if kind == "text" else MOST_SAMPLE))
        elif how == "linked folder":
            kept.rename(path)
            path.parent.rename(tmp_path / "elsewhere")
            path.parent.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UserError, match=f"{path.name} cannot be read"):
            check_sample_files(folder, plan)
        with pytest.raises(UserError, match=f"{path.name} cannot be read"):
            sample_bytes(folder, name)
        if how == "linked folder":
            return
        path.rmdir() if how == "folder" else path.unlink(missing_ok=True)
        kept.rename(path)


def test_a_text_that_is_not_utf_8_is_named(tmp_path):
    plan = written_media(tmp_path, "text", 1)
    with VoteLog.opened(tmp_path, plan) as log:
        log.vote("rater-1", log.show("rater-1") or "", "left", 1.0)
    (tmp_path / plan.samples[0].file).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"00000\.txt cannot be read.*utf-8"):
        table_rows(tmp_path, VoteLog.read(tmp_path, plan))
